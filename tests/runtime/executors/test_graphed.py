"""Plans as CUDA graphs, captured and replayed by a stand-in: the bits of the plain executor."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lazygt.runtime.executors import cuda_graphs, graphed
from lazygt.runtime.executors.compiled import with_compiled
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.graphed import CapturedPlan, GraphedExecutor
from lazygt.runtime.executors.kernels import clone
from lazygt.runtime.executors.lowering import GeneratedCode
from lazygt.runtime.messages import Captured
from lazygt.runtime.plan import Plan
from lazygt.runtime.store import Value
from tests.passes.tools import graph_of
from tests.runtime.executors.cuda_stand_in import stand_in
from tests.support.bits import assert_same_bits

Tensor = torch.Tensor
CPU = torch.device("cpu")

#: Runs until the first replay: looked at, asked, captured (and replayed).
FIRST = graphed.WATCHED_NOW + 2

CHAIN = """
    %0: f32[4] = input
    %1: f32[4] = input
    $0: float = param
    %2: f32[4] = aten.mul.Tensor(%0, %1)
    %3: f32[4] = aten.exp.default(%2)
    %4: f32[4] = aten.add.Tensor(%3, $0)
    %5: f32[4] = aten.neg.default(%4)
    return %3, %5
    """
#: A weight that is updated where it lies, by a step with a number that changes and ones without.
UPDATE = """
    %0: f32[4] = input
    %1: f32[4] = input
    $0: float = param
    %2: f32[4] = aten.mul.Tensor(%0, %1)
    %3: f32[4] = aten.sin.default(%2)
    %4: f32[4] = aten.exp.default(%3)
    %5: f32[4] = aten.tanh.default(%4)
    %6: f32[4] = aten.mul.Tensor(%5, $0)
    %7: f32[4] = aten.sub_.Tensor(%0, %6) writes %0
    %8: f32[4] = aten.cos.default(%7)
    %9: f32[4] = aten.abs.default(%8)
    %10: f32[4] = aten.neg.default(%9)
    return %7, %10
    """


class Both:
    """Runs a plan captured and plain, and compares the bits."""

    def __init__(self, text: str, measured: bool = False, limit: int | None = 1 << 40) -> None:
        plan = Plan.build(graph_of(text))
        self.graphs, self.cuda = stand_in(measured, limit)
        self.plain = EagerExecutor(plan, CPU, code=GeneratedCode)
        self.executor = GraphedExecutor(EagerExecutor(plan, CPU, code=GeneratedCode), self.graphs)
        self.news: list[Captured] = []

    def outcomes(
        self, inputs: Sequence[Tensor], params: tuple[Any, ...]
    ) -> tuple[Outcome, Outcome]:
        copies: list[Value] = [clone(value) for value in inputs]
        state = torch.default_generator.get_state()
        expected = self.plain.run(copies, params)
        drawn = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        outcome = self.executor.run(list(inputs), params)
        assert torch.equal(torch.default_generator.get_state(), drawn), "other numbers were drawn"
        if self.executor.pending_report is not None:
            self.news.append(self.executor.pending_report)
            self.executor.pending_report = None
        return outcome, expected

    def run(self, inputs: Sequence[Tensor], *params: Any) -> list[Tensor]:
        outcome, expected = self.outcomes(inputs, params)
        outputs: list[Tensor] = []
        for value, wanted in zip(outcome.outputs, expected.outputs, strict=True):
            assert isinstance(value, Tensor)
            assert isinstance(wanted, Tensor)
            assert value.stride() == wanted.stride()
            assert_same_bits(value, wanted)
            outputs.append(value)
        return outputs


def fresh() -> list[Tensor]:
    return [torch.rand(4), torch.rand(4)]


def test_inputs_that_move_are_copied_and_those_that_stay_are_used_where_they_lie() -> None:
    both, weight = Both(CHAIN), torch.rand(4)
    moved = [torch.rand(4) for _ in range(9)]  # all alive, so at nine addresses
    for x in moved:
        both.run([weight, x], 0.5)
        weight.add_(1)
    assert both.cuda.captured == 1
    assert both.cuda.replays == len(moved) - FIRST + 1
    (news,) = both.news
    assert (news.graphs, news.steps, news.error) == (1, 4, "")
    assert news.nbytes == both.graphs.nbytes == 4 * 16 + 16, "four results and one input"


def test_outputs_are_nobodys_after_the_next_replay() -> None:
    both = Both(CHAIN)
    kept, copies = [], []
    for _ in range(9):
        kept.append(both.run(fresh(), 0.5))
        copies.append([each.clone() for each in kept[-1]])
    for outputs, wanted in zip(kept, copies, strict=True):
        for value, copy in zip(outputs, wanted, strict=True):
            assert_same_bits(value, copy)
    assert both.cuda.replays > 4


def test_a_weight_is_written_where_it_lies_and_handed_back() -> None:
    both, weight = Both(UPDATE), torch.rand(4)
    for _ in range(8):
        place = weight.data_ptr()
        weight, _ = both.run([weight, torch.rand(4)], 0.1)
        assert weight.data_ptr() == place
    assert both.cuda.replays > 2


def test_a_number_that_changes_keeps_its_step_out_of_the_graphs() -> None:
    both, weight = Both(UPDATE), torch.rand(4)
    for step in range(9):
        weight, _ = both.run([weight, torch.rand(4)], 0.1 * step)
    (news,) = both.news
    assert (news.graphs, news.steps) == (2, 8), "all but the step of the number"


def test_a_number_that_changes_late_is_never_an_old_one() -> None:
    both, weight = Both(UPDATE), torch.rand(4)
    for step in range(30):
        weight, _ = both.run([weight, torch.rand(4)], 0.1 if step < 9 else 0.1 * step)
    assert [(news.graphs, news.steps) for news in both.news] == [(1, 9), (2, 8)]


def test_an_input_that_moves_late_is_captured_anew() -> None:
    both, weight = Both(CHAIN), torch.rand(4)
    held = []
    for step in range(30):
        held.append(weight if step < 9 else torch.rand(4))
        both.run([held[-1], torch.rand(4)], 0.5)
    assert both.cuda.captured == 2
    assert not both.executor.given_up


def test_capture_of_ever_changing_inputs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "CAPTURES", 1)
    both, weight, held = Both(CHAIN), torch.rand(4), []
    for step in range(20):
        held.append(weight if step < 9 else torch.rand(4))
        both.run([held[-1], torch.rand(4)], 0.5)
    assert both.executor.given_up
    assert both.news[-1].error == "its inputs move and its numbers change"
    assert both.graphs.nbytes == 0, "what was captured is let go"


def test_draws_are_those_of_the_plain_way() -> None:
    both = Both("""
        %0: f32[8] = input
        %1: f32[8] = aten.exp.default(%0)
        %2: f32[8], %3: b8[8] = aten.native_dropout.default(%1, 0.5, True)
        %4: f32[8] = aten.mul.Tensor(%2, %0)
        %5: f32[8] = aten.bernoulli.p(%4, 0.5)
        return %4, %5
        """)
    for _ in range(8):
        both.run([torch.rand(8)])
    assert both.cuda.replays > 2


def test_a_seed_is_set_between_graphs() -> None:
    both = Both("""
        %0: f32[8] = input
        %1: f32[8] = aten.exp.default(%0)
        %2: f32[8] = aten.sin.default(%1)
        %3: f32[8] = aten.cos.default(%2)
        %4: f32[8] = aten.bernoulli.p(%3, 0.5)
        _ = lazygt.manual_seed(device, 7)
        %5: f32[8] = aten.mul.Tensor(%4, %3)
        %6: f32[8] = aten.neg.default(%5)
        %7: f32[8] = aten.bernoulli.p(%6, 0.5)
        %8: f32[8] = aten.abs.default(%7)
        return %5, %8
        """)
    for _ in range(8):
        both.run([torch.rand(8)])
    assert (both.news[0].graphs, both.news[0].steps) == (2, 8)


WAITS = """
    %0: f32[4] = input
    %1: i64[4] = input
    %2: f32[4] = aten.exp.default(%0)
    %3: f32[4] = aten.sin.default(%2)
    %4: f32[4] = aten.cos.default(%3)
    %5: f32[4] = aten.neg.default(%4)
    %6: f32[2, 2] = aten.view.default(%5, [2, 2])
    %7: f32[2, 2], %8: i32[] = aten.linalg_inv_ex.default(%6)
    %9: f32[2, 2] = aten.exp.default(%7)
    %10: f32[2, 2] = aten.sin.default(%9)
    %11: f32[2, 2] = aten.cos.default(%10)
    %12: f32[2, 2] = aten.neg.default(%11)
    return %7, %12
    """


def test_an_op_that_waits_for_the_gpu_is_found_and_runs_between_graphs() -> None:
    both = Both(WAITS)
    for _ in range(8):
        both.run([torch.rand(4), torch.tensor([1, 2, 0, 1])])
    assert (both.news[0].graphs, both.news[0].steps, both.news[0].failed) == (2, 9, False)


def test_op_failing_capture_runs_between_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Both(WAITS)
    monkeypatch.setattr(
        both.graphs, "forbid_synchronization", nullcontext
    )  # so that nothing is found before
    for _ in range(10):
        both.run([torch.rand(4), torch.tensor([1, 2, 0, 1])])
    (news,) = both.news
    assert (news.graphs, news.steps, news.failed) == (2, 9, False)
    assert both.graphs.usable


def test_plan_with_failed_capture_loses_nothing_and_others_are_captured() -> None:
    both, weight = Both(UPDATE), torch.rand(4)
    for number in range(1, cuda_graphs.FAILURES + 1):
        both.cuda.failing = both.cuda.ended + 1
        both.executor = GraphedExecutor(both.plain, both.graphs)
        for _ in range(10):
            weight, _ = both.run([weight, torch.rand(4)], 0.1)
        news = both.news.pop()
        assert news.failed
        assert news.error.startswith("RuntimeError: operation failed due to a previous error")
        assert both.executor.given_up
        assert (both.cuda.captured, both.cuda.replays, both.cuda.stuck) == (0, 0, False)
        assert both.graphs.usable == (number < cuda_graphs.FAILURES)
    both.executor = GraphedExecutor(both.plain, both.graphs)
    for _ in range(6):
        weight, _ = both.run([weight, torch.rand(4)], 0.1)
    assert both.news.pop().error == f"{cuda_graphs.FAILURES} captures have failed in this worker"


def test_the_second_graph_may_fail_after_the_first_has_run() -> None:
    both, weight = Both(UPDATE), torch.rand(4)
    both.cuda.failing = 2
    for step in range(10):
        weight, _ = both.run([weight, torch.rand(4)], 0.1 * step)
    assert both.cuda.replays == 1
    assert both.news[-1].failed


@pytest.mark.parametrize(("faster", "kept"), [(0.5, True), (2.0, False)])
def test_the_faster_way_stays(faster: float, kept: bool) -> None:
    both = Both(CHAIN, measured=True)
    now = iter(x for n in range(2 * graphed.TRIALS) for x in (0.0, faster if n % 2 else 1.0))
    both.graphs.clock = now.__next__
    for _ in range(30):
        both.run(fresh(), 0.5)
    assert next(now, None) is None
    assert both.executor.given_up is not kept
    (news,) = both.news
    assert news.gain == (1 / faster if kept else 0.0)
    assert bool(news.error) is not kept
    assert (both.graphs.nbytes > 0) is kept


@pytest.mark.parametrize(("limit", "captures"), [(40, 0), (90, 1), (96, 1)])
def test_graphs_keep_no_more_than_they_may(limit: int, captures: int) -> None:
    """Three of its results live at once (48 bytes), but no memory is used twice here (96)."""
    both = Both(CHAIN, limit=limit)
    for _ in range(8):
        both.run(fresh(), 0.5)
    assert both.cuda.captured == captures
    assert both.graphs.nbytes == (96 if limit == 96 else 0)
    assert (f"max_cuda_graph_bytes={limit}" in both.news[0].error) is (limit < 96)


@pytest.mark.parametrize(
    ("free", "unused", "captures"), [(95, 0, 0), (96, 0, 1), (0, 96, 1), (192, 0, 1)]
)
def test_default_limit_of_graphs_is_half_of_free_memory(
    free: int, unused: int, captures: int
) -> None:
    """48 bytes live at once, and 96 are what a graph comes to keep: that is half of 192."""
    both = Both(CHAIN, limit=None)
    both.cuda.free, both.cuda.reserved, both.cuda.unused = free, unused, unused
    for _ in range(8):
        both.run(fresh(), 0.5)
    assert both.cuda.captured == captures
    assert both.graphs.nbytes == (96 if free == 192 else 0)


def test_graphs_are_let_go_with_their_plan() -> None:
    both = Both(CHAIN)
    for _ in range(6):
        both.run(fresh(), 0.5)
    assert both.graphs.nbytes > 0
    gc.disable()
    try:
        del both.executor
        assert both.graphs.nbytes == 0, "nothing waits for the garbage collector"
    finally:
        gc.enable()


FAILS = """
    %0: f32[4] = input
    %1: i64[2] = input
    $0: float = param
    %2: f32[4] = aten.exp.default(%0)
    %3: f32[4] = aten.sin.default(%2)
    %4: f32[4] = aten.cos.default(%3)
    %5: f32[4] = aten.neg.default(%4)
    %6: f32[4] = aten.mul.Tensor(%5, $0)
    %7: f32[2] = aten.index_select.default(%6, 0, %1)
    %8: f32[2] = aten.neg.default(%7)
    %9: f32[2] = aten.mul.Tensor(%8, $0)
    return %5, %9
    """


@pytest.mark.parametrize("bad", [2, FIRST - 2, FIRST - 1, FIRST + 1])
def test_an_op_that_fails_between_graphs_takes_nothing_with_it(bad: int) -> None:
    both = Both(FAILS)
    held = []
    for step in range(FIRST + 4):
        where = torch.tensor([0, 9 if step == bad else 3])
        outcome, expected = both.outcomes([torch.rand(4), where], (float(step),))
        assert [(f.node, f.kind) for f in outcome.failures] == [
            (f.node, f.kind) for f in expected.failures
        ]
        first, wanted = outcome.outputs[0], expected.outputs[0]
        assert isinstance(first, Tensor)
        assert isinstance(wanted, Tensor)
        held.append((first, wanted))
    for first, wanted in held:
        assert_same_bits(first, wanted)
    assert both.cuda.replays > 0


def test_data_dependent_op_gets_no_memory_of_graph() -> None:
    both = Both("""
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.sin.default(%1)
        %3: f32[4] = aten.cos.default(%2)
        %4: f32[4] = aten.neg.default(%3)
        %5: none = aten.nonzero.default(%4) dynamic
        return %4
        """)
    held = []
    for _ in range(8):
        outcome, expected = both.outcomes([torch.rand(4)], ())
        assert torch.equal(outcome.returned[0], expected.returned[0])
        held.append((outcome.outputs[0], expected.outputs[0]))
    for value, wanted in held:
        assert isinstance(value, Tensor)
        assert isinstance(wanted, Tensor)
        assert_same_bits(value, wanted)
    assert both.cuda.replays > 2


def test_views_of_memory_that_moves_stay_views_of_one_memory() -> None:
    """%3 is made by a step with a changing number; the graph would write it through its view."""
    both = Both("""
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%1)
        %3: f32[4] = aten.mul.Tensor(%2, $0)
        %4: f32[2] = aten.slice.Tensor(%3, 0, 0, 2)
        %5: f32[2] = aten.mul.Tensor(%4, $0)
        %6: f32[2] = aten.neg.default(%5)
        %7: f32[2] = aten.add_.Tensor(%4, %6) writes %4
        %8: f32[4] = lazygt.write_back(%3, %7, [['aten.slice.Tensor', 0, [None, 0, 0, 2], [], 0]])
        %9: f32[4] = aten.exp.default(%8)
        %10: f32[4] = aten.neg.default(%9)
        return %8, %10
        """)
    for step in range(9):
        both.run([torch.rand(4)], float(step))


def test_compiled_groups_are_captured() -> None:
    plan = Plan.build(
        graph_of("""
        %0: f32[4] = input
        %1: f32[4] = input
        $0: float = param
        %2: f32[4] = lazygt.fused(%0, $0) {
          %0: f32[4] = input
          $0: float = param
          %1: f32[4] = aten.mul.Tensor(%0, $0)
          %2: f32[4] = aten.exp.default(%1)
          return %2
        }
        %3: f32[4] = aten.add_.Tensor(%1, %2) writes %1
        %4: f32[4] = aten.neg.default(%2)
        %5: f32[4] = aten.exp.default(%4)
        %6: f32[4] = aten.sin.default(%5)
        return %3, %6
        """)
    )
    called = []

    def group(x: Tensor, number: float) -> Tensor:
        called.append(number)
        return (x * number).exp()

    graphs, cuda = stand_in()
    compiled = with_compiled(plan, CPU, {0: group}, GeneratedCode)
    executor, plain = GraphedExecutor(compiled, graphs), EagerExecutor(plan, CPU)
    weight, runs = torch.rand(4), 9
    for _ in range(runs):
        x, copy = torch.rand(4), weight.clone()
        outcome = executor.run([x, weight], (0.5,))
        expected = plain.run([x, copy], (0.5,))
        for value, wanted in zip(outcome.outputs, expected.outputs, strict=True):
            assert isinstance(value, Tensor)
            assert isinstance(wanted, Tensor)
            assert_same_bits(value, wanted)
        first = outcome.outputs[0]
        assert isinstance(first, Tensor)
        weight = first
    assert executor.pending_report is not None
    assert executor.pending_report.steps == 6, "the group has two"
    assert len(called) == FIRST, "a capture of the group calls it once, whatever is replayed"
    assert cuda.replays == runs - FIRST + 1


# -- the stand-in shows what it is for -------------------------------------------------------------


def broken(both: Both) -> bool:
    """Whether some run's bits are wrong."""
    weight, held = torch.rand(4), []
    try:
        for step in range(12):
            weight, other = both.run([weight, torch.rand(4)], 0.1 if step < 6 else 0.3)
            held.append((other, other.clone()))
            for value, copy in held:
                assert_same_bits(value, copy)
    except AssertionError:
        return True
    return False


def test_stand_in_reports_no_error_of_graphed_executor() -> None:
    assert not broken(Both(UPDATE))


def test_the_stand_in_shows_numbers_that_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedPlan, "fits", lambda *_: True)
    assert broken(Both(UPDATE))


def test_the_stand_in_shows_outputs_that_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "copied", lambda values: values)
    assert broken(Both(UPDATE))


def test_the_stand_in_shows_inputs_that_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_by_dtype", lambda values: [])
    assert broken(Both(UPDATE))
