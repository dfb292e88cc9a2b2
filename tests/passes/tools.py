"""What the tests of every pass share: golden texts, and running a graph before and after."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from textwrap import dedent
from typing import Any

import torch

from lazygt.graph import Graph, parse_graph
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Param, map_arg, verify
from lazygt.passes import Pass
from lazygt.runtime.executors.eager import EagerExecutor
from lazygt.runtime.plan import Plan

Tensor = torch.Tensor
CPU = torch.device("cpu")
#: What arithmetic may treat in its own way.
ODD = (float("nan"), -0.0, float("inf"), 0.0, -float("inf"), 1.0, 1e-40, -2.5)


def graph_of(text: str) -> Graph:
    """The verified graph of a text; ``graph {`` and the indent may be left out.

    The parser numbers results by their place, so a text whose numbers are not its own is refused.
    """
    body = dedent(text).strip()
    if not body.startswith("graph {"):
        body = "\n".join(["graph {", *(f"  {row}" for row in body.splitlines()), "}"])
    graph = parse_graph(body)
    verify(graph)
    assert str(graph) == body, difference(body, str(graph))
    return graph


def difference(wanted: str, got: str) -> str:
    """A readable diff of two texts."""
    rows = difflib.unified_diff(
        wanted.splitlines(), got.splitlines(), "wanted", "got", lineterm="", n=100
    )
    return "\n" + "\n".join(rows)


def check(one: Pass, before: str, after: str) -> Graph:
    """Assert that a pass makes ``after`` of ``before``, and nothing more of ``after``."""
    wanted = graph_of(after)
    made = one.run(graph_of(before))
    verify(made)
    assert str(made) == str(wanted), difference(str(wanted), str(made))
    again = one.run(made)
    assert again == made, "a second run changes more:" + difference(str(made), str(again))
    return made


def keeps(one: Pass, text: str) -> None:
    """Assert that a pass returns this very graph."""
    graph = graph_of(text)
    made = one.run(graph)
    assert made is graph, difference(str(graph), str(made))


def check_numbers(one: Pass, before: str, after: str) -> None:
    """``check``, and both texts compute the same."""
    same_numbers(graph_of(before), check(one, before, after))


@dataclass(frozen=True)
class Ran:
    """What one run of a plan left behind.

    Attributes:
        outputs: the values of ``graph.outputs``.
        inputs: the inputs that the plan does not own, as they are after the run.
        generator: the state of the random generator.
        returned: of a data-dependent last node.
    """

    outputs: list[Tensor]
    inputs: dict[int, Tensor]
    generator: Tensor
    returned: Any


def same_numbers(graph: Graph, other: Graph, inputs: Sequence[Tensor] | None = None) -> None:
    """Assert that two graphs compute the same, bit for bit, and leave the same behind.

    Outputs, the generator, and the inputs that neither plan owns are compared; a NaN equals any
    NaN. Each graph runs twice: node by node with every result checked against its meta, then as
    generated code.

    Args:
        inputs: CPU tensors; odd numbers when there are none given.
    """
    inputs = odd_inputs(graph) if inputs is None else inputs
    params = run_time_numbers(graph)
    assert graph.inputs == other.inputs, "a pass must not change the inputs"
    assert len(graph.outputs) == len(other.outputs), "a pass must not change the outputs"
    for ours, theirs in zip(run(graph, inputs, params), run(other, inputs, params), strict=True):
        for place, (a, b) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
            assert same_bits(a, b), f"output {place}: {b} instead of {a}\n{graph}\n{other}"
        for number in ours.inputs.keys() & theirs.inputs.keys():
            a, b = ours.inputs[number], theirs.inputs[number]
            assert same_bits(a, b), f"input %{number} after the run: {b} instead of {a}"
        assert torch.equal(ours.generator, theirs.generator), f"other draws\n{graph}\n{other}"
        assert same_answer(ours.returned, theirs.returned), f"{theirs.returned=}, {ours.returned=}"


def run(graph: Graph, inputs: Sequence[Tensor], params: tuple[Any, ...]) -> list[Ran]:
    """The graph, run twice on copies of the inputs."""
    plan = Plan.build(graph)
    executor = EagerExecutor(plan, CPU)
    return [ran_once(executor, inputs, params) for _ in range(2)]


def ran_once(executor: EagerExecutor, inputs: Sequence[Tensor], params: tuple[Any, ...]) -> Ran:
    writes = executor.plan.steps.writes
    given = [laid_out(t, meta) for t, meta in zip(inputs, executor.plan.graph.inputs, strict=True)]
    torch.manual_seed(3)
    outcome = executor.run(list(given), params)
    assert not outcome.failures, outcome.failures
    borrowed = {n: t for n, t in enumerate(given) if n not in writes.overwritten_inputs}
    for number, value in borrowed.items():
        assert same_bits(value, inputs[number]), f"input %{number} was written but is not owned"
    apart([*borrowed.values(), *outcome.outputs])
    return Ran(outcome.outputs, borrowed, torch.get_rng_state(), outcome.returned)


def laid_out(value: Tensor, meta: TensorMeta) -> Tensor:
    """A copy of ``value`` with the strides, the offset and the lazy bits of ``meta``."""
    made = torch.zeros(meta.extent, dtype=meta.dtype)
    made = made.as_strided(meta.shape, meta.stride, meta.offset)
    made = torch._conj(made) if meta.conj else made
    made = torch._neg_view(made) if meta.neg else made
    return made.copy_(value)


def apart(tensors: Sequence[Tensor]) -> None:
    """Assert that none shares memory with another."""
    homes = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    assert len(set(homes)) == len(homes), "an output shares memory with an input or an output"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, dtypes and bits (so -0.0 is not 0.0); a NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(t: Tensor) -> Tensor:
    plain = torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1))
    plain = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    if plain.is_floating_point():
        plain[plain.isnan()] = float("nan")
    return plain.view(torch.uint8)


def same_answer(a: Any, b: Any) -> bool:
    """Equality of what a data-dependent op returned."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_answer, a, b))
    return same_bits(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)


def odd_inputs(graph: Graph) -> list[Tensor]:
    """Values for the inputs of a graph: odd numbers among ordinary ones."""
    return [odd_input(meta, number) for number, meta in enumerate(graph.inputs)]


def odd_input(meta: TensorMeta, seed: int) -> Tensor:
    if meta.dtype == torch.uint8:
        state = torch.Generator().manual_seed(seed).get_state()
        if meta.numel == state.numel():
            return state
    flat = _odd_numbers(meta.extent, meta.dtype, seed).clone()
    return flat.as_strided(meta.shape, meta.stride, meta.offset)


@lru_cache(maxsize=256)
def _odd_numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """So many of them in a row; not to be written."""
    count *= 2 if dtype.is_complex else 1
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)).double()
    for place in range(seed % 3, count, 3):
        numbers[place] = ODD[(place + seed) % len(ODD)]
    if dtype.is_complex:
        return torch.view_as_complex(numbers.view(-1, 2)).to(dtype)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    return (numbers.nan_to_num(posinf=3, neginf=-3) * 3).round().long().to(dtype)


def run_time_numbers(graph: Graph) -> tuple[Any, ...]:
    """Numbers for the params, neutral ones among them.

    They rise and stay below 1 where they are floats: bounds and probabilities stay valid.
    """
    made: dict[str, Any] = {"float": lambda n: n / (n + 1), "int": lambda n: n % 3, "bool": bool}
    return tuple(made[kind](number) for number, kind in enumerate(graph.params))


def with_literals(graph: Graph) -> Graph:
    """The graph with its run-time numbers written into the arguments, as torch's own would be."""
    params = run_time_numbers(graph)

    def leaf(arg: Arg) -> Arg:
        return params[arg.index] if type(arg) is Param else arg

    nodes = [
        replace(node, args=map_arg(node.args, leaf),
                kwargs=tuple((name, map_arg(arg, leaf)) for name, arg in node.kwargs))
        for node in graph.nodes
    ]  # fmt: skip
    return replace(graph, params=(), nodes=tuple(nodes))
