"""Segments of a plan: runs of steps to capture as one CUDA graph, or to run singly.

Attention with dropout returns *seeds*: the generator's state, which its backward pass reads.
"""

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

#: Smallest number of kernels of a CUDA graph: each graph costs a launch and copies.
SHORTEST = 4
#: Names in schemas of attention for the generator state at the start of dropout.
_SEED_NAMES = frozenset({"philox_seed", "philox_offset", "rng_state"})
_ATTENTION = re.compile(r"aten\.\w*attention\w*\.\w+$")
#: (first node, end node, exclusive, True if the nodes are captured)
Run = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class GraphSegment:
    """Segment of a plan: consecutive steps, with their inputs and outputs."""

    first: int  # first, end: range of the nodes, ``end`` excluded
    end: int
    captured: bool  # True if the segment is a CUDA graph
    inputs: tuple[int, ...] = ()  # earlier values that the segment reads
    outputs: tuple[int, ...] = ()  # results of the segment that live after it
    dying: tuple[int, ...] = ()  # earlier values that die in the segment
    #: inputs whose memory the segment writes, or an output shares
    exposed: tuple[int, ...] = ()
    params: tuple[int, ...] = ()  # run-time numbers that the segment reads


def split_into_segments(
    schedule: Schedule, excluded: Collection[int], changing: Collection[int]
) -> list[GraphSegment]:
    """Split a schedule into segments; return an empty list if none can be captured.

    Args:
        excluded: nodes that are known not to be capturable.
        changing: params whose numbers change from run to run. Nodes with these can't be captured,
            since a CUDA graph contains the arguments of its kernels.
    """
    nodes = schedule.graph.nodes
    if any(_resizes_operand(node) for node in nodes):
        return []
    metas = schedule.graph.values
    moving = _writes_through_moving_views(schedule, changing)
    capturable_nodes = [
        number not in excluded
        and number not in moving
        and not _writes_by_mask(node, metas)
        and capturable(node)
        and not any(index in changing for index in params_of(node))
        for number, node in enumerate(nodes)
    ]
    runs = _grouped(nodes, capturable_nodes)
    while seed_sharing := _shares_outside_seeds(schedule, runs):  # fewer each time, so it ends
        for number in seed_sharing:
            capturable_nodes[number] = False
        runs = _grouped(nodes, capturable_nodes)
    if not any(captured for _, _, captured in runs):
        return []
    return list(_with_lifetimes(schedule, runs))


def _grouped(nodes: Sequence[Node], capturable_nodes: list[bool]) -> list[Run]:
    """Group consecutive nodes: capturable ones, if enough for a graph, and the rest.

    Args:
        capturable_nodes: for each node, True if it can be captured.
    """
    runs: list[Run] = []
    for is_capturable, numbers in groupby(range(len(nodes)), capturable_nodes.__getitem__):
        nodes_of_run = list(numbers)
        captured = (
            is_capturable
            and sum(_launches_kernel(nodes[number]) for number in nodes_of_run) >= SHORTEST
        )
        if runs and not captured and not runs[-1][2]:
            runs[-1] = runs[-1][0], nodes_of_run[-1] + 1, False
        else:
            runs.append((nodes_of_run[0], nodes_of_run[-1] + 1, captured))
    return runs


def _shares_outside_seeds(schedule: Schedule, runs: list[Run]) -> set[int]:
    """Return the captured nodes that share dropout seeds with nodes outside their graph.

    In a capture, attention stores its seeds on the GPU, otherwise on the host. Its backward expects
    the seeds on the same side: with an address of the other side the process crashes.
    """
    graph_at = {n: index for index, (first, end, captured) in enumerate(runs) if captured
                for n in range(first, end)}  # fmt: skip
    nodes: set[int] = set()
    for seed, users in _seed_users(schedule).items():
        one_graph = len({graph_at.get(number) for number in users}) == 1
        internal = len(schedule.graph.inputs) <= seed and seed not in schedule.graph.outputs
        if not (one_graph and internal):
            nodes.update(users & graph_at.keys())
    return nodes


def _seed_users(schedule: Schedule) -> dict[int, set[int]]:
    """Return the dropout seeds of attention: value -> the nodes that make or read it."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    for number, (node, results) in enumerate(schedule.graph.numbered()):
        for seed in _seeds_of(node, results):
            users[seed].add(number)
        for ref in node.refs():
            if ref in users:
                users[ref].add(number)
    return users


def _seeds_of(node: Node, results: range) -> Iterator[int]:
    """Yield the seeds among a node's results and arguments, if the node is attention."""
    if not _ATTENTION.match(node.op) or drops_nothing(node):
        return
    arguments, returned = _seed_indices(node.op)
    yield from (results[index] for index in returned)
    for index in arguments:
        arg = node.args[index] if index < len(node.args) else None
        if isinstance(arg, Ref):
            yield arg.index


@cache
def _seed_indices(op: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of seeds among an op's arguments, and among its returned tensors."""
    schema = overload(op)._schema
    tensors = [item for item in schema.returns if isinstance(item.type, torch.TensorType)]
    arguments, returned = (
        tuple(index for index, item in enumerate(items) if item.name in _SEED_NAMES)
        for items in (schema.arguments, tensors)
    )
    return arguments, returned


def capturable(node: Node) -> bool:
    """Return whether a node only launches kernels on its operands, as far as its op shows.

    Not capturable are collectives, ops that set a generator, custom ops, and ops that return Python
    values.
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


def _writes_through_moving_views(schedule: Schedule, changing: Collection[int]) -> set[int]:
    """Return the nodes that write through a view whose position changes from run to run."""
    views: set[int] = set()
    nodes: set[int] = set()
    for number, (node, results) in enumerate(schedule.graph.numbered()):
        f = op_facts(node)
        if f is not None and f.aliases:
            is_moving = any(index in changing for index in params_of(node))
            if is_moving or not views.isdisjoint(node.refs()):
                views.update(results)
        if not views.isdisjoint(_written(node)):
            nodes.add(number)
            views.update(results)
    return nodes


def steady_writes(schedule: Schedule, segment: GraphSegment, steady: set[int]) -> set[int]:
    """Return the values that share the address of a steady one, so that CUDA graphs read them.

    They are the results of a segment's in-place writes to steady values; a write to a copy has a
    new address.

    Args:
        steady: numbers of the values with the same address in each run.
    """
    first_result = len(schedule.graph.inputs)
    sharing: set[int] = set()
    for number, node in enumerate(schedule.graph.nodes[: segment.end]):
        if number >= segment.first:
            modes = schedule.writes.modes[number]  # of each written value: in place, or to a copy
            for offset, (target, mode) in enumerate(zip(_written(node), modes, strict=True)):
                if mode != COPY and target in steady | sharing:
                    # a node's written values follow its new ones; a write-back has only the former
                    new_outputs = 0 if node.op == WRITE_BACK else len(node.fresh)
                    sharing.add(first_result + new_outputs + offset)
        first_result += len(node.results)
    return sharing


def _written(node: Node) -> tuple[int, ...]:
    """Return the values that a node writes."""
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


def _writes_by_mask(node: Node, metas: tuple[object, ...]) -> bool:
    """Return whether a node writes by a mask, which synchronizes to read the mask's count."""
    if "index_put" not in node.op:
        return False
    return any(getattr(metas[r], "dtype", None) in (torch.bool, torch.uint8) for r in node.refs())


def _resizes_operand(node: Node) -> bool:
    """Return whether a node changes its operand's shape in place, as ``squeeze_`` does."""
    f = op_facts(node)
    return f is not None and f.inplace_view


def _launches_kernel(node: Node) -> bool:
    """Return whether a node launches a kernel; views don't."""
    f = op_facts(node)
    return f is None or not f.views


def _with_lifetimes(schedule: Schedule, runs: list[Run]) -> Iterator[GraphSegment]:
    """Yield the segment of each run, with inputs, outputs and aliases from liveness analysis."""
    graph = schedule.graph
    numbered = list(graph.numbered())
    aliases = Aliases(graph)
    aliases.run()
    memory = aliases.memory
    next_value = len(graph.inputs)
    for first, end, captured in runs:
        first_value = next_value
        takes: dict[int, None] = {}
        freed: list[int] = []
        params: set[int] = set()
        exposed_memory: set[int] = set()
        for number in range(first, end):
            node, results = numbered[number]
            takes.update(dict.fromkeys(ref for ref in node.refs() if ref < first_value))
            freed.extend(schedule.frees[number])
            params.update(params_of(node))
            exposed_memory.update(memory[target] for target in _written(node))
            next_value = results.stop
        freed_values = set(freed)
        gives = tuple(
            value for value in range(first_value, next_value) if value not in freed_values
        )
        exposed_memory.update(memory[value] for value in gives)
        yield GraphSegment(
            first,
            end,
            captured,
            tuple(takes),
            gives,
            tuple(value for value in freed if value < first_value),
            tuple(value for value in takes if memory[value] in exposed_memory),
            tuple(sorted(params)),
        )
