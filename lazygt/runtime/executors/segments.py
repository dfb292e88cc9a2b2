"""Stretches: runs of a plan's steps, each captured as one CUDA graph or run step by step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch

from lazygt.graph.alias import COPY, WRITE_BACK, Aliases, drops_nothing, op_facts
from lazygt.graph.node import DEVICE, Node, Ref, params_in
from lazygt.graph.ops import overload
from lazygt.runtime.plan import Schedule

#: Kernels from which a stretch is worth a graph: each graph costs a launch and copies.
SHORTEST = 4
#: Names in schemas of attention for the generator state at the start of dropout.
_SEEDS = frozenset({"philox_seed", "philox_offset", "rng_state"})
_ATTENTION = re.compile(r"aten\.\w*attention\w*\.\w+$")
#: (first node, the one after the last, True if they are to be captured)
Run = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some consecutive steps.

    Attributes:
        first, end: the nodes, without ``end``.
        captured: they are to be a CUDA graph.
        takes: values from before that they read.
        gives: values that they make and that live on.
        drops: values from before that die in them.
        exposed: those of ``takes`` with memory that they write, or that ``gives`` shares.
        params: run-time numbers that they take.
    """

    first: int
    end: int
    captured: bool
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    exposed: tuple[int, ...] = ()
    params: tuple[int, ...] = ()


def cut(schedule: Schedule, apart: Collection[int], changing: Collection[int]) -> list[Stretch]:
    """Cut a schedule into stretches; return none if none of them can be captured.

    Args:
        apart: nodes that are known not to be capturable.
        changing: params with numbers that change: they can't be part of a graph, which holds the
            arguments of its kernels.
    """
    nodes = schedule.graph.nodes
    if any(_turns(node) for node in nodes):
        return []
    metas = schedule.graph.values
    astray = _astray(schedule, changing)
    fits = [
        number not in apart
        and number not in astray
        and not _masked(node, metas)
        and capturable(node)
        and not any(index in changing for index in params_of(node))
        for number, node in enumerate(nodes)
    ]
    runs = _runs(nodes, fits)
    while torn := _torn(schedule, runs):
        for number in torn:
            fits[number] = False
        runs = _runs(nodes, fits)
    if not any(captured for _, _, captured in runs):
        return []
    return list(_described(schedule, runs))


def _runs(nodes: Sequence[Node], fits: list[bool]) -> list[Run]:
    """Group consecutive nodes that fit, if they are enough for a graph, and the rest."""
    runs: list[Run] = []
    for fit, numbers in groupby(range(len(nodes)), fits.__getitem__):
        row = list(numbers)
        long = fit and sum(_launches(nodes[number]) for number in row) >= SHORTEST
        if runs and not long and not runs[-1][2]:
            runs[-1] = runs[-1][0], row[-1] + 1, False
        else:
            runs.append((row[0], row[-1] + 1, long))
    return runs


def _torn(schedule: Schedule, runs: list[Run]) -> set[int]:
    """Return the captured nodes that share seeds of dropout with nodes outside their graph.

    Attention keeps its seeds on the GPU in a capture and on the host otherwise, and its backward
    expects them on its own side: with an address on the other side the process dies.
    """
    graph_at = {n: at for at, (first, end, captured) in enumerate(runs) if captured
                for n in range(first, end)}  # fmt: skip
    torn: set[int] = set()
    for seed, users in _seeds(schedule).items():
        alone = len({graph_at.get(number) for number in users}) == 1
        inside = len(schedule.graph.inputs) <= seed and seed not in schedule.graph.outputs
        if not (alone and inside):
            torn.update(users & graph_at.keys())
    return torn


def _seeds(schedule: Schedule) -> dict[int, set[int]]:
    """Return the seeds of dropout in attention, and the nodes that make or take them."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    for number, (node, results) in enumerate(schedule.graph.numbered()):
        for seed in _own_seeds(node, results):
            users[seed].add(number)
        for ref in node.refs():
            if ref in users:
                users[ref].add(number)
    return users


def _own_seeds(node: Node, results: range) -> Iterator[int]:
    """Yield the seeds that attention returns, or is called with."""
    if not _ATTENTION.match(node.op) or drops_nothing(node):
        return
    arguments, returned = _seed_places(node.op)
    yield from (results[place] for place in returned)
    for place in arguments:
        arg = node.args[place] if place < len(node.args) else None
        if isinstance(arg, Ref):
            yield arg.index


@cache
def _seed_places(op: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of seeds among an op's arguments, and among its returned tensors."""
    schema = overload(op)._schema
    tensors = [each for each in schema.returns if isinstance(each.type, torch.TensorType)]
    arguments, returned = (
        tuple(place for place, each in enumerate(row) if each.name in _SEEDS)
        for row in (schema.arguments, tensors)
    )
    return arguments, returned


def capturable(node: Node) -> bool:
    """Return whether a node only launches kernels on its operands, as far as its op tells.

    Not so: collectives, which other ranks have to meet, ops that set a generator, code of users,
    and ops with answers for Python.
    """
    if node.op == WRITE_BACK or node.body is not None:
        return True
    if not node.op.startswith("aten.") or "@" in node.op or node.dynamic:
        return False
    if op_facts(node) is None or not node.results:
        return False
    return dict(node.kwargs).get("device") in (None, DEVICE)


def params_of(node: Node) -> list[int]:
    """Return the run-time numbers that a node takes."""
    return params_in((*node.args, *(arg for _, arg in node.kwargs)))


def _astray(schedule: Schedule, changing: Collection[int]) -> set[int]:
    """Return the nodes that write through a view at a changing position."""
    views: set[int] = set()
    nodes: set[int] = set()
    for number, (node, results) in enumerate(schedule.graph.numbered()):
        f = op_facts(node)
        if f is not None and f.aliases:
            moves = any(index in changing for index in params_of(node))
            if moves or not views.isdisjoint(node.refs()):
                views.update(results)
        if not views.isdisjoint(_written(node)):
            nodes.add(number)
            views.update(results)
    return nodes


def steady_after(schedule: Schedule, stretch: Stretch, steady: set[int]) -> set[int]:
    """Return the steady values that a stretch makes by writing steady values in place.

    A value is steady if it lies at the same address in each run.
    """
    first = len(schedule.graph.inputs)
    versions: set[int] = set()
    for number, node in enumerate(schedule.graph.nodes[: stretch.end]):
        if number >= stretch.first:
            modes = schedule.writes.modes[number]
            for offset, (target, mode) in enumerate(zip(_written(node), modes, strict=True)):
                if mode != COPY and target in steady | versions:
                    fresh = 0 if node.op == WRITE_BACK else len(node.fresh)
                    versions.add(first + fresh + offset)
        first += len(node.results)
    return versions


def _written(node: Node) -> tuple[int, ...]:
    """Return the values that a node writes."""
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


def _masked(node: Node, metas: tuple[object, ...]) -> bool:
    """Return whether a node writes by a mask: its kernel asks the GPU for the mask's size."""
    if "index_put" not in node.op:
        return False
    return any(getattr(metas[r], "dtype", None) in (torch.bool, torch.uint8) for r in node.refs())


def _turns(node: Node) -> bool:
    """Return whether a node reshapes its operand in place: that may be a graph's own tensor."""
    f = op_facts(node)
    return f is not None and f.inplace_view


def _launches(node: Node) -> bool:
    f = op_facts(node)
    return f is None or not f.views


def _described(schedule: Schedule, runs: list[Run]) -> Iterator[Stretch]:
    graph = schedule.graph
    numbered = list(graph.numbered())
    aliases = Aliases(graph)
    aliases.run()
    memory = aliases.memory
    born = len(graph.inputs)
    for first, end, captured in runs:
        before = born
        takes: dict[int, None] = {}
        freed: list[int] = []
        params: set[int] = set()
        shown: set[int] = set()
        for number in range(first, end):
            node, results = numbered[number]
            takes.update(dict.fromkeys(ref for ref in node.refs() if ref < before))
            freed.extend(schedule.frees[number])
            params.update(params_of(node))
            shown.update(memory[target] for target in _written(node))
            born = results.stop
        dead = set(freed)
        gives = tuple(value for value in range(before, born) if value not in dead)
        shown.update(memory[value] for value in gives)
        yield Stretch(
            first,
            end,
            captured,
            tuple(takes),
            gives,
            tuple(value for value in freed if value < before),
            tuple(value for value in takes if memory[value] in shown),
            tuple(sorted(params)),
        )
