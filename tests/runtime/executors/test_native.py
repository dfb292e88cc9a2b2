"""Native programs give what generated code gives: bits, strides, draws, and where they stop."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import lazygt
from benchmarks.models import GPTSize, gpt_step, mlp_step
from benchmarks.peak_memory import MEASURED, peak_of
from lazygt import native
from lazygt.errors import LazyGTError
from lazygt.graph import Graph
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import FUSED, Node, Ref
from lazygt.runtime.executors.compiled import with_compiled
from lazygt.runtime.executors.eager import EagerExecutor, MakeCode, code_of
from lazygt.runtime.executors.lowering import GeneratedCode
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.plan import Plan
from tests.passes.tools import graph_of, same_bits
from tests.runtime.executors.compared import comparing, needs_native
from tests.support.bits import drawn, same

pytestmark = [needs_native, pytest.mark.timeout(120)]

Tensor = torch.Tensor
CPU = torch.device("cpu")


def masked_norm(x: Tensor) -> Any:
    """Its op returns None for the gradients that are not asked for."""
    weight = torch.ones(4, device=x.device)
    bias = torch.zeros(4, device=x.device, requires_grad=True)
    made = torch.nn.functional.layer_norm(x.detach(), (4,), weight, bias)
    return torch.autograd.grad(made.square().sum(), bias)


def foreach(x: Tensor) -> Any:
    """Lists of values, and lists of numbers."""
    lists = [x + 1, x * 2], [x, x - 1]
    scaled = torch._foreach_mul(lists[0], [0.5, 3.0])
    torch._foreach_add_(scaled, lists[1], alpha=2)
    return [*scaled, *torch._foreach_div(lists[1], [2, 7])]


def written_through_views(x: Tensor) -> Any:
    base, other = x * 1, x * 2
    kept = base + 0
    base[1:, ::2].mul_(3)
    other.t()[0] = base[:, 1]
    kept.unbind(1)[2].add_(base.sum())
    before = kept.clone()
    kept.view(-1)[3:7] = 7.0
    return base, other, kept, before


def written_list_of_views(x: Tensor) -> Any:
    base = x * 1
    first, second, _ = base.unbind(0)
    torch._foreach_add_([second, first], 1.0)
    return base * 2


def random(x: Tensor) -> Any:
    torch.manual_seed(5)
    return torch.rand_like(x) + x, torch.bernoulli(x.sigmoid())


def expanded(x: Tensor) -> Any:
    wide = x[:1].expand(5, 4)
    return wide.clone().add_(1), wide + 1


#: What a program is asked for in a way of its own.
PROGRAMS: dict[str, Callable[..., Any]] = {
    "a number where a tensor may stand": lambda x: (x + 2, x * True, x.long() + 0.5, x.long() // 2),
    "a number in a schema's own place": lambda x: torch.add(x, x, alpha=0.25),
    "a number and a complex result": lambda x: x * 1j + 2,
    "an optional tensor that is not there": lambda x: (x.clamp(min=x * 0.5), x[None, :, [0, 2]]),
    "an undefined result": masked_norm,
    "lists": foreach,
    "a list of results": lambda x: [part + 1 for part in x.split([1, 3], 1)],
    "several results": lambda x: torch.nn.functional.layer_norm(x, (4,)).max(0),
    "a dtype, a memory format and a string": lambda x: (
        x.to(torch.float64),
        torch.empty_like(x, memory_format=torch.contiguous_format).fill_(3),
        torch.scatter_reduce(x, 0, (x > 0).long(), x, reduce="amax"),
    ),
    "random numbers": random,
    "writes through views": written_through_views,
    "writes through a list of views": written_list_of_views,
    "memory that several elements share": expanded,
    "lazy bits": lambda x: torch.complex(x, x + 1).conj().mul(2).imag.add(1),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_native_code_gives_same_bits(what: str) -> None:
    with comparing() as compared:
        same(PROGRAMS[what], drawn(3, 4))
    assert compared


def test_changed_numbers_are_taken() -> None:
    built = []
    with comparing() as compared, lazygt.session(launcher="inline", compile="off") as s:
        for rate in (0.5, 0.25, -1.0, 3e38):
            x = torch.arange(6.0).mul_(rate).add(1, alpha=rate).add(rate)
            expected = torch.arange(6.0, device="cpu").mul(rate).add(1, alpha=rate).add(rate)
            assert same_bits(x.cpu(), expected)
            built.append(s.stats()["plans_built"])
    assert compared
    assert set(built) == {built[0]}


def moved(x: Tensor, position: int) -> list[Tensor]:
    written = x + 0
    written[position] = x[position] * 2
    return [x.roll(position, 0), x.roll((position, 1), (0, 1)), x.narrow(0, position, 1), written]


def test_changed_positions_are_taken() -> None:
    built = []
    expected = torch.arange(12.0).view(4, 3)
    with comparing() as compared, lazygt.session(launcher="inline", compile="off") as s:
        x = expected.to("lazygt")
        for position in (1, 2, 3, 2, 1):
            for ours, theirs in zip(moved(x, position), moved(expected, position), strict=True):
                assert same_bits(ours.cpu(), theirs)
            built.append(s.stats()["plans_built"])
    assert compared
    assert built[-1] == built[2]


TINY = GPTSize(dim=8, layers=1, length=4, batch=1, vocabulary=10)
STEPS: dict[str, Callable[[str], Callable[[], Tensor]]] = {
    "SGD": lambda device: mlp_step(device, "sgd", batch=2, width=8),
    "Adam": lambda device: mlp_step(device, "adam", batch=2, width=8),
    "transformer": lambda device: gpt_step(device, TINY),
}


@pytest.mark.parametrize("kind", STEPS)
def test_training_steps(kind: str) -> None:
    """Donated parameters and optimizer state are written in place, in lists."""
    with comparing() as compared, lazygt.session(launcher="inline", compile="off"):
        ours, theirs = STEPS[kind]("lazygt"), STEPS[kind]("cpu")
        assert [ours().item() for _ in range(6)] == [theirs().item() for _ in range(6)]
    assert compared


def test_the_setting_chooses_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (code_of("auto"), code_of("native")) == (NativeCode, NativeCode)
    assert code_of("python") is GeneratedCode
    monkeypatch.setattr(native, "load", lambda: native.Loaded(None, None, "none was built"))
    assert (code_of("auto"), code_of("python")) == (GeneratedCode, GeneratedCode)
    with (
        pytest.raises(LazyGTError, match="none was built; run `lazygt build-native`"),
        lazygt.session(launcher="inline", compile=lazygt.Compile(plan_code="native")),
    ):
        pass


def test_unknown_plan_code_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="expected 'auto', 'native' or 'python'"),
        lazygt.session(compile=lazygt.Compile(plan_code="quick")),
    ):
        pass


# -- where it stops --------------------------------------------------------------------------------

LOOK = """
    %0: f32[4] = input
    %1: i64[2] = input
    %2: f32[4] = aten.neg.default(%0)
    %3: f32[4] = aten.mul_.Tensor(%2, %0) writes %2
    %4: f32[2] = aten.index_select.default(%3, 0, %1)
    %5: f32[2] = aten.exp.default(%4)
    %6: f32[4] = aten.add.Tensor(%3, %0)
    return %3, %5, %6
    """


def outcomes(make: MakeCode, where: Tensor) -> list[Any]:
    """What is told of a good run and of one that looks for ``where``."""
    executor = EagerExecutor(Plan.build(graph_of(LOOK)), CPU, code=make)
    told = []
    for chosen in (torch.tensor([0, 1]), where, where):
        outcome = executor.run([torch.arange(4.0), chosen], ())
        failures = [(f.node, f.kind, f.detail) for f in outcome.failures]
        told.append((failures, [str(value) for value in outcome.outputs]))
    return told


def test_a_failure_in_the_middle_loses_the_same_values() -> None:
    where = torch.tensor([0, 9])
    found = outcomes(NativeCode, where)
    assert found == outcomes(GeneratedCode, where)
    failures, outputs = found[1]
    ((node, kind, detail),) = failures
    assert (node, kind) == (2, "IndexError")
    assert "index out of range" in detail
    assert [output.startswith("Failed") for output in outputs] == [False, True, False]


def calling(*callables: Callable[[Tensor], Tensor]) -> EagerExecutor:
    """An executor whose nodes call these, one after another; each takes what the last returned."""
    meta = TensorMeta.of(torch.ones(4))
    negation = Node("aten.neg.default", (Ref(0),), fresh=(meta,))
    body = Graph((meta,), (), (negation,), (1,))
    nodes = [Node(FUSED, (Ref(n),), fresh=(meta,), body=body) for n in range(len(callables))]
    graph = Graph((meta,), (), tuple(nodes), (len(nodes),))
    return with_compiled(Plan.build(graph), CPU, dict(enumerate(callables)), NativeCode)


def test_a_callable_that_raises_is_met_again_by_the_interpreter() -> None:
    calls: list[int] = []

    def odd(x: Tensor) -> Tensor:
        calls.append(len(calls))
        if len(calls) % 3 == 2:
            raise ValueError("not now")
        return x + 1

    executor = calling(torch.neg, odd, torch.neg)
    for _ in range(2):
        outcome = executor.run([torch.ones(4)], ())
        assert outcome.failures == []
        (output,) = outcome.outputs
        assert isinstance(output, Tensor)
        assert output.tolist() == [0.0] * 4
    assert len(calls) == 3  # the second run met it twice


def test_an_interrupt_goes_through() -> None:
    interrupted = [False]

    def interrupt(x: Tensor) -> Tensor:
        if interrupted[0]:
            raise KeyboardInterrupt
        return x

    executor = calling(interrupt)
    executor.run([torch.ones(4)], ())
    interrupted[0] = True
    with pytest.raises(KeyboardInterrupt):
        executor.run([torch.ones(4)], ())
    interrupted[0] = False
    assert executor.run([torch.ones(4)], ()).failures == []


def test_a_number_that_torch_does_not_take_fails_at_its_node() -> None:
    graph = graph_of("""
        %0: f32[4] = input
        $0: int = param
        %1: f32[4] = aten.neg.default(%0)
        %2: f32[4] = aten.add.Tensor(%1, $0)
        return %1, %2
        """)
    executor = EagerExecutor(Plan.build(graph), CPU, code=NativeCode)
    assert executor.run([torch.ones(4)], (1,)).failures == []
    outcome = executor.run([torch.ones(4)], (1 << 80,))
    assert [failure.node for failure in outcome.failures] == [1]
    assert isinstance(outcome.outputs[0], Tensor)
    assert executor.run([torch.ones(4)], (1,)).failures == []


# -- what it costs ---------------------------------------------------------------------------------


def chain(length: int, numel: int = 4) -> EagerExecutor:
    """A checked executor of a chain of ops, the odd ones in place."""
    rows = [f"%0: f32[{numel}] = input"]
    for n in range(length):
        op = f"aten.mul_.Tensor(%{n}, 0.5) writes %{n}" if n % 2 else f"aten.neg.default(%{n})"
        rows.append(f"%{n + 1}: f32[{numel}] = {op}")
    executor = EagerExecutor(
        Plan.build(graph_of("\n".join([*rows, f"return %{length}"]))), CPU, code=NativeCode
    )
    for _ in range(2):
        executor.run([torch.ones(numel)], ())
    return executor


def python_calls(executor: EagerExecutor) -> int:
    calls = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event in ("call", "c_call")

    inputs: list[Any] = [torch.ones(4)]
    sys.setprofile(note)
    try:
        executor.run(inputs, ())
    finally:
        sys.setprofile(None)
    return calls[0]


def test_no_python_a_node() -> None:
    assert python_calls(chain(1_000)) == python_calls(chain(10)) < 20


@pytest.mark.timeout(60)
def test_other_threads_run_meanwhile() -> None:
    """The supervision of a worker needs the interpreter for an instant, whatever it computes."""
    executor = chain(40, numel=1 << 20)
    began, ran = threading.Event(), threading.Event()

    def run_when_it_began() -> None:
        began.wait()
        ran.set()

    thread = threading.Thread(target=run_when_it_began)
    value = torch.ones(1 << 20)
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1_000)  # from here on nobody has to give the interpreter away
    try:
        began.set()
        before = ran.is_set()
        while not ran.is_set():  # only a run lets the other thread in: without that, for ever
            executor.run([value], ())
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert not before


def test_values_die_at_their_last_use() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def fresh(x: Tensor) -> Tensor:
        assert all(old() is None for old in seen[:-1]), "a value outlived its last use"
        seen.append(weakref.ref(x))
        return x + 1

    executor = calling(*[fresh] * 5)
    for _ in range(2):
        seen.clear()
        executor.run([torch.ones(4)], ())
    assert all(old() is None for old in seen)


def test_inputs_are_held_by_nobody_afterwards() -> None:
    executor = chain(10)
    value = torch.ones(4)
    alive = weakref.ref(value)
    inputs: list[Any] = [value]
    del value
    executor.run(inputs, ())
    assert alive() is None


def step_plan() -> Plan:
    """A whole training step, flushed at its end."""
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(flush_on_backward=False)
    ) as s:
        step = mlp_step("lazygt", "adam", batch=8, width=64)
        s.flush()
        for _ in range(3):
            step()
            s.flush()
        return s.plans()[-1]


def peak(plan: Plan, make: MakeCode) -> int:
    """Bytes of tensors alive at the peak of a run."""
    executor = EagerExecutor(plan, CPU, code=make)
    numbers = {"float": 0.5, "int": 2, "bool": True}

    def run() -> None:
        inputs: list[Any] = [torch.ones(m.shape).to(m.dtype) for m in plan.graph.inputs]
        assert not executor.run(inputs, tuple(numbers[p] for p in plan.graph.params)).failures

    run()
    run()
    seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with seen, record_function(MEASURED):
        run()
    return peak_of(seen)


def test_the_peak_is_that_of_generated_code() -> None:
    plan = step_plan()
    assert len(plan.graph.nodes) > 20
    assert 0 < peak(plan, NativeCode) <= peak(plan, GeneratedCode)


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1])


@pytest.mark.slow
def test_ten_thousand_runs_are_flat() -> None:
    executor = chain(20)
    grown = []
    for _ in range(5):
        before = resident()
        for _ in range(5_000):
            executor.run([torch.ones(4)], ())
        grown.append(resident() - before)
    assert min(grown) <= 16, grown  # pages; what is lost at every run is lost in every round
