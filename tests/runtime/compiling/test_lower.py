"""What the compiler is given computes what the members compute one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._inductor.exc import CppCompileError, InductorError
from torch._inductor.loop_body import LoopBody

from lazygt.graph import Param
from lazygt.graph.fusion import NUMBERS
from lazygt.graph.node import Node
from lazygt.passes import PIPELINE, run_passes
from lazygt.passes.fuse import Fuse
from lazygt.runtime import graph_codec
from lazygt.runtime.compiling import service
from lazygt.runtime.compiling.service import begin
from lazygt.runtime.executors.compiled import Cache, Compiled
from lazygt.runtime.executors.kernel_group import BY_TENSOR, KernelGroup
from tests.passes.overloads import inputs_for
from tests.passes.recording import recorded
from tests.passes.steps import PROGRAMS, Step
from tests.passes.tools import CPU, graph_of, run_time_numbers
from tests.runtime.compiling.lowering import agree, group_of, one_by_one

# -- every member --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["aten.mul.Tensor", "aten.div.Tensor", "aten.mul_.Tensor"])
@pytest.mark.parametrize("number", [2, 0.5, -3.25])
def test_number_operand_is_lowered_like_tensor(op: str, number: float) -> None:
    writes = " writes %0" if "_" in op else ""
    body = graph_of(f"%0: f32[17] = input\n$0: float = param\n%1: f32[17] = {op}(%0, $0){writes}\n"
                    "return %1")  # fmt: skip
    agree(group_of(body), inputs_for(body), (number,))


def test_pass_and_compiler_agree_on_numbers() -> None:
    assert set(NUMBERS) == set(BY_TENSOR)


# -- writes --------------------------------------------------------------------------------------


def fused(text: str) -> KernelGroup:
    """The group of the only fused node that a graph becomes."""
    (node,) = Fuse().run(graph_of(text)).nodes
    assert node.body is not None
    return KernelGroup.of(node)


@pytest.mark.parametrize(
    "text",
    [
        # neg reads the old version of what exp_ has written
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp_.default(%0) writes %0
        %2: f32[9000] = aten.neg.default(%0)
        %3: f32[9000] = aten.add.Tensor(%1, %2)
        return %1, %3
        """,
        # a version in between is returned, the last one is written
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp_.default(%0) writes %0
        %2: f32[9000] = aten.neg_.default(%1) writes %1
        %3: f32[9000] = aten.mul_.Tensor(%2, %1) writes %2
        return %1, %3
        """,
        # two operands change places
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[9000] = aten.neg.default(%0)
        %3: f32[9000] = aten.copy_.default(%0, %1) writes %0
        %4: f32[9000] = aten.copy_.default(%1, %2) writes %1
        return %3, %4
        """,
        # to a given tensor, by a copy with a cast, and to one of other strides
        """
        %0: f32[90, 100] = input
        %1: f64[90, 100] = input
        %2: f32[90, 100]@(1, 90) = input
        %3: f32[90, 100] = aten.mul.out(%0, %2, out=%0) writes %0
        %4: f64[90, 100] = aten.copy_.default(%1, %3) writes %1
        %5: f32[90, 100]@(1, 90) = aten.add.out(%3, %3, out=%2) writes %2
        return %3, %4, %5
        """,
    ],
)
def test_operands_are_written_at_the_end(text: str) -> None:
    group = fused(text)
    assert group.writes
    agree(group, inputs_for(group.body))


@given(PROGRAMS)
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_random_groups_are_lowered_correctly(program: list[Step]) -> None:
    for group, numbers in groups(program):
        agree(group, inputs_for(group.body), numbers)


def groups(program: list[Step]) -> Iterator[tuple[KernelGroup, tuple[Any, ...]]]:
    """The groups of a program with values for their numbers."""
    for graph in recorded(program):
        params = run_time_numbers(graph)
        for node in run_passes(graph, PIPELINE).nodes:
            if node.body is not None:
                group, numbers = KernelGroup.of(node), _numbers(node, params)
                # several lanes take numbers of their own
                yield group, (numbers * group.lanes)[: len(group.body.params)]


def _numbers(node: Node, params: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(params[arg.index] for arg in node.args if type(arg) is Param)


# -- really compiled -----------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_drawn_groups_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of drawn programs, as the compile process answers for them."""
    cache = Cache(str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for group, numbers in some_groups(3):
        key = group.key("cpu")
        told = service.answer(request_of(group), cache)
        assert told == {"key": key, "error": ""}, group.body
        operands = [t.nan_to_num(posinf=2.0, neginf=-2.0) for t in inputs_for(group.body)]
        wanted = one_by_one(group, operands, numbers)
        compiled = Compiled(group, cache.code(key), CPU)
        mine = [operand.clone() for operand in operands]
        made = compiled(*mine, *numbers)
        found = [made] if group.fresh == 1 else list(made)
        for one, other in zip([*found, *(mine[n] for n, _ in group.writes)], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_operand_overwritten_after_a_softmax_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's ``KeyError: 'buf1'``: the writer of %0 does not load the exponentials."""
    monkeypatch.setattr(LoopBody, "get_read_expr", LoopBody.get_read_expr)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    answer = begin(str(tmp_path))
    group = fused("""
        %0: f32[64, 100] = input
        %1: f32[64, 100] = aten._softmax.default(%0, -1, False)
        %2: f32[64, 100] = aten.mul.out(%1, %1, out=%0) writes %0
        return %2
    """)
    assert group.writes == ((0, 0),)
    assert answer(request_of(group)) == {"key": group.key("cpu"), "error": ""}
    assert Cache(str(tmp_path)).find(group.key("cpu"))  # results were compared with the members'


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            InductorError(KeyError("buf12"), inspect.currentframe()),
            "InductorError: KeyError: 'buf12'",
        ),
        (CppCompileError(["c++", "a.cpp"], "1\n" * 999 + "a.cpp:3:9: error: no member 'x'\n2"),
         "CppCompileError: C++ compile error: a.cpp:3:9: error: no member 'x'"),
        (RecursionError(), "RecursionError"),
        (MemoryError("\n\n"), "MemoryError"),
    ],
)  # fmt: skip
def test_error_of_a_compiler_is_one_line(
    error: Exception, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(service, "compile_group", failing)
    body = graph_of("%0: f32[9] = input\n%1: f32[9] = aten.exp.default(%0)\nreturn %1")
    told = service.answer(request_of(group_of(body)), Cache(str(tmp_path)))
    assert told == {"key": group_of(body).key("cpu"), "error": line}


def request_of(group: KernelGroup) -> dict[str, Any]:
    """The compile process is asked for a group by this."""
    return {
        "key": group.key("cpu"), "body": graph_codec.encode_graph(group.body),
        "writes": group.writes, "fresh": group.fresh, "flat": group.flat,
        "dynamic_dims": group.dynamic_dims, "lanes": group.lanes, "device": "cpu",
    }  # fmt: skip


def some_groups(count: int) -> list[tuple[KernelGroup, tuple[Any, ...]]]:
    """Groups of different structure, with and without writes and numbers."""
    found: dict[str, tuple[KernelGroup, tuple[Any, ...]]] = {}

    @settings(max_examples=25, derandomize=True, database=None)
    @given(PROGRAMS)
    def look(program: list[Step]) -> None:
        for group, numbers in groups(program):
            if group.lanes == 1 and {m.dtype for m in group.body.inputs} == {torch.float32}:
                kind = f"{bool(group.writes)} {bool(numbers)} {group.flat}"
                found.setdefault(kind, (group, numbers))

    look()
    assert len(found) >= count, found.keys()
    return list(found.values())[:count]
