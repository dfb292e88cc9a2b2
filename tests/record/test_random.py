"""Random numbers: those of eager torch, bit for bit, whatever the flush points."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, random_split

import lazygt
from lazygt.graph.alias import draws
from lazygt.graph.node import Node, Param, Ref
from lazygt.graph.ops import NEVER_DRAW
from lazygt.record.host_rng import _kernels

pytestmark = pytest.mark.timeout(120)

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(7),
    "rand_f64": lambda: torch.rand(7, dtype=torch.float64),
    "randn": lambda: torch.randn(33),
    "randn_odd": lambda: torch.randn(3, 5),
    "randn_strided": lambda: torch.randn(40).view(5, 8).t().contiguous(),
    "randint": lambda: torch.randint(3, 100, (9,)),
    "randperm": lambda: torch.randperm(20),
    "rand_like": lambda: torch.rand_like(torch.zeros(4)),
    "randn_like": lambda: torch.randn_like(torch.zeros(20)),
    "randint_like": lambda: torch.randint_like(torch.zeros(4), 9),
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.3),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.4)),
    "normal_": lambda: torch.empty(18).normal_(1, 2),
    "normal_view": lambda: torch.zeros(4, 4).fill_diagonal_(1)[1:3].normal_(),
    "normal": lambda: torch.normal(torch.zeros(5), torch.ones(5)),
    "uniform_": lambda: torch.empty(9).uniform_(-1, 1),
    "exponential_": lambda: torch.empty(9).exponential_(),
    "geometric_": lambda: torch.empty(9).geometric_(0.5),
    "cauchy_": lambda: torch.empty(9).cauchy_(),
    "log_normal_": lambda: torch.empty(9).log_normal_(),
    "random_": lambda: torch.empty(9).random_(0, 50),
    "multinomial": lambda: torch.multinomial(torch.ones(6), 4),
    "multinomial_with_replacement": lambda: torch.multinomial(torch.ones(6), 9, True),
    "poisson": lambda: torch.poisson(torch.full((6,), 3.0)),
    "binomial": lambda: torch.binomial(torch.full((6,), 9.0), torch.full((6,), 0.4)),
    "dropout": lambda: F.dropout(torch.ones(20), 0.4),
    "dropout_": lambda: F.dropout(torch.ones(20), 0.4, inplace=True),
    "dropout1d": lambda: F.dropout1d(torch.ones(2, 3, 4)),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 3, 4, 2)),
    "dropout3d": lambda: F.dropout3d(torch.ones(2, 3, 4, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(20), 0.4, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(2, 3, 4), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(9), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(5)),
    "init": lambda: nn.Linear(5, 7).weight.detach(),
    "conv_init": lambda: nn.Conv2d(2, 3, 3).weight.detach(),
    "embedding_init": lambda: nn.Embedding(5, 7).weight.detach(),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(30)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(4, 4)),
}


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


def _run(names: list[str], after: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    drawn = []
    for name in names:
        drawn.append(DRAWS[name]())
        after()
    return [t.cpu() for t in drawn]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor], names: list[str]) -> None:
    wrong = [
        name
        for name, a, b in zip(names, found, expected, strict=True)
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", DRAWS)
def test_each_op_alone(name: str) -> None:
    names = [name, "rand"]  # the second shows that the state is the same afterwards
    torch.manual_seed(11)
    expected = _run(names)
    with lazygt.session(launcher="inline"):
        torch.manual_seed(11)
        _same(_run(names), expected, names)


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("settings", [{"launcher": "inline"}, {"workers": 1}], ids=["inline", "w"])
def test_all_in_a_row_whatever_the_flush_points(settings: dict, every: int) -> None:
    names = list(DRAWS) * 2
    torch.manual_seed(3)
    expected = _run(names)
    with lazygt.session(**settings) as s:
        torch.manual_seed(3)
        count = iter(range(10_000))
        found = _run(names, lambda: s.flush() if next(count) % every == 0 else None)
    _same(found, expected, names)


def test_a_session_borrows_the_generator_and_gives_it_back() -> None:
    torch.manual_seed(7)
    expected = [torch.rand(3), torch.rand(3), torch.rand(3)]
    torch.manual_seed(7)
    first = torch.rand(3)
    with lazygt.session(launcher="inline"):
        second = torch.rand(3).cpu()
    _same([first, second, torch.rand(3)], expected, ["before", "inside", "after"])


def test_every_worker_draws_the_same() -> None:
    torch.manual_seed(7)
    expected = torch.rand(5)
    with lazygt.session(workers=2):
        torch.manual_seed(7)
        assert torch.equal(torch.rand(5).cpu(), expected)


def _with_states() -> list[torch.Tensor]:
    torch.manual_seed(1)
    out = [torch.rand(2)]
    state = torch.get_rng_state()
    out.append(torch.rand(3))
    torch.set_rng_state(state)
    out.append(torch.rand(3))
    with torch.random.fork_rng():
        torch.manual_seed(99)
        out.append(torch.rand(2))
    out.append(torch.rand(2))
    torch.random.set_rng_state(state)
    out.append(torch.randn(2))
    return [t.cpu() for t in out]


def test_states_are_read_and_set_anywhere() -> None:
    expected = _with_states()
    with lazygt.session(launcher="inline"):
        _same(_with_states(), expected, [str(i) for i in range(6)])


def test_torch_keeps_and_restores_states_without_a_sync_point() -> None:
    x = torch.ones(9, requires_grad=True)
    with lazygt.session(launcher="inline") as s:
        lazy = x.detach().to("lazygt").requires_grad_()
        torch.rand(2)
        with torch.random.fork_rng():
            torch.rand(2)
        made = checkpoint(lambda t: F.dropout(t).sin(), lazy, use_reentrant=False)
        (grad,) = torch.autograd.grad(made.sum(), lazy)
        assert s.stats()["flushes"] == {}
        assert torch.equal(grad.ne(0).cpu(), made.ne(0).cpu())


def test_a_state_is_saved_with_a_checkpoint(tmp_path) -> None:
    torch.manual_seed(4)
    torch.rand(5)
    torch.save(torch.get_rng_state(), tmp_path / "eager.pt")
    expected = torch.rand(5)
    with lazygt.session(launcher="inline"):
        torch.manual_seed(4)
        torch.rand(5)
        torch.save(torch.get_rng_state(), tmp_path / "lazy.pt")
    for name in ("eager.pt", "lazy.pt"):
        with lazygt.session(launcher="inline"):
            torch.set_rng_state(torch.load(tmp_path / name))
            assert torch.equal(torch.rand(5).cpu(), expected)
    torch.set_rng_state(torch.load(tmp_path / "lazy.pt"))
    assert torch.equal(torch.rand(5), expected)


ON_CPU = torch.device("cpu")


def _by_turns() -> list[torch.Tensor]:
    """Every kind of draw, by turns on the CPU and wherever tensors are made by default."""
    torch.manual_seed(8)
    drawn = []
    for draw in DRAWS.values():
        drawn.append(draw())
        with ON_CPU:
            drawn.append(draw())
    return [t.cpu() for t in drawn]


@pytest.mark.parametrize("settings", [{"launcher": "inline"}, {"workers": 1}], ids=["inline", "w"])
def test_draws_on_the_cpu_are_of_the_same_stream(settings: dict[str, Any]) -> None:
    expected, end = _by_turns(), torch.get_rng_state()
    torch.manual_seed(0)
    with lazygt.session(**settings):
        _same(_by_turns(), expected, [name for name in DRAWS for _ in range(2)])
    assert torch.equal(torch.get_rng_state(), end)


def _seen_from_the_client() -> list[torch.Tensor]:
    """What a program reads, sets and draws by way of the client's generator."""
    torch.manual_seed(4)
    out = [torch.rand(2)]
    own = torch.Generator()
    own.set_state(torch.get_rng_state())
    out.append(torch.rand(3, generator=own, device="cpu"))
    out.append(torch.rand(3, generator=torch.default_generator))
    out.append(torch.empty(3).normal_(generator=torch.default_generator))
    out.append(torch.poisson(torch.ones(3), torch.default_generator))
    out.append(torch.randn_like(torch.zeros(3), device="cpu"))
    out.append(nn.Linear(2, 2, device="cpu").weight.detach())
    out.extend(DataLoader(torch.arange(7), shuffle=True, batch_size=3))
    out.extend(subset[0] for subset in random_split(range(9), [4, 5]))
    out.append(torch.quasirandom.SobolEngine(3, scramble=True).draw(2))
    saved = torch.get_rng_state()
    out.append(torch.rand(2))
    torch.set_rng_state(saved)
    out.append(torch.rand(2, device="cpu"))
    out.append(torch.tensor(torch.initial_seed()))
    return [torch.as_tensor(each).cpu() for each in out]


def test_client_draws_match_eager_stream() -> None:
    expected, end = _seen_from_the_client(), torch.get_rng_state()
    with lazygt.session(launcher="inline"):
        _same(_seen_from_the_client(), expected, [str(i) for i in range(len(expected))])
    assert torch.equal(torch.get_rng_state(), end)


def test_lazy_draws_wait_only_for_draws_on_the_cpu(s: lazygt.Session) -> None:
    torch.manual_seed(5)
    torch.rand(3)
    torch.rand(3)
    assert s.stats()["flushes"] == {}
    torch.rand(3, device="cpu")
    torch.rand(3, device="cpu")
    torch.rand(3, device="cpu", generator=torch.Generator())
    assert s.stats()["flushes"] == {"generator": 1}
    torch.rand(3)
    F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 2, device="cpu"))
    assert s.stats()["flushes"] == {"generator": 1}


def test_attention_without_dropout_draws_nothing(s: lazygt.Session) -> None:
    F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 2))
    torch.rand(3, device="cpu")
    assert s.stats()["flushes"] == {}


def test_a_session_in_a_session_goes_on_where_the_outer_one_stopped() -> None:
    torch.manual_seed(5)
    expected = [torch.rand(3) for _ in range(4)]
    torch.manual_seed(5)
    with lazygt.session(launcher="inline"):
        found = [torch.rand(3).cpu()]
        with lazygt.session(launcher="inline"):
            found.append(torch.rand(3).cpu())
        found.append(torch.rand(3).cpu())
    _same([*found, torch.rand(3)], expected, list("abcd"))


def test_another_thread_draws_on_the_cpu(s: lazygt.Session) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(3, device="cpu") for _ in range(2)]
    torch.manual_seed(5)
    found = [torch.rand(3)]
    thread = threading.Thread(target=lambda: found.append(torch.rand(3, device="cpu")))
    thread.start()
    thread.join()
    _same([t.cpu() for t in found], expected, ["here", "there"])


def test_every_kernel_that_draws_is_wrapped() -> None:
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    found = [name.partition(".") for name in names if name.startswith("aten::")]
    ops = [getattr(getattr(torch.ops.aten, op[6:]), which or "default") for op, _, which in found]
    drawing = {op for op in ops if torch.Tag.nondeterministic_seeded in op.tags}
    here = {str(op) for op in drawing}
    assert {str(op) for op in drawing.difference(_kernels())} == NEVER_DRAW & here


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_attention_draws_only_where_it_drops(name: str) -> None:
    """Else every rank of a pipeline would do it, and microbatches would wait for each other."""
    op = f"aten._scaled_dot_product_{name}_attention.default"
    first = (None, True) if name == "efficient" else ()
    operands = (Ref(0), Ref(1), Ref(2), *first)
    assert [draws(Node(op, (*operands, p))) for p in (0.0, 0.1, Param(0))] == [False, True, True]
    assert not draws(Node(op, operands))
    assert not draws(Node(op.replace(".default", "_backward.default"), operands))


def test_no_kernel_is_wrapped_outside_sessions() -> None:
    assert torch.random.default_generator is torch.default_generator
    with lazygt.session(launcher="inline"):
        assert "lazygt/record/host_rng.py" in torch._C._dispatch_dump("aten::uniform_")
    assert "lazygt/record/host_rng.py" not in torch._C._dispatch_dump("aten::uniform_")
    assert torch.random.default_generator is torch.default_generator


def test_a_forked_child_draws_on_its_own(s: lazygt.Session) -> None:
    torch.manual_seed(5)
    torch.rand(3)  # the workers have the state now
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.manual_seed(1)
        os.write(write, bytes(str(torch.rand(3).tolist()), "ascii"))
        os._exit(0)
    os.waitpid(pid, 0)
    torch.manual_seed(1)
    assert os.read(read, 999).decode() == str(torch.rand(3, device="cpu").tolist())
    os.close(read)
    os.close(write)


def test_a_seed_that_does_not_fit(s: lazygt.Session) -> None:
    with pytest.raises(ValueError, match="Overflow"):
        torch.manual_seed(2**70)
    torch.manual_seed(2**64 - 1)
    found = torch.rand(3)
    torch.manual_seed(-1)
    assert torch.equal(found, torch.rand(3))


def test_the_seed_is_no_part_of_the_plan(s: lazygt.Session) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        torch.rand(3).tolist()
    assert s.stats()["plans_built"] == 1
