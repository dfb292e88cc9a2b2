"""Recurrent layers on GPUs are cuDNN's op where eager torch takes it; its numbers by a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lazygt
from lazygt.graph.node import Node
from lazygt.host.gpus import Gpu
from lazygt.record.formulas import cudnn_recurrent
from lazygt.recovery import recover
from tests.support import cudnn_rnn

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]
FORWARD, BACKWARD = "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"
KINDS: list[type[nn.RNNBase]] = [nn.LSTM, nn.GRU, nn.RNN]
SIZES: dict[str, dict[str, Any]] = {
    "one": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "num_layers": 2},
    "deep": {"num_layers": 3, "bidirectional": True, "batch_first": True},
}
LAYERS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    *((kind, sizes) for kind in KINDS for sizes in SIZES.values()),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"proj_size": 2, "bias": False, "batch_first": True}),
]


def states_of(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


# -- what is recorded for GPUs ---------------------------------------------------------------------


def recorded(call: Callable[[], Any]) -> list[Node]:
    """The nodes of the plans of a dry session on GPUs."""
    with lazygt.session(launcher="dry", device="cuda") as s:
        kept = call()
        s.flush()
        nodes = [node for plan in s.plans() for node in plan.graph.nodes]
        del kept
    return nodes


def counts(nodes: list[Node]) -> tuple[int, int]:
    """How often the op and its backward are there; nothing is taken step by step beside them."""
    names = [node.op for node in nodes]
    found = names.count(FORWARD), names.count(BACKWARD)
    assert any(found) != any("addmm" in name or "linear" in name for name in names)
    return found


def step(kind: type[nn.RNNBase], dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A forward and a backward pass over whole sequences."""
    model = kind(3, 4, dtype=dtype, **sizes)
    out, state = model(torch.ones(5, 2, 3, dtype=dtype))
    (out.sum() + sum(part.sum() for part in states_of(state))).backward()
    return out, state, [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "sizes"), LAYERS)
def test_one_op_and_its_backward_for_all_layers(kind: Any, sizes: dict[str, Any]) -> None:
    def program() -> Any:
        out, state, grads = step(kind, **sizes)
        eager = kind(3, 4, **sizes, device="cpu")
        expected, last = eager(torch.ones(5, 2, 3, device="cpu"))
        pairs = [*zip(states_of(state), states_of(last), strict=True), (out, expected)]
        pairs += zip(grads, eager.parameters(), strict=True)
        for found, like in pairs:
            assert (found.shape, found.dtype) == (like.shape, like.dtype)
        assert out.stride() == expected.stride()
        return out, state, grads

    assert counts(recorded(program)) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_one_op_for_packed_sequences(kind: Any) -> None:
    def program() -> Any:
        model = kind(3, 4, num_layers=2, bidirectional=True)
        out, state = model(pack_padded_sequence(torch.ones(5, 3, 3), [5, 3, 1]))
        out.data.sum().backward()
        return out, state, [p.grad for p in model.parameters()]

    nodes = recorded(program)
    assert counts(nodes) == (1, 1)
    (node,) = [node for node in nodes if node.op == FORWARD]
    assert (3, 2, 2, 1, 1) in node.args


def test_dropout_between_layers_is_torchs() -> None:
    nodes = recorded(lambda: step(nn.GRU, num_layers=3, dropout=0.5))
    assert counts(nodes) == (3, 3)
    assert [node.op for node in nodes].count("aten.native_dropout.default") == 2

    def evaluated() -> Any:
        with torch.no_grad():
            return nn.GRU(3, 4, 3, dropout=0.5).eval()(torch.ones(5, 2, 3))

    assert counts(recorded(evaluated)) == (1, 0)


def test_steps_where_eager_torch_does_not_take_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def disabled() -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return step(nn.LSTM)

    def bfloat16() -> Any:
        return step(nn.LSTM, torch.bfloat16)

    assert counts(recorded(disabled)) == (0, 0)
    for gpu, taken in ((Gpu((8, 0), 91300), 1), (Gpu((8, 0), 91200), 0), (Gpu((7, 5), 91300), 0)):
        monkeypatch.setattr(cudnn_recurrent, "workers_gpu", lambda gpu=gpu: gpu)
        assert counts(recorded(bfloat16)) == (taken, taken)
    for dtype in (torch.float16, torch.float64):
        assert counts(recorded(lambda dtype=dtype: step(nn.RNN, dtype))) == (1, 1)
    with lazygt.session(launcher="dry") as s:
        kept = step(nn.GRU)
        s.flush()
        assert counts([node for plan in s.plans() for node in plan.graph.nodes]) == (0, 0)
        del kept


def test_autocast_casts_weights_once() -> None:
    def program() -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, state, grads = step(nn.LSTM, num_layers=2)
        assert {t.dtype for t in (out, *state)} == {torch.float16}
        assert {grad.dtype for grad in grads} == {torch.float32}
        return out, state, grads

    nodes = recorded(program)
    assert counts(nodes) == (1, 1)


def test_errors_are_those_of_eager_torch() -> None:
    with lazygt.session(launcher="dry", device="cuda"):
        model, x = nn.GRU(3, 4), torch.ones(5, 2, 3)
        with pytest.raises(RuntimeError, match="rnn: hx is not contiguous"):
            model(x, torch.ones(1, 4, 2).mT)
        with pytest.raises(RuntimeError, match="tensor with Float and hidden tensor with Half"):
            model(x, torch.ones(1, 2, 4, dtype=torch.half))
        with pytest.raises(
            RuntimeError, match=r"Expected hidden size \[1, 2, 4\], got \[1, 3, 4\]"
        ):
            torch.gru(x, torch.ones(1, 3, 4), [*model.parameters()], True, 1, 0.0, True, False,
                      False)  # fmt: skip
        out, _ = model.eval()(x)
        with pytest.raises(RuntimeError, match="backward can only be called in training mode"):
            out.sum().backward()
        out, _ = model.train()(x.requires_grad_())
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="Double backwards is not supported for CuDNN RNNs"):
            grad.sum().backward()


# -- numbers, by a stand-in ------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions on CPUs that record what those on GPUs do, and have kernels for it."""
    monkeypatch.setattr(cudnn_recurrent, "workers_device", lambda: "cuda")
    with cudnn_rnn.registered():
        yield


def train(device: str, kind: Any, sizes: dict[str, Any], packed: bool = False) -> list[Tensor]:
    """Outputs, states and all gradients after two backward passes through one forward."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, x = kind(3, 4, **sizes), torch.randn(5, 4, 3)
        count = model.num_layers * (2 if model.bidirectional else 1)
        samples = 5 if model.batch_first and not packed else 4
        widths = [model.proj_size or 4, 4][: 2 if kind is nn.LSTM else 1]
        first = [torch.randn(count, samples, width) for width in widths]
    model.to(device)
    leaves = [t.to(device).requires_grad_() for t in (x, *first)]
    given: Any = tuple(leaves[1:]) if kind is nn.LSTM else leaves[1]
    data: Any = leaves[0]
    if packed:
        data = pack_padded_sequence(data, [5, 4, 4, 1])
    out, state = model(data, given)
    out = out.data if isinstance(out, PackedSequence) else out
    loss = out.square().sum() + sum(part.square().sum() for part in states_of(state))
    loss.backward(retain_graph=True)
    results = [out, *states_of(state)]
    results += [t.grad.clone() for t in (*leaves, *model.parameters())]
    loss.backward()
    results += [t.grad for t in (*leaves, *model.parameters())]
    return [t.detach().cpu() for t in results]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "sizes"), LAYERS)
def test_numbers_are_those_of_eager_torch(kind: Any, sizes: dict[str, Any], packed: bool) -> None:
    expected = train("cpu", kind, sizes, packed)
    with lazygt.session(launcher="inline") as s:
        found = train("lazygt", kind, sizes, packed)
        names = [node.op for plan in s.plans() for node in plan.graph.nodes]
    assert (names.count(FORWARD), names.count(BACKWARD)) == (1, 2)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("plan_code", ["native", "python"])
@pytest.mark.parametrize("kind", KINDS)
def test_reserve_is_kept_from_one_plan_to_the_next(kind: Any, plan_code: str) -> None:
    """Each step is a plan; the reserve is a value that one leaves for others."""

    def passes(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, x = kind(3, 4, num_layers=2), torch.randn(5, 4, 3)
        model.to(device)
        out, _ = model(x.to(device))
        loss = out.square().sum()
        found = [loss.detach().cpu()]  # the forward is a plan
        for _ in range(3):  # interpreted, then as a program
            loss.backward(retain_graph=True)
            found += [p.grad.clone().cpu() for p in model.parameters()]
        return found

    expected = passes("cpu")
    with lazygt.session(launcher="inline", compile=lazygt.Compile(plan_code=plan_code)):
        found = passes("lazygt")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("on_cpu")
def test_layers_with_dropout_between_them() -> None:
    sizes = {"num_layers": 3, "bidirectional": True, "batch_first": True}

    def passes(device: str, dropout: float) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, x = nn.LSTM(3, 4, **sizes, dropout=dropout), torch.randn(5, 4, 3)
        model.to(device)
        torch.manual_seed(1)
        out, (h, c) = model(x.to(device))
        (out.square().sum() + h.sum() + c.sum()).backward()
        return [t.detach().cpu() for t in (out, h, c, *(p.grad for p in model.parameters()))]

    expected = passes("cpu", 0.4)
    with lazygt.session(launcher="inline"):
        found = passes("lazygt", 0.4)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("on_cpu")
def test_training_and_inference_in_turn() -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, x = nn.GRU(3, 4, 2), torch.randn(5, 4, 3)
        model, x = model.to(device), x.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x)[0].square().sum()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                seen.append(model.eval()(x)[0].sum().cpu())
            model.train()
            seen.append(loss.detach().cpu())
        return seen

    expected = run("cpu")
    with lazygt.session(launcher="inline"):
        found = run("lazygt")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("on_cpu")
def test_transforms_are_taken_step_by_step() -> None:
    """The op has no rules for them."""
    with lazygt.session(launcher="inline") as s:
        model, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
        grad = torch.func.grad(lambda x: model(x)[0].square().sum())(x)
        expected = torch.autograd.grad(model(x.requires_grad_())[0].square().sum(), x)[0]
        torch.testing.assert_close(grad.cpu(), expected.cpu())
        names = [node.op for plan in s.plans() for node in plan.graph.nodes]
    assert (names.count(FORWARD), names.count(BACKWARD)) == (1, 1)


# -- on several GPUs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_samples_on_two_gpus_exchange_gradients_only(kind: Any) -> None:
    """The backward makes a reserve of its own by another forward."""
    with lazygt.session(launcher="dry", device="cuda", mesh={"data": 2}) as s:
        model = kind(3, 4, num_layers=2, batch_first=True)
        x = lazygt.distribute(torch.ones(8, 5, 3), {"data": lazygt.Shard(0)})
        out, _ = model(x)
        out.square().sum().backward()
        s.flush()
        plans = s.plans()
        assert {c.kind for plan in plans for c in plan.collectives} == {"all_reduce"}
        assert counts([node for plan in plans for node in plan.graph.nodes]) == (2, 1)


# -- in worker processes ---------------------------------------------------------------------------

IN_WORKERS = """
import sys
if "lazygt.runtime.launch.process" in sys.orig_argv:
    from tests.support import cudnn_rnn
    kept = cudnn_rnn.registered()
    kept.__enter__()
"""


@pytest.mark.slow
@pytest.mark.anew
@pytest.mark.parametrize("seconds", [1e9, 0.0])
def test_reserve_outlives_workers(
    seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between passes through one forward the worker dies; the forward runs again, or its reserve
    comes from a snapshot."""
    monkeypatch.setattr(recover, "_LEAST_SECONDS", seconds)
    (tmp_path / "sitecustomize.py").write_text(IN_WORKERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(cudnn_recurrent, "workers_device", lambda: "cuda")

    def passes(device: str, between: Callable[[], None]) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, x = nn.LSTM(3, 4, 2), torch.randn(5, 2, 3)
        loss = model.to(device)(x.to(device))[0].square().sum()
        seen = [loss.detach().cpu()]
        for _ in range(2):
            between()
            loss.backward(retain_graph=True)
            seen += [p.grad.clone().cpu() for p in model.parameters()]
        return seen

    expected = passes("cpu", lambda: None)
    with lazygt.session(launcher="process") as s:

        def kill() -> None:
            (worker,) = s._link._pool.workers
            worker.process.kill()

        for ours, theirs in zip(passes("lazygt", kill), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert (s.stats()["snapshots"] > 0) == (seconds == 0.0)
