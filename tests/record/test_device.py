"""Device "lazygt" is a device of torch's: what torch code does with one works."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lazygt
from lazygt.record.tensor import storage_of, view_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


FACTORIES: dict[str, Callable[..., torch.Tensor]] = {
    "empty": lambda **k: torch.empty(2, 3, **k),
    "empty_permuted": lambda **k: torch.empty_permuted((2, 3), (1, 0), **k),
    "empty_strided": lambda **k: torch.empty_strided((2, 3), (1, 2), **k),
    "ones": lambda **k: torch.ones(2, 3, **k),
    "zeros": lambda **k: torch.zeros(3, dtype=torch.int8, **k),
    "full": lambda **k: torch.full((2,), 3, **k),
    "eye": lambda **k: torch.eye(3, **k),
    "arange": lambda **k: torch.arange(1, 10, 2, **k),
    "linspace": lambda **k: torch.linspace(0, 1, 5, **k),
    "logspace": lambda **k: torch.logspace(0, 1, 5, **k),
    "bartlett_window": lambda **k: torch.bartlett_window(5, **k),
    "blackman_window": lambda **k: torch.blackman_window(5, **k),
    "hamming_window": lambda **k: torch.hamming_window(5, **k),
    "hann_window": lambda **k: torch.hann_window(5, **k),
    "kaiser_window": lambda **k: torch.kaiser_window(5, **k),
    "fftfreq": lambda **k: torch.fft.fftfreq(5, **k),
    "fftfreq_even": lambda **k: torch.fft.fftfreq(6, 0.3, **k),
    "rfftfreq": lambda **k: torch.fft.rfftfreq(5, **k),
    "tril_indices": lambda **k: torch.tril_indices(3, 3, **k),
    "triu_indices": lambda **k: torch.triu_indices(3, 3, **k),
    "scalar_tensor": lambda **k: torch.scalar_tensor(3.0, **k),
    "tensor": lambda **k: torch.tensor([[1.0, 2.0]], **k),
    "tensor_complex": lambda **k: torch.tensor([1 + 2j], **k),
    "tensor_bool": lambda **k: torch.tensor(True, **k),
    "as_tensor": lambda **k: torch.as_tensor([1, 2], **k),
    "asarray": lambda **k: torch.asarray([1, 2], **k),
    "rand": lambda **k: torch.rand(3, **k),
    "randn": lambda **k: torch.randn(3, **k),
    "randint": lambda **k: torch.randint(0, 9, (3,), **k),
    "randperm": lambda **k: torch.randperm(9, **k),
    "normal": lambda **k: torch.normal(0.0, 2.0, (3,), **k),
}


@pytest.mark.parametrize("device", [None, "lazygt", "lazygt:0", torch.device("lazygt")], ids=str)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str, device: Any) -> None:
    make = FACTORIES[name]
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    with lazygt.session(launcher="inline"):
        made = make() if device is None else make(device=device)
        assert made.device == torch.device("lazygt", 0)
        assert (made.shape, made.stride(), made.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        if not name.startswith("empty"):
            assert torch.equal(made.cpu(), expected)


def test_every_constructor_of_torch_is_covered() -> None:
    names = {f.__name__.removeprefix("fft_") for f in torch.utils._device._device_constructors()}
    left_out = {"empty_quantized", "nested_tensor", "range"}  # no lazy ones; deprecated
    left_out |= {name for name in names if name.startswith("sparse_")}
    assert names - left_out <= set(FACTORIES)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_can_not_be_moved(s: lazygt.Session, kind: str) -> None:
    blocks = (2, 2) if kind[0] == "b" else None
    layout = getattr(torch, f"sparse_{kind}")
    sparse = torch.eye(4, device="cpu").to_sparse(layout=layout, blocksize=blocks)
    with pytest.raises(NotImplementedError, match="dense strided tensors only"):
        sparse.to("lazygt")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_and_quantized_constructors_stay_on_the_cpu(s: lazygt.Session) -> None:
    assert torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)).device.type == "cpu"
    x = torch.quantize_per_tensor(torch.zeros(2, device="cpu"), 1.0, 0, torch.qint8)
    with pytest.raises(NotImplementedError, match="quantized tensors are not supported"):
        x.to("lazygt")


def test_new_methods_and_likes_follow_their_tensor(s: lazygt.Session) -> None:
    lazy, host = torch.zeros(3), torch.zeros(3, device="cpu")
    for x, kind in ((lazy, "lazygt"), (host, "cpu")):
        made = [x.new_zeros(2), x.new_tensor([1.0]), x.new_empty(2), x.new_full((2,), 1.0)]
        made += [torch.zeros_like(x), torch.empty_like(x), torch.rand_like(x), x.new_ones(1)]
        assert {t.device.type for t in made} == {kind}
    assert torch.zeros_like(lazy, device="cpu").device.type == "cpu"


def test_device_contexts_and_default_device(s: lazygt.Session) -> None:
    with torch.device("cpu"):
        assert torch.zeros(2).device.type == "cpu"
        assert nn.Linear(2, 2).weight.device.type == "cpu"
        with torch.device("lazygt"):
            assert torch.zeros(2).device.type == "lazygt"
    assert torch.zeros(2).device.type == "lazygt"
    torch.set_default_device("cpu")
    try:
        assert torch.tensor([1.0]).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "lazygt"


def test_default_device_off() -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(default_device=False)):
        assert torch.zeros(2).device.type == "cpu"
        assert torch.zeros(2, device="lazygt").device.type == "lazygt"
        with torch.device("lazygt"):
            assert torch.randn(2).device.type == "lazygt"
    assert torch.zeros(2).device.type == "cpu"


def test_nothing_of_torch_stays_changed_after_a_session() -> None:
    before = [torch.zeros, torch.tensor, torch.normal, torch.get_rng_state, torch.fft.fftfreq]
    with lazygt.session(launcher="inline"):
        assert torch.zeros is not before[0]
    assert before == [
        torch.zeros,
        torch.tensor,
        torch.normal,
        torch.get_rng_state,
        torch.fft.fftfreq,
    ]
    with torch.random.fork_rng():  # asks lazygt for its generators, of which there are none now
        torch.rand(1)


def test_tensor_moves_to_device_and_back(s: lazygt.Session) -> None:
    host = torch.arange(6.0, device="cpu").reshape(2, 3).t()
    lazy = host.to("lazygt")
    assert lazy.is_lazygt  # type: ignore[attr-defined]
    assert lazy.stride() == host.stride()
    assert torch.equal(lazy.to("cpu"), host)
    assert torch.equal(lazy.cpu(), host)
    assert torch.equal(lazy.to("cpu", torch.float64), host.double())
    assert lazy.to("lazygt") is lazy
    assert torch.equal(host.lazygt().cpu(), host)  # type: ignore[attr-defined]
    host.zero_()
    assert lazy.sum().item() == 15


def test_a_cpu_generator_keeps_the_tensor_on_the_cpu(s: lazygt.Session) -> None:
    generator = torch.Generator().manual_seed(3)
    assert torch.randn(4, generator=generator).device.type == "cpu"
    assert torch.randperm(4, generator=generator).device.type == "cpu"


def test_deepcopy_keeps_ties_and_grads(s: lazygt.Session) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model(torch.randn(2, 4)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert torch.equal(twin[0].weight.grad, model[0].weight.grad)
    assert twin[0].weight.grad is not model[0].weight.grad
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum().item() > 0


def test_deepcopy_keeps_views_of_one_storage(s: lazygt.Session) -> None:
    x = torch.arange(6.0)
    x2, view2 = copy.deepcopy((x, x[1:4]))
    view2.zero_()
    assert x2.tolist() == [0, 0, 0, 0, 4, 5]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_deepcopy_of_non_leaf_is_refused_as_in_torch(s: lazygt.Session) -> None:
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(torch.ones(2, requires_grad=True) * 2)


# -- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_loads_without_lazygt(s: lazygt.Session, tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "a.pt"
    weights = nn.Linear(3, 2).state_dict()
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    code = (
        "import sys, torch; d = torch.load(sys.argv[1]); assert 'lazygt' not in sys.modules;"
        "assert all(type(t) is torch.Tensor and t.device.type == 'cpu' for t in d.values());"
        "print(d['weight'].tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == str(weights["weight"].tolist())


@pytest.mark.parametrize("where", ["lazygt", "lazygt:0", torch.device("lazygt"), {"cpu": "lazygt"}])
@pytest.mark.parametrize("weights_only", [True, False])
def test_load_to_lazygt(s: lazygt.Session, tmp_path: Path, where: Any, weights_only: bool) -> None:
    weights = nn.BatchNorm1d(3).state_dict()
    torch.save(weights, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", map_location=where, weights_only=weights_only)
    assert {t.device.type for t in loaded.values()} == {"lazygt"}
    for name, value in weights.items():
        assert torch.equal(loaded[name], value)


def test_loaded_tensor_is_no_view(s: lazygt.Session, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict() | {"none": torch.empty(0, 3)}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", map_location="lazygt")
    assert not any(value._is_view() or view_of(value) for value in loaded.values())
    assert {name: tuple(storage_of(value).meta.shape) for name, value in loaded.items()} == {
        "weight": (3, 2),
        "bias": (3,),
        "none": (0, 3),
    }
    twin = nn.Linear(2, 3)
    twin.load_state_dict({name: loaded[name] for name in ("weight", "bias")}, assign=True)
    lazygt.fully_shard(twin, mesh_dim="workers")  # refuses views


def test_a_module_made_on_the_meta_device_gets_memory_of_its_own(s: lazygt.Session) -> None:
    module = nn.Linear(2, 3, device="meta").to(torch.float64).to_empty(device="lazygt")
    assert view_of(module.weight) is None
    turned = torch.empty_like(torch.empty(2, 3, 4, device="meta").mT, device="lazygt")
    assert view_of(turned) is None
    assert turned.stride() == (12, 1, 4)
    lazygt.fully_shard(module, mesh_dim="workers")  # refuses views
    nn.init.ones_(module.weight)
    assert module.weight.sum().item() == 6


@pytest.mark.parametrize("where", [None, "lazygt"])
def test_ties_survive_saving(s: lazygt.Session, tmp_path: Path, where: str | None) -> None:
    x = torch.arange(6.0)
    torch.save({"x": x, "view": x[1:3], "t": x.view(2, 3).t()}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", map_location=where)
    loaded["view"].zero_()
    assert loaded["x"].tolist() == [0, 0, 0, 3, 4, 5]
    assert loaded["t"].tolist() == [[0, 3], [0, 4], [0, 5]]


def test_a_storage_stays_the_same_however_often_it_is_asked(s: lazygt.Session) -> None:
    x = torch.arange(6.0)
    view = x[2:]
    assert {t.untyped_storage().data_ptr() for t in (x, view) * 3} == {x.data_ptr()}
    assert {view.data_ptr() for _ in range(3)} == {x.data_ptr() + 2 * x.itemsize}
    assert x.clone().data_ptr() != x.data_ptr()


def test_saving_twice_saves_the_newer_values(s: lazygt.Session, tmp_path: Path) -> None:
    x, step = torch.arange(6.0), torch.tensor(1.0)
    kept = x.__reduce_ex__(2), step.__reduce_ex__(2)
    x.add_(1)
    step.add_(1)
    torch.save((x, step), tmp_path / "a.pt")
    assert [t.tolist() for t in torch.load(tmp_path / "a.pt")] == [[1, 2, 3, 4, 5, 6], 2]
    assert kept


def test_whole_modules_and_optimizers_load(s: lazygt.Session, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.save((model, optimizer.state_dict()), tmp_path / "a.pt")
    for where in ("lazygt", "cpu"):
        twin, state = torch.load(tmp_path / "a.pt", weights_only=False, map_location=where)
        twin.to("lazygt")
        again = torch.optim.Adam(twin.parameters())
        again.load_state_dict(state)
        assert isinstance(twin[0].weight, nn.Parameter)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            b.grad = a.grad.clone()
        before = [p.detach().clone() for p in model.parameters()]
        again.step()
        copy_of = torch.optim.Adam(before)
        copy_of.load_state_dict(optimizer.state_dict())
        for a, b in zip(before, model.parameters(), strict=True):
            a.grad = b.grad
        copy_of.step()
        assert all(torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))


def test_load_to_lazygt_outside_a_session_says_so(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pt")
    with pytest.raises(lazygt.NoSession, match=r"with lazygt\.session"):
        torch.load(tmp_path / "a.pt", map_location="lazygt")


def test_load_state_dict(s: lazygt.Session) -> None:
    model = nn.Linear(3, 3)
    host = {name: torch.full_like(value, 2.0, device="cpu") for name, value in
            model.state_dict().items()}  # fmt: skip
    model.load_state_dict(host)
    assert model.weight.device.type == "lazygt"
    assert model.weight.sum().item() == 18


# -- data ------------------------------------------------------------------------------------


class _Numbers(Dataset[torch.Tensor]):
    """Makes its tensors in the loader's worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders(workers: int, pin: bool) -> None:
    def batches() -> list[Any]:
        data = TensorDataset(
            torch.arange(20.0, device="cpu").reshape(10, 2), torch.arange(10, device="cpu")
        )
        torch.manual_seed(5)
        loader = DataLoader(data, 4, shuffle=True, num_workers=workers, pin_memory=pin)
        return list(loader)

    expected = batches()
    with lazygt.session(launcher="inline"):
        found = batches()
        assert all(t.device.type == "cpu" for batch in found for t in batch)
        lazy = [x.to("lazygt", non_blocking=True) for x, _ in found]
        for (x, y), (fx, fy), again in zip(expected, found, lazy, strict=True):
            assert torch.equal(x, fx)
            assert torch.equal(y, fy)
            assert torch.equal(again.cpu(), x)


def test_forked_loader_workers_make_cpu_tensors(s: lazygt.Session) -> None:
    loader = DataLoader(_Numbers(), 4, num_workers=2, multiprocessing_context="fork")
    assert [batch.device.type for batch in loader] == ["cpu", "cpu"]


class _Held(Dataset[torch.Tensor]):
    """Reads what lies in the session: by an attribute, and in a list."""

    def __init__(self) -> None:
        self.table = torch.arange(16.0).reshape(8, 2)
        self.offsets = [nn.Parameter(torch.ones(2)), self.table[0]]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.table[index] + self.offsets[0] + self.offsets[1]).detach()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_read_a_dataset_of_the_session(s: lazygt.Session, start: str) -> None:
    data = _Held()
    tensors = [data.table, *data.offsets]
    loader = DataLoader(data, 4, num_workers=2, multiprocessing_context=start, pin_memory=True)
    for _ in range(2):  # each epoch starts processes
        batches = list(loader)
        assert [batch.device.type for batch in batches] == ["lazygt", "lazygt"]
        assert (
            torch.cat(batches).tolist()
            == (torch.arange(16.0).reshape(8, 2) + 1).add(torch.tensor([0.0, 1.0])).tolist()
        )
    assert all(a is b for a, b in zip(tensors, [data.table, *data.offsets], strict=True))
    data.table[0] = 5
    assert data.offsets[1].tolist() == [5, 5]  # a view of it still
    assert isinstance(data.offsets[0], nn.Parameter)
    assert {t.device.type for t in tensors} == {"lazygt"}


def test_a_forked_process_says_why_it_can_not_read(s: lazygt.Session) -> None:
    global _TABLE
    _TABLE = torch.ones(8, 2)
    loader = DataLoader(_OfAGlobal(), 4, num_workers=1, multiprocessing_context="fork")
    batches: Any = iter(loader)
    with pytest.raises(lazygt.NoSession, match=r"forked from.*has to hang on its dataset"):
        next(batches)
    batches._shutdown_workers()


_TABLE: torch.Tensor


class _OfAGlobal(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return _TABLE[index]


def test_pin_memory_gives_the_tensor_itself(s: lazygt.Session) -> None:
    for x in (torch.ones(3, device="cpu"), torch.ones(3)):
        assert torch.equal(x.pin_memory(), x)
    assert not torch.ones(3).is_pinned()
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), 2, pin_memory=True)
    assert [x.device.type for (x,) in loader] == ["lazygt", "lazygt"]


# -- autograd --------------------------------------------------------------------------------


def test_module_and_tensor_hooks(s: lazygt.Session) -> None:
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight.register_hook(lambda grad: grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["accumulated", "backward", "forward", "pre"]
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2, 2], [2, 2]]


_RAISING = """
import sys, torch, lazygt
from torch.utils.checkpoint import checkpoint

class Mine(Exception):
    pass

def boom(*_):
    raise Mine("boom")

def function(backward):
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        backward_ = staticmethod(lambda ctx, grad: backward(grad))
    Fn.backward = Fn.backward_
    return Fn.apply

def bad_op(grad):
    return grad @ torch.ones(7, 7)

def second_time_bad(calls=[]):
    def f(x):
        calls.append(1)
        return boom() if len(calls) == 2 else x * x
    return f

which = sys.argv[1]
with lazygt.session(launcher="inline"):
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    expected, run = Mine, lambda loss: loss.backward()
    if which == "tensor hook": y.register_hook(boom)
    elif which == "leaf hook": x.register_hook(boom)
    elif which == "accumulate hook": x.register_post_accumulate_grad_hook(boom)
    elif which == "node hook": y.grad_fn.register_hook(boom)
    elif which == "node prehook": y.grad_fn.register_prehook(boom)
    elif which == "multi hook": torch.autograd.graph.register_multi_grad_hook((x, y), boom)
    elif which == "interrupt":
        def stop(_): raise KeyboardInterrupt
        y.register_hook(stop)
        expected = KeyboardInterrupt
    elif which == "module hook":
        layer = torch.nn.Linear(3, 3)
        layer.register_full_backward_hook(boom)
        y = layer(x)
    elif which == "unpack hook":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, boom): y = (x * x).sin()
    elif which == "function": y = function(boom)(x)
    elif which == "op": y, expected = function(bad_op)(x), RuntimeError
    elif which == "autograd.grad":
        y, expected, run = function(bad_op)(x), RuntimeError, lambda t: torch.autograd.grad(t, x)
    elif which == "autograd.backward":
        y, expected, run = function(bad_op)(x), RuntimeError, torch.autograd.backward
    elif which == "caught in the hook":
        def careful(grad):
            try:
                bad_op(grad)
            except RuntimeError:
                return grad * 5
        y.register_hook(careful)
        y.sum().backward()
        assert x.grad.tolist() == [10, 10, 10]
        y, expected = function(boom)(x), Mine
    elif which == "checkpoint": y = checkpoint(function(boom), x, use_reentrant=False)
    elif which == "reentrant checkpoint": y = checkpoint(function(boom), x, use_reentrant=True)
    elif which == "recompute": y = checkpoint(second_time_bad(), x, use_reentrant=False)
    elif which == "failed on the worker":
        y.register_hook(lambda g: g * torch.ones(3)[torch.tensor([9, 9])].sum().item())
        expected = lazygt.ExecutionError
    else: raise AssertionError(which)
    try:
        run(y.sum())
    except expected as error:
        text = str(error)
    else:
        raise AssertionError("nothing was raised")
    if expected is Mine: assert text == "boom", text
    if expected is RuntimeError: assert "cannot be multiplied" in text and "cast" not in text, text
    x = torch.ones(3, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
print("done")
"""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [
        "tensor hook", "leaf hook", "accumulate hook", "node hook", "node prehook", "multi hook",
        "interrupt", "module hook", "unpack hook", "function", "op", "autograd.grad",
        "autograd.backward", "caught in the hook", "checkpoint", "reentrant checkpoint",
        "recompute", "failed on the worker",
    ],
)  # fmt: skip
def test_exception_in_backward_reaches_user(which: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", _RAISING, which],
        capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2],
        env=dict(os.environ),
    )  # fmt: skip
    assert (out.returncode, out.stdout.strip()) == (0, "done"), out.stderr


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_dropout(s: lazygt.Session, reentrant: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(layer(x)), 0.5)

    torch.manual_seed(1)
    expected = torch.autograd.grad(block(x).sum(), [x, layer.weight])
    after = torch.rand(3)
    torch.manual_seed(1)
    before = s.stats()
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    flushes = {k: v - before["flushes"].get(k, 0) for k, v in s.stats()["flushes"].items()}
    assert {k for k, v in flushes.items() if v} == {"backward"}
    assert s.stats()["fetches"] == before["fetches"]
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(layer.weight.grad, expected[1])
    assert torch.equal(torch.rand(3), after)


def test_custom_function(s: lazygt.Session) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2 * ctx.saved_tensors[0]

    x = torch.arange(3.0, requires_grad=True)
    Square.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 4]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_function_transforms(s: lazygt.Session) -> None:
    x = torch.arange(3.0)
    assert torch.func.grad(lambda x: (x**2).sum())(x).tolist() == [0, 2, 4]
    assert torch.func.vmap(lambda x: x * 2 + 1)(x).tolist() == [1, 3, 5]
    assert torch.func.vmap(torch.func.grad(lambda x: x**2))(x).tolist() == [0, 2, 4]
    value, tangent = torch.func.jvp(lambda x: x**2, (x,), (torch.ones(3),))
    assert (value.tolist(), tangent.tolist()) == ([0, 1, 4], [0, 2, 4])
    assert torch.func.jacrev(lambda x: x**2)(x).diag().tolist() == [0, 2, 4]
    assert torch.func.hessian(lambda x: (x**3).sum())(x).diag().tolist() == [0, 6, 12]
    model, batch = nn.Linear(3, 2), torch.randn(5, 3)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        dict(model.named_parameters()), batch
    )
    assert torch.equal(grads["weight"][:, 0], batch)


def test_autocast_is_that_of_the_cpu() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
        x, y = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(x)
            loss = F.cross_entropy(out, y)
        assert out.dtype == torch.bfloat16
        loss.backward()
        return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    expected = run("cpu")
    with lazygt.session(launcher="inline"):
        found = run("lazygt")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# -- modules ---------------------------------------------------------------------------------


def test_modules_move(s: lazygt.Session) -> None:
    with torch.device("cpu"):
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    kept = model[0].weight.clone()
    for move in (lambda: model.to("lazygt"), lambda: model.lazygt()):
        move()
        assert {p.device.type for p in model.parameters()} == {"lazygt"}
        assert {b.device.type for b in model.buffers()} == {"lazygt"}
        assert isinstance(model[0].weight, nn.Parameter)
        model.cpu()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert torch.equal(model[0].weight, kept)


def test_parameters_assigned_through_data(s: lazygt.Session) -> None:
    p = nn.Parameter(torch.ones(3))
    p.data = torch.zeros(3)
    p.data = p.data + 1
    p.data.mul_(3)
    assert p.tolist() == [3, 3, 3]
    p.data = torch.zeros(2, 2)
    p.data.copy_(torch.arange(4.0).reshape(2, 2))
    p.data[0] = 7
    assert p.tolist() == [[7, 7], [2, 3]]
    with pytest.raises(RuntimeError, match=r"\.to\('lazygt'\)"):
        p.data = torch.zeros(3, device="meta")


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _library_tour() -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    nn.init.kaiming_normal_(model[0].weight)
    nn.init.orthogonal_(model[2].weight)
    nn.init.trunc_normal_(model[2].bias)
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    out = [nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(model)
    nn.utils.vector_to_parameters(vector * 3, model.parameters())
    average.update_parameters(model)
    layer = nn.Linear(3, 3)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    several = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
    (normed(layer(several[0])) * several[1]).sum().backward()
    return [t.detach().cpu() for t in (*out, *average.parameters(), layer.weight, normed.weight,
            *(p.grad for p in (*layer.parameters(), *normed.parameters(), *several)))]  # fmt: skip


def test_torch_own_tools_for_modules() -> None:
    expected = _library_tour()
    with lazygt.session(launcher="inline"):
        found = _library_tour()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# -- where it is refused -----------------------------------------------------------------------


def test_no_session() -> None:
    with pytest.raises(lazygt.NoSession, match=r"with lazygt\.session"):
        torch.ones(2, device="lazygt")
    with pytest.raises(lazygt.NoSession, match=r"with lazygt\.session"):
        torch.ones(2).to("lazygt")


@pytest.mark.parametrize(
    "use",
    [lambda x: x + 1, lambda x: x.cpu(), lambda x: x.sum().item(), lambda x: x.tolist()],
)
def test_a_tensor_of_a_closed_session(use: Callable[[torch.Tensor], Any]) -> None:
    with lazygt.session(launcher="inline"):
        x = torch.ones(3) * 2
    with pytest.raises(lazygt.NoSession, match=r"closed.*\.cpu\(\)"):
        use(x)


def test_a_debugger_can_show_tensors_of_a_closed_session() -> None:
    with lazygt.session(launcher="inline"):
        x, p, number = torch.ones(3), nn.Parameter(torch.ones(2)), torch.tensor(2.0)
    text = "tensor(..., size=(3,), dtype=torch.float32, session closed, device='lazygt:0')"
    assert repr(x) == str(x) == f"{x}" == text
    assert "size=()" in f"{number}"
    with lazygt.session(launcher="inline"):
        assert repr(p).startswith("Parameter containing:\ntensor(..., size=(2,)")


def test_entering_a_closed_session() -> None:
    with lazygt.session(launcher="inline") as s:
        pass
    with pytest.raises(lazygt.NoSession, match="session is closed; open a new one"), s:
        pass
    assert torch.ones(1).device.type == "cpu"


def test_a_tensor_of_another_session(s: lazygt.Session) -> None:
    x = torch.ones(3) * 2
    with lazygt.session(launcher="inline"):
        y = torch.ones(3)
        with pytest.raises(lazygt.NoSession, match="another session"):
            x + y
    assert (x + 1).tolist() == [3, 3, 3]


def test_zero_dim_cpu_tensors_mix(s: lazygt.Session) -> None:
    x, number = torch.ones(3), torch.tensor(2.0, device="cpu")
    assert (x * number).tolist() == [2, 2, 2]
    assert (number - x).tolist() == [1, 1, 1]
    x[0] = number
    assert x.tolist() == [2, 1, 1]
    assert x[torch.tensor([0, 2], device="cpu")].tolist() == [2, 1]


_MIXES: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, c: x + c,
    lambda x, c: c + x,
    lambda x, c: x @ c,
    lambda x, c: torch.cat([x, c]),
    lambda x, c: torch.stack([c, x]),
    lambda x, c: torch.where(x > 0, c, x),
    lambda x, c: c.add_(x),
    lambda x, c: x.add_(c),
    lambda x, c: F.linear(x, c.expand(3, 3)),
]


@pytest.mark.parametrize("mix", _MIXES)
def test_mixed_device_error_names_remedy(
    s: lazygt.Session, mix: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    with pytest.raises(RuntimeError, match=r"\.to\('lazygt'\)"):
        mix(torch.ones(3), torch.ones(3, device="cpu"))


def test_the_error_for_an_array_gives_the_line_to_write(s: lazygt.Session) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    images = torch.from_numpy(np.ones((4, 3), dtype=np.float32))
    with pytest.raises(RuntimeError) as caught:
        model(images)
    line = caught.traceback[0].lineno + 1
    assert str(caught.value).endswith(
        f"aten.addmm.default got a f32[4, 3] on cpu; move it with .to('lazygt'): what "
        f"torch.from_numpy or a DataLoader's worker process makes is on the CPU. Before "
        f"{__file__}:{line}, write\n    images = images.to('lazygt')"
    )


def test_the_error_for_a_model_on_the_cpu_gives_the_line_to_write(s: lazygt.Session) -> None:
    with torch.device("cpu"):
        model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"a model's weight. (.|\n)*model\.to\('lazygt'\)"):
        model(torch.ones(4, 3))
