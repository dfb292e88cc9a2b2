"""Plans in other sizes: programs from their first run on, in which everything is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

import lazygt
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.interpreter import CheckedInterpreter
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.plan import Plan, PlanTemplate
from lazygt.runtime.store import Failed
from tests.passes.sized import SIZED, accepted, start
from tests.passes.tools import graph_of
from tests.property.programs import Step
from tests.runtime.executors.compared import needs_native
from tests.support.bits import assert_same_bits

pytestmark = [needs_native, pytest.mark.timeout(600)]

Tensor = torch.Tensor
CPU = torch.device("cpu")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often plans were interpreted, programs made, and instructions made for these."""
    seen: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            seen[what] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counted(CheckedInterpreter, "run", "interpreted")
    counted(NativeCode, "__init__", "programs")
    counted(CheckedInterpreter, "return_slots", "nodes")
    return seen


# -- one template, several plans -------------------------------------------------------------------


def executors(text: str) -> Callable[..., EagerExecutor]:
    """What makes executors of a graph in other sizes."""
    encoded = Plan.build(graph_of(text)).template.encoded
    template = PlanTemplate.decoded(encoded)

    def make(*sizes: int) -> EagerExecutor:
        return EagerExecutor(Plan(form=(template, sizes)), CPU, None, None, NativeCode, template)

    return make


def careful(executor: EagerExecutor, inputs: list[Tensor]) -> tuple[Outcome, CheckedInterpreter]:
    """What a first run without a program makes."""
    alone = EagerExecutor(executor.plan, CPU, code=NativeCode)
    return alone.run([*inputs], ()), alone.interpreter


def same_outcomes(ours: Outcome, theirs: Outcome) -> None:
    assert ours.failures == theirs.failures
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert type(mine) is type(other)
        if isinstance(other, Failed):
            assert mine == other
        else:
            assert mine.stride() == other.stride()  # type: ignore[union-attr]
            assert_same_bits(mine, other)


SUMS = """
    %0: f32[4, 6] = input
    %1: f32[6] = input
    %2: f32[4, 6] = aten.mul.Tensor(%0, %1)
    %3: f32[6, 4]@(1, 6) = aten.t.default(%2)
    %4: f32[6] = aten.neg.default(%1)
    %5: f32[6] = aten.exp_.default(%4) writes %4
    return %3, %5
    """


def test_a_first_run_in_other_sizes_is_not_interpreted(counts: Counter[str]) -> None:
    make = executors(SUMS)
    make(4, 6).run([torch.ones(4, 6), torch.ones(6)], ())
    counts.clear()
    for programs, (rows, columns) in enumerate([(3, 6), (5, 6), (5, 7), (8, 9)], 1):
        inputs = [torch.randn(rows, columns), torch.randn(columns)]
        executor = make(rows, columns)
        first = executor.run([*inputs], ())
        assert (counts["interpreted"], counts["programs"]) == (0, programs)
        second = executor.run([*inputs], ())
        assert counts["programs"] == programs
        same_outcomes(second, first)
        for made, wanted in zip(first.outputs, [(inputs[0] * inputs[1]).t(), (-inputs[1]).exp()],
                                strict=True):  # fmt: skip
            assert_same_bits(made, wanted)


def test_instructions_that_are_the_same_are_shared(counts: Counter[str]) -> None:
    make = executors(SUMS)
    make(4, 6).run([torch.ones(4, 6), torch.ones(6)], ())
    make(3, 6).run([torch.ones(3, 6), torch.ones(6)], ())
    counts.clear()
    make(5, 7).run([torch.ones(5, 7), torch.ones(7)], ())
    assert (counts["programs"], counts["nodes"]) == (1, 1)  # the last one's outputs may be copied


def test_sizes_in_arguments_are_not_shared() -> None:
    make = executors("""
        %0: f32[24] = input
        %1: f32[4, 6] = aten.view.default(%0, [4, 6])
        %2: f32[24] = aten.repeat.default(%0, [1])
        %3: f32[4, 6] = aten.add.Tensor(%1, 1)
        return %2, %3
        """)
    for total, rows, columns in [(24, 4, 6), (20, 4, 5), (21, 3, 7), (20, 5, 4), (24, 4, 6)]:
        x = torch.randn(total)
        made = make(total, rows, columns).run([x], ())
        assert made.failures == []
        assert_same_bits(made.outputs[1], x.view(rows, columns) + 1)


def test_another_shape_than_promised_fails_as_it_did() -> None:
    make = executors("""
        %0: f32[4] = input
        %1: f32[8] = aten.cat.default([%0, %0])
        %2: f32[8] = aten.neg.default(%1)
        %3: f32[4] = aten.exp.default(%0)
        return %2, %3
        """)
    assert make(4, 8).run([torch.ones(4)], ()).failures == []
    executor = make(5, 9)
    for _ in range(2):
        ours, (theirs, _) = executor.run([torch.ones(5)], ()), careful(executor, [torch.ones(5)])
        assert "promised" in ours.failures[0].detail
        same_outcomes(ours, theirs)
    assert make(6, 12).run([torch.ones(6)], ()).failures == []


def test_an_op_that_fails_fails_in_its_place() -> None:
    make = executors("""
        %0: f32[4, 3] = input
        %1: i64[5] = input
        %2: f32[5, 3] = aten.index_select.default(%0, 0, %1)
        %3: f32[4, 3] = aten.neg.default(%0)
        %4: f32[5, 3] = aten.exp.default(%2)
        return %3, %4
        """)
    assert make(4, 3, 5).run([torch.ones(4, 3), torch.zeros(5).long()], ()).failures == []
    executor, inputs = make(4, 3, 6), [torch.ones(4, 3), torch.full((6,), 9)]
    ours, (theirs, _) = executor.run([*inputs], ()), careful(executor, inputs)
    assert [failure.node for failure in ours.failures] == [0]
    same_outcomes(ours, theirs)
    again = executor.run([torch.ones(4, 3), torch.zeros(6).long()], ())
    assert again.failures == []


#: A result beside tensors that the op writes.
NORM = """
    %0: f32[4, 3, 5, 6] = input
    %1: f32[3] = input
    %2: f32[3] = input
    %3: f32[4, 3, 5, 6], %4: f32[3], %5: f32[3], %6: f32[3], %7: f32[3] = \
aten._native_batch_norm_legit.default(%0, None, None, %1, %2, True, 0.1, 1e-05) writes %1, %2
    %8: f32[4, 3, 5, 6] = aten.neg.default(%3)
    return %8, %6, %7
    """


def normed(rows: int, memory_format: torch.memory_format) -> list[Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, 3, 5, 6).contiguous(memory_format=memory_format)
    return [x, torch.zeros(3), torch.ones(3)]


def test_other_strides_are_laid_out_and_told_and_nothing_is_written_twice() -> None:
    graph = graph_of(NORM)
    template = PlanTemplate.decoded(Plan.build(graph).template.encoded)
    sizes = Plan.build(graph).sizes
    resized = {4: 7, 4 * 3 * 5 * 6: 7 * 3 * 5 * 6}

    def make(sizes: tuple[int, ...]) -> EagerExecutor:
        return EagerExecutor(Plan(form=(template, sizes)), CPU, None, None, NativeCode, template)

    assert make(sizes).run([*normed(4, torch.contiguous_format)], ()).failures == []
    executor = make(tuple([resized.get(size, size) for size in sizes]))
    for _ in range(3):
        ours = executor.run(normed(7, torch.channels_last), ())
        theirs, interpreter = careful(executor, normed(7, torch.channels_last))
        assert ours.failures == []
        same_outcomes(ours, theirs)
    assert interpreter.unexpected_strides
    assert executor.interpreter.unexpected_strides == interpreter.unexpected_strides


# -- whole programs --------------------------------------------------------------------------------

SIZES = st.sampled_from([2, 3, 5, 8, 24, 32, 33, 64])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(
    st.lists(SIZED, min_size=3, max_size=15),
    st.lists(st.tuples(SIZES, SIZES), min_size=3, max_size=5),
)
def test_programs_in_drawn_sizes_give_the_bits_of_eager_torch(
    program: list[Step], sizes: list[tuple[int, int]]
) -> None:
    shared = 0
    with lazygt.session(launcher="inline", compile="off") as s:
        for size in sizes:
            torch.manual_seed(5)
            eager = start("cpu", *size)
            taken = accepted(program, eager)
            torch.manual_seed(5)
            state = start("lazygt", *size)
            s.flush()
            for step in taken:
                step.run(state)
            for ours, theirs in zip(list(state.tensors), list(eager.tensors), strict=True):
                assert_same_bits(ours.cpu(), theirs)
        shared = s._planner.resized
    target(float(shared), label="resized")


def lengths(device: str) -> Iterator[float]:
    weight = torch.linspace(-1, 1, 64, device=device).view(8, 8)
    data = torch.linspace(-2, 2, 240, device=device).view(30, 8)
    for length in [10, 10, 10, 11, 12, 13, 29, 10, 12]:
        yield ((data[:length] @ weight).softmax(1).cumsum(0) * 2).sum().item()


def test_new_lengths_are_not_interpreted(counts: Counter[str]) -> None:
    with lazygt.session(launcher="inline", compile="off"):
        ours = []
        for place, value in enumerate(lengths("lazygt")):
            ours.append(value)
            if place == 2:
                counts.clear()
    assert ours == list(lengths("cpu"))
    assert counts["interpreted"] == 0
    assert counts["programs"] == 4
