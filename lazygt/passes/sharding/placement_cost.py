"""Cost of placements on one mesh axis: seconds of a node's work, and of moving a value.

    work         launches, and flops or bytes, whichever takes longer, of the largest block
    S -> R       all-gather           P -> R    all-reduce
    P -> S       reduce-scatter       S -> S'   all-to-all
    R -> S, R -> P    nothing is sent

An interleaved value is gathered and scattered as S is. A conversion to another sharding of its dim
is a halo exchange, or where that has many pieces two all-to-alls through another dim.

The speeds are those of a machine (``lazygt.machine``). Seconds are rounded to whole picoseconds
(``ticks``), so that sums are exact in any order and every rank makes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazygt.graph.cost import Cost
from lazygt.graph.meta import TensorMeta, short_dtype
from lazygt.graph.placement import (
    Cut,
    Partial,
    Placement,
    Replicate,
    StridedShard,
    around,
    local_size,
    whole_groups,
)
from lazygt.machine import Machine, collective_seconds
from lazygt.passes.sharding.halo import rows_between
from lazygt.passes.sharding.rules.strategy import Metas, Strategy

# -- cost tables, interned by content, with cached results -----------------------------------------

Table = npt.NDArray[np.float64]
Scope = tuple[int, ...]


class Factor(NamedTuple):
    """Costs of the joint choices of some variables."""

    scope: Scope  # the variables, each once
    #: costs, with one axis for each variable of the scope, in order; infinity forbids a choice.
    #: Equal tables should be one array, which makes their comparison fast.
    table: Table


#: Number of the absent table, in which all costs are 0.
NONE = -1


class Summed(NamedTuple):
    """Sum of tables, minimised over its first variable."""

    table: int  # number of the table of minima minus ``shift``; NONE where all minima are equal
    shift: float  # the smallest minimum
    best: npt.NDArray[np.intp]  # the first choice (argmin) that attains each minimum


class CostTables:
    """Interned tables: one number for each content, with cached results of operations.

    Attributes:
        computed: number of table entries of the sums that were computed, not found in the cache.
    """

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._of_array: dict[int, int] = {}
        self._slices: dict[tuple[object, ...], int] = {}
        self._transposes: dict[int, int] = {NONE: NONE}
        self._pair_sums: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[object, ...], Summed] = {}
        self.computed = 0

    def number(self, table: Table) -> int:
        """Intern a table that outlives this object; return its number."""
        number = self._of_array.get(id(table))
        if number is None:
            number = self._of_array[id(table)] = self._intern(table)
        return number

    def part(self, table: int, indices: tuple[int | None, ...]) -> int:
        """Return the number of a slice of a table.

        Args:
            indices: for each axis an index, or None to retain the axis.
        """
        key = ("part", table, indices)
        if key not in self._slices:
            index = tuple(slice(None) if index is None else index for index in indices)
            self._slices[key] = self._intern(self._tables[table][index])
        return self._slices[key]

    def least(self, table: int, axis: int) -> int:
        """Return the number of the table of minima over one axis."""
        key = ("least", table, axis)
        if key not in self._slices:
            self._slices[key] = self._intern(self._tables[table].min(axis=axis))
        return self._slices[key]

    def turned(self, table: int) -> int:
        """Return the number of the transpose of a table of two axes."""
        number = self._transposes.get(table)
        if number is None:
            number = self._transposes[table] = self._intern(self._tables[table].T)
            self._transposes[number] = table
        return number

    def plus(self, a: int, b: int) -> int:
        """Return the number of the sum of two tables with the same axes."""
        if a == NONE:
            return b
        number = self._pair_sums.get((a, b))
        if number is None:
            number = self._pair_sums[a, b] = self._intern(self._tables[a] + self._tables[b])
        return number

    def value(self, table: int) -> float:
        """Return the only entry of a table without axes."""
        return self._tables[table].item()

    def along(self, table: int, axis: int, index: Sequence[int]) -> Table:
        """Return the entries along one axis, at ``index`` on the other axes."""
        full_index: list[int | slice] = list(index)
        full_index.insert(axis, slice(None))
        entries: Table = self._tables[table][tuple(full_index)]
        return entries

    def summed(
        self, tables: tuple[int, ...], shape: Scope = (), larger: tuple[tuple[int, Scope], ...] = ()
    ) -> Summed:
        """Add tables up and minimise the sum over axis 0.

        Args:
            tables: the table of axis 0 alone, then the table of axis 0 and each other axis.
            shape: of the sum, where the tables do not determine it.
            larger: (table, for each of its axes the axis of the sum).
        """
        key = (tables, shape, larger) if shape else tables
        summed = self._sums.get(key)
        if summed is None:
            summed = self._sums[key] = self._sum(tables, shape, larger)
        return summed

    def _sum(
        self, tables: tuple[int, ...], shape: Scope, larger: Iterable[tuple[int, Scope]]
    ) -> Summed:
        terms = [(tables[0], (0,)), *[(t, (0, axis)) for axis, t in enumerate(tables[1:], 1)]]
        terms = [(number, axes) for number, axes in terms if number != NONE]
        if not shape:
            sizes = [self._tables[number].shape for number, _ in terms] or [(1,)]
            shape = sizes[0][0], *[size[1] for size in sizes if len(size) > 1]
        total = np.zeros(shape)
        for number, axes in (*terms, *larger):
            order = sorted(range(len(axes)), key=axes.__getitem__)
            broadcast_shape = [1] * len(shape)
            for axis in axes:
                broadcast_shape[axis] = shape[axis]
            total += self._tables[number].transpose(order).reshape(broadcast_shape)
        self.computed += total.size
        minima = total.min(axis=0)
        shift = float(minima.min())
        if math.isfinite(shift):
            minima = minima - shift
        is_constant = not minima.ndim or not minima.any()
        return Summed(NONE if is_constant else self._intern(minima), shift, total.argmin(axis=0))

    def _intern(self, table: Table) -> int:
        """Return the number of a table by its content."""
        key = table.shape, table.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tables)
            self._tables.append(table)
        return number


# -- cost of placements on one mesh axis -----------------------------------------------------------

#: Reductions for which a replicated value becomes partial without communication.
_FREE_PARTIAL = ("sum", "max", "min")
_TICKS = 1e12


def reshard_kind(source: Placement, target: Placement) -> str | None:
    """Return the kind of the collective from one placement to another.

    ``""`` if nothing is sent; None if no collective exists.
    """
    if source == target or (isinstance(source, Replicate) and _is_free(target)):
        return ""
    if isinstance(target, Partial) or isinstance(source, Replicate):
        return None
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter"
    if isinstance(target, Replicate):
        return "all_gather"
    return "all_to_all"


def _is_free(target: Placement) -> bool:
    return not isinstance(target, Partial) or target.op in _FREE_PARTIAL


def payload(kind: str, nbytes: int, axis_size: int) -> int:
    """Return the payload per rank of a collective on a value of global size ``nbytes``."""
    return -(-nbytes // axis_size) if kind == "all_to_all" else nbytes


def reshard_seconds(
    machine: Machine, source: Placement, target: Placement, nbytes: int, axis_size: int
) -> float:
    """Return the time to redistribute a value of global size ``nbytes``.

    Infinity if no collective exists.
    """
    kind = reshard_kind(source, target)
    if kind is None:
        return math.inf
    if not kind:
        return 0.0
    count = max(map(_group_count, (source, target)))
    group_bytes = -(-payload(kind, nbytes, axis_size) // count)
    total = count * collective_seconds(machine, kind, group_bytes, axis_size)
    if not (kind == "all_to_all" and isinstance(source, Cut) and isinstance(target, Cut)):
        return total
    if _is_one_all_to_all(source, target, axis_size):
        return total
    sent_share = rows_sent(source, target, axis_size)
    if sent_share is None:
        return 2 * total  # two all-to-alls, through another dim
    return collective_seconds(machine, "send_recv", math.ceil(sent_share * nbytes), axis_size)


def _group_count(placement: Placement) -> int:
    """Return the number of collectives of a conversion: one for each group if sizes differ."""
    return len(placement.widths) or 1 if isinstance(placement, StridedShard) else 1


def _is_one_all_to_all(source: Cut, target: Cut, axis_size: int) -> bool:
    """Return whether one all-to-all converts between two sharded placements."""
    strided = [placement for placement in (source, target) if isinstance(placement, StridedShard)]
    if not strided or (len(strided) == 1 and source.dim != target.dim):
        return True
    return len(strided) == 1 and whole_groups(strided[0], axis_size)


@lru_cache(maxsize=1024)
def rows_sent(source: Cut, target: Cut, axis_size: int) -> float | None:
    """Return the fraction of a value that a rank sends in the halo exchange between two placements.

    None: the conversion goes through another dim.
    """
    if source.dim != target.dim:
        return None
    group_counts = [around(placement) for placement in (source, target)]
    size = (
        math.lcm(*[outer for outer, _ in group_counts])
        * axis_size
        * max(inner for _, inner in group_counts)
    )
    move = rows_between(source, target, size, axis_size)
    return None if move is None else move.most / size


def share(meta: TensorMeta | None, placement: Placement, axis_size: int) -> float:
    """Return the fraction of a value, from 0 to 1, in the largest shard."""
    if meta is None or not isinstance(placement, Cut):
        return 1.0
    size = meta.shape[placement.dim]
    return local_size(placement, size, axis_size, 0) / size if size else 1.0


def work_share(strategy: Strategy, operands: Metas, results: Metas, axis_size: int) -> float:
    """Return the fraction of a node's arithmetic on the busiest rank: 1 if nothing is sharded."""
    if strategy.share is not None:
        return strategy.share
    return min(
        (share(meta, placement, axis_size)
         for metas, placements in ((operands, strategy.inputs), (results, strategy.outputs))
         for meta, placement in zip(metas, placements, strict=True)),
        default=1.0,
    )  # fmt: skip


def strategy_seconds(
    machine: Machine,
    cost: Cost,
    strategy: Strategy,
    operands: Metas,
    results: Metas,
    axis_size: int,
) -> float:
    """Return the time of a node with a strategy, including the collectives inside (roofline model).

    Args:
        cost: of the unsharded node on one device.
    """
    comm = _comm_seconds(machine, strategy, axis_size)
    flops = cost.flops * work_share(strategy, operands, results, axis_size)
    local_bytes = cost.bytes * _byte_share(strategy, operands, results, axis_size)
    work = max(flops / _rate(machine, operands, results), local_bytes / machine.memory.bandwidth)
    total = max(comm, work) if strategy.overlapped_turns else comm + work
    return total + cost.launches * machine.host.launch


def _comm_seconds(machine: Machine, strategy: Strategy, axis_size: int) -> float:
    """Return the time of the collectives inside a strategy.

    Collectives run one after another. With ``strategy.overlapped_turns`` they run in
    that many rounds, and the collectives of a round run at once and share the links.
    """
    times = [collective_seconds(machine, c.kind, c.nbytes, axis_size) for c in strategy.comm]
    if not (times and strategy.overlapped_turns):
        return sum(times)
    latencies = [collective_seconds(machine, c.kind, 0, axis_size) for c in strategy.comm]
    return sum(times) - sum(latencies) + strategy.overlapped_turns * max(latencies)


def _rate(machine: Machine, operands: Metas, results: Metas) -> float:
    """Return the machine's operations per second in the dtype of a node."""
    meta = next((meta for meta in (*results, *operands) if meta is not None), None)
    return machine.matmul.rate_of("f32" if meta is None else short_dtype(meta.dtype))


def _byte_share(strategy: Strategy, operands: Metas, results: Metas, axis_size: int) -> float:
    """Return the fraction of a node's memory traffic on the rank with the largest shards."""
    total = local = 0.0
    for metas, placements in ((operands, strategy.inputs), (results, strategy.outputs)):
        for meta, placement in zip(metas, placements, strict=True):
            nbytes = 0 if meta is None else meta.nbytes
            total += nbytes
            local += nbytes * share(meta, placement, axis_size)
    return local / total if total else 1.0


def ticks(seconds: float) -> float:
    """Round seconds to whole picoseconds, as a float; infinity stays."""
    return seconds if math.isinf(seconds) else float(round(seconds * _TICKS))


def seconds(cost: float) -> float:
    """Convert a cost in ticks to seconds."""
    return cost / _TICKS


# -- cost of redistribution ------------------------------------------------------------------------

#: Placements in which one value is available, or wanted, at the same time.
Copies = tuple[Placement, ...]
#: For each choice of a variable the available, or wanted, placements of a value.
Options = tuple[Copies, ...]


class ReshardingCosts:
    """Cached redistribution costs on one axis, in ticks; equal tables are one array.

    Args:
        parts: number of ranks of the axis.
    """

    def __init__(self, machine: Machine, parts: int) -> None:
        self._machine, self._slices = machine, parts
        self._move_costs: dict[tuple[Placement, Placement, int], float] = {}
        self._make_costs: dict[tuple[Copies, Copies, int], float] = {}
        self._interned_options: dict[Options, Options] = {}
        self._tables: dict[tuple[int, int, int], Table | None] = {}
        self._copies: dict[tuple[int, int], Table | None] = {}

    def options(self, options: Options) -> Options:
        """Intern options; ``table`` and ``copies`` take interned options only."""
        return self._interned_options.setdefault(options, options)

    def move(self, source: Placement, target: Placement, nbytes: int) -> float:
        """Return the cost of redistributing a value of ``nbytes``."""
        key = source, target, nbytes
        cost = self._move_costs.get(key)
        if cost is None:
            duration = reshard_seconds(self._machine, source, target, nbytes, self._slices)
            cost = self._move_costs[key] = ticks(duration)
        return cost

    def make(self, available: Copies, wanted: Copies, nbytes: int) -> float:
        """Return the cost of all wanted placements, made from the available ones.

        One intermediate placement is used if that is cheaper.
        """
        key = available, wanted, nbytes
        cost = self._make_costs.get(key)
        if cost is None:
            cost = self._direct_cost(available, wanted, nbytes)
            if len(wanted) > 1 or math.isinf(cost):  # several wanted, or no direct conversion
                for intermediate in (Replicate(), *wanted):
                    first = self._direct_cost(available, (intermediate,), nbytes)
                    cost = min(
                        cost, first + self._direct_cost((*available, intermediate), wanted, nbytes)
                    )
            self._make_costs[key] = cost
        return cost

    def _direct_cost(self, available: Copies, wanted: Copies, nbytes: int) -> float:
        return sum(
            min(self.move(source, target, nbytes) for source in available) for target in wanted
        )

    def table(self, have: Options, want: Options, nbytes: int) -> Table | None:
        """Return the costs: one row for each choice of ``have``, one column for each of ``want``.

        None if all costs are 0.
        """
        key = id(have), id(want), nbytes
        if key not in self._tables:
            costs = np.array([[self.make(h, w, nbytes) for w in want] for h in have])
            self._tables[key] = costs if costs.any() else None
        return self._tables[key]

    def copies(self, have: Options, nbytes: int) -> Table | None:
        """Return for each choice the cost of making its other placements from its first one.

        None if all costs are 0.
        """
        key = id(have), nbytes
        if key not in self._copies:
            costs = np.array([self.make(h[:1], h[1:], nbytes) for h in have], dtype=float)
            self._copies[key] = costs if costs.any() else None
        return self._copies[key]
