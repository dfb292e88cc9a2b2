"""What every executor promises. A new one is a line of ``EXECUTORS``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lazygt.runtime.executors.compiled import with_compiled
from lazygt.runtime.executors.eager import EagerExecutor, Outcome, TimedExecutor
from lazygt.runtime.executors.graphed import GraphedExecutor
from lazygt.runtime.executors.lowering import GeneratedCode
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.messages import Failure
from lazygt.runtime.plan import Plan
from lazygt.runtime.store import Failed, Value
from tests.passes.tools import graph_of, same_bits
from tests.runtime.executors.compared import needs_native
from tests.runtime.executors.cuda_stand_in import stand_in

Make = Callable[[Plan, torch.device], EagerExecutor]

CPU = torch.device("cpu")
EXECUTORS: dict[str, Make] = {
    "native": lambda plan, device: EagerExecutor(plan, device, code=NativeCode),
    "generated": lambda plan, device: EagerExecutor(plan, device, code=GeneratedCode),
    "timed": lambda plan, device: TimedExecutor(EagerExecutor(plan, device)),
    "graphed": lambda plan, device: GraphedExecutor(EagerExecutor(plan, device), stand_in()[0]),
    "compiled": lambda plan, device: with_compiled(plan, device, {}, GeneratedCode),
    "compiled, native": lambda plan, device: with_compiled(plan, device, {}, NativeCode),
}

# %0 ──mul, exp (one node)──> %2 ──┐
#                     %1 ──take── ─┴─> %3 ──neg──> %4        %1: where to look in %2
PROGRAM = """
    %0: f32[4] = input
    %1: i64[2] = input
    $0: float = param
    %2: f32[4] = lazygt.fused(%0, $0) {
      %0: f32[4] = input
      $0: float = param
      %1: f32[4] = aten.mul.Tensor(%0, $0)
      %2: f32[4] = aten.exp.default(%1)
      return %2
    }
    %3: f32[2] = aten.index_select.default(%2, 0, %1)
    %4: f32[2] = aten.neg.default(%3)
    return %2, %4
    """
#: The step of ``plan.steps`` that looks.
LOOKS = 2


@pytest.fixture(params=[
    pytest.param(name, marks=needs_native if "native" in name else ()) for name in EXECUTORS
])  # fmt: skip
def executor(request: pytest.FixtureRequest) -> EagerExecutor:
    return EXECUTORS[request.param](Plan.build(graph_of(PROGRAM)), CPU)


def run(executor: EagerExecutor, where: Value) -> Outcome:
    """One run, which takes its inputs away."""
    inputs: list[Value] = [torch.arange(4.0), where]
    outcome = executor.run(inputs, (0.5,))
    assert inputs == []
    return outcome


def test_every_run_gives_the_bits_of_eager_torch(executor: EagerExecutor) -> None:
    whole, where = (torch.arange(4.0) * 0.5).exp(), torch.tensor([3, 1])
    for _ in range(3):
        outcome = run(executor, where)
        assert outcome.failures == []
        first, last = outcome.outputs
        assert isinstance(first, torch.Tensor)
        assert isinstance(last, torch.Tensor)
        assert same_bits(first, whole)
        assert same_bits(last, -whole[where])


@pytest.mark.parametrize("good_runs", [0, 1, 2])
def test_a_failure_names_its_step_and_takes_nothing_with_it(
    executor: EagerExecutor, good_runs: int
) -> None:
    for _ in range(good_runs):
        run(executor, torch.tensor([3, 1]))
    outcome = run(executor, torch.tensor([0, 4]))
    (failure,) = outcome.failures
    assert (failure.node, failure.kind) == (LOOKS, "IndexError")
    first, last = outcome.outputs
    assert isinstance(first, torch.Tensor)
    assert same_bits(first, (torch.arange(4.0) * 0.5).exp())
    assert type(last) is Failed
    assert last.failure is failure
    assert run(executor, torch.tensor([3, 1])).failures == []


def test_earlier_failure_is_neither_recomputed_nor_reported_again(executor: EagerExecutor) -> None:
    before = Failed(Failure(7, "ValueError", "of an earlier run", seq=3))
    for _ in range(2):
        outcome = run(executor, before)
        assert outcome.failures == []
        assert isinstance(outcome.outputs[0], torch.Tensor)
        assert outcome.outputs[1] is before
