"""Cost of placements on one mesh axis: seconds of a node's work, and of moving a value.

    work         launches, and flops or bytes, whichever takes longer, of the largest block
    S -> R       all-gather           P -> R    all-reduce
    P -> S       reduce-scatter       S -> S'   all-to-all
    R -> S, R -> P    nothing is sent

An interleaved value is gathered and scattered as S is; to another cut of its dim ranks send the
rows that others lack, or where those are in many pieces it is exchanged twice, by way of another
dim.

A machine gives the speeds (``lazygt.machine``). Seconds are rounded to whole picoseconds
(``ticks``), so that sums are exact in any order and every rank comes to the same decision.
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

# -- cost tables: kept once by content, along with results computed from them ----------------------

Table = npt.NDArray[np.float64]
Scope = tuple[int, ...]


class Factor(NamedTuple):
    """Costs of the joint choices of some variables.

    Attributes:
        scope: the variables, each once.
        table: one axis a variable of the scope, in its order; infinity forbids. Factors that share
            one array are at once seen to be alike.
    """

    scope: Scope
    table: Table


#: Stands for no table: nothing costs anything.
NONE = -1


class Summed(NamedTuple):
    """Sum of tables, minimised over its first variable.

    Attributes:
        table: the number of the minima less ``shift``; NONE where they are all alike.
        shift: the least of the minima.
        best: the first choice that attains each minimum.
    """

    table: int
    shift: float
    best: npt.NDArray[np.intp]


class CostTables:
    """Tables by number, one number for each content, with results computed from them."""

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._of_array: dict[int, int] = {}
        self._parts: dict[tuple[object, ...], int] = {}
        self._turned: dict[int, int] = {NONE: NONE}
        self._both: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[object, ...], Summed] = {}
        self.computed = 0

    def number(self, table: Table) -> int:
        """Return the number of a table that outlives this object."""
        number = self._of_array.get(id(table))
        if number is None:
            number = self._of_array[id(table)] = self._intern(table)
        return number

    def part(self, table: int, where: tuple[int | None, ...]) -> int:
        """Return the number of a slice: an index for each axis that goes, None for the others."""
        key = ("part", table, where)
        if key not in self._parts:
            index = tuple(slice(None) if at is None else at for at in where)
            self._parts[key] = self._intern(self._tables[table][index])
        return self._parts[key]

    def least(self, table: int, axis: int) -> int:
        """Return the number of the minima over one axis."""
        key = ("least", table, axis)
        if key not in self._parts:
            self._parts[key] = self._intern(self._tables[table].min(axis=axis))
        return self._parts[key]

    def turned(self, table: int) -> int:
        """Return the number of the transpose of a table of two axes."""
        number = self._turned.get(table)
        if number is None:
            number = self._turned[table] = self._intern(self._tables[table].T)
            self._turned[number] = table
        return number

    def plus(self, a: int, b: int) -> int:
        """Return the number of the sum of two tables with the same axes."""
        if a == NONE:
            return b
        number = self._both.get((a, b))
        if number is None:
            number = self._both[a, b] = self._intern(self._tables[a] + self._tables[b])
        return number

    def value(self, table: int) -> float:
        """Return the only entry of a table without axes."""
        return self._tables[table].item()

    def along(self, table: int, axis: int, index: Sequence[int]) -> Table:
        """Return the entries along one axis, at ``index`` of the other ones."""
        at: list[int | slice] = list(index)
        at.insert(axis, slice(None))
        line: Table = self._tables[table][tuple(at)]
        return line

    def summed(
        self, tables: tuple[int, ...], shape: Scope = (), larger: tuple[tuple[int, Scope], ...] = ()
    ) -> Summed:
        """Add tables up and minimise the sum over axis 0.

        Args:
            tables: of axis 0 alone, then of axis 0 and each other one.
            shape: of the sum, where the tables don't tell.
            larger: (table, the axis of the sum that each of its axes is).
        """
        key = (tables, shape, larger) if shape else tables
        summed = self._sums.get(key)
        if summed is None:
            summed = self._sums[key] = self._sum(tables, shape, larger)
        return summed

    def _sum(
        self, tables: tuple[int, ...], shape: Scope, larger: Iterable[tuple[int, Scope]]
    ) -> Summed:
        parts = [(tables[0], (0,)), *[(t, (0, axis)) for axis, t in enumerate(tables[1:], 1)]]
        parts = [(number, axes) for number, axes in parts if number != NONE]
        if not shape:
            sizes = [self._tables[number].shape for number, _ in parts] or [(1,)]
            shape = sizes[0][0], *[size[1] for size in sizes if len(size) > 1]
        total = np.zeros(shape)
        for number, axes in (*parts, *larger):
            order = sorted(range(len(axes)), key=axes.__getitem__)
            spread = [1] * len(shape)
            for axis in axes:
                spread[axis] = shape[axis]
            total += self._tables[number].transpose(order).reshape(spread)
        self.computed += total.size
        least = total.min(axis=0)
        shift = float(least.min())
        if math.isfinite(shift):
            least = least - shift
        alike = not least.ndim or not least.any()
        return Summed(NONE if alike else self._intern(least), shift, total.argmin(axis=0))

    def _intern(self, table: Table) -> int:
        key = table.shape, table.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tables)
            self._tables.append(table)
        return number


# -- cost of placements on one mesh axis: seconds of a node's work, and of moving a value ----------

#: Reductions that have a partial value of a whole one for nothing: by identity, or repetition.
_FREE_PARTIAL = ("sum", "max", "min")
_TICKS = 1e12


def reshard_kind(source: Placement, target: Placement) -> str | None:
    """Return the collective between two placements.

    ``""`` where nothing is sent, None where there is none.
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


def payload(kind: str, nbytes: int, parts: int) -> int:
    """Return the payload per rank of a collective on a value of ``nbytes`` globally."""
    return -(-nbytes // parts) if kind == "all_to_all" else nbytes


def reshard_seconds(
    machine: Machine, source: Placement, target: Placement, nbytes: int, parts: int
) -> float:
    """Return the time to give a value of ``nbytes`` globally another placement.

    Infinity if no collective can.
    """
    kind = reshard_kind(source, target)
    if kind is None:
        return math.inf
    if not kind:
        return 0.0
    count = max(map(_group_count, (source, target)))
    of_each = -(-payload(kind, nbytes, parts) // count)
    took = count * collective_seconds(machine, kind, of_each, parts)
    if not (kind == "all_to_all" and isinstance(source, Cut) and isinstance(target, Cut)):
        return took
    if _in_one(source, target, parts):
        return took
    share = rows_sent(source, target, parts)
    if share is None:
        return 2 * took  # by way of another dim
    return collective_seconds(machine, "send_recv", math.ceil(share * nbytes), parts)


def _group_count(placement: Placement) -> int:
    """Return the number of collectives that move a value: one for each group of another size."""
    return len(placement.widths) or 1 if isinstance(placement, StridedShard) else 1


def _in_one(source: Cut, target: Cut, parts: int) -> bool:
    """Return whether one all-to-all leads from the one to the other."""
    strided = [cut for cut in (source, target) if isinstance(cut, StridedShard)]
    if not strided or (len(strided) == 1 and source.dim != target.dim):
        return True
    return len(strided) == 1 and whole_groups(strided[0], parts)


@lru_cache(maxsize=1024)
def rows_sent(source: Cut, target: Cut, parts: int) -> float | None:
    """Return the part of a value that a rank sends to make one cut of a dim of another.

    None: it goes by way of another dim.
    """
    if source.dim != target.dim:
        return None
    every = [around(cut) for cut in (source, target)]
    size = math.lcm(*[outer for outer, _ in every]) * parts * max(inner for _, inner in every)
    move = rows_between(source, target, size, parts)
    return None if move is None else move.most / size


def share(meta: TensorMeta | None, placement: Placement, parts: int) -> float:
    """Return the part of a value, from 0 to 1, that the rank with the largest block has."""
    if meta is None or not isinstance(placement, Cut):
        return 1.0
    size = meta.shape[placement.dim]
    return local_size(placement, size, parts, 0) / size if size else 1.0


def work_share(strategy: Strategy, operands: Metas, results: Metas, parts: int) -> float:
    """Return the part of a node's arithmetic on the busiest rank: 1 where nothing is cut."""
    if strategy.share is not None:
        return strategy.share
    return min(
        (share(meta, placement, parts)
         for metas, placements in ((operands, strategy.inputs), (results, strategy.outputs))
         for meta, placement in zip(metas, placements, strict=True)),
        default=1.0,
    )  # fmt: skip


def strategy_seconds(
    machine: Machine, cost: Cost, strategy: Strategy, operands: Metas, results: Metas, parts: int
) -> float:
    """Return the time of a node run as ``strategy`` says, with the collectives inside.

    Args:
        cost: of the whole node on one device.
    """
    comm = _comm_seconds(machine, strategy, parts)
    flops = cost.flops * work_share(strategy, operands, results, parts)
    moved = cost.bytes * _byte_share(strategy, operands, results, parts)
    work = max(flops / _rate(machine, operands, results), moved / machine.memory.bandwidth)
    both = max(comm, work) if strategy.overlapped_turns else comm + work
    return both + cost.launches * machine.host.launch


def _comm_seconds(machine: Machine, strategy: Strategy, parts: int) -> float:
    """Return the time of the collectives inside a strategy.

    They run one after the other, or all of a turn at once; these share the links.
    """
    took = [collective_seconds(machine, c.kind, c.nbytes, parts) for c in strategy.comm]
    if not (took and strategy.overlapped_turns):
        return sum(took)
    waits = [collective_seconds(machine, c.kind, 0, parts) for c in strategy.comm]
    return sum(took) - sum(waits) + strategy.overlapped_turns * max(waits)


def _rate(machine: Machine, operands: Metas, results: Metas) -> float:
    """Return the operations a second in the dtype of a node."""
    meta = next((meta for meta in (*results, *operands) if meta is not None), None)
    return machine.matmul.rate_of("f32" if meta is None else short_dtype(meta.dtype))


def _byte_share(strategy: Strategy, operands: Metas, results: Metas, parts: int) -> float:
    whole = local = 0.0
    for metas, placements in ((operands, strategy.inputs), (results, strategy.outputs)):
        for meta, placement in zip(metas, placements, strict=True):
            nbytes = 0 if meta is None else meta.nbytes
            whole += nbytes
            local += nbytes * share(meta, placement, parts)
    return local / whole if whole else 1.0


def ticks(seconds: float) -> float:
    """Round seconds to whole picoseconds, as a float; infinity stays."""
    return seconds if math.isinf(seconds) else float(round(seconds * _TICKS))


def seconds(cost: float) -> float:
    """Return the seconds of a cost in ticks."""
    return cost / _TICKS


# -- cost of making the wanted placements of those at hand -----------------------------------------

#: Placements of one value that are there together, or wanted together.
Copies = tuple[Placement, ...]
#: For each choice of a variable the copies that it has, or wants, of a value.
Options = tuple[Copies, ...]


class ReshardingCosts:
    """Costs in ticks on one axis; equal tables are one array.

    Args:
        parts: the ranks of the axis.
    """

    def __init__(self, machine: Machine, parts: int) -> None:
        self._machine, self._parts = machine, parts
        self._moves: dict[tuple[Placement, Placement, int], float] = {}
        self._costs: dict[tuple[Copies, Copies, int], float] = {}
        self._options: dict[Options, Options] = {}
        self._tables: dict[tuple[int, int, int], Table | None] = {}
        self._copies: dict[tuple[int, int], Table | None] = {}

    def options(self, options: Options) -> Options:
        """Return the one object that stands for all equal options, as ``table`` takes them."""
        return self._options.setdefault(options, options)

    def move(self, source: Placement, target: Placement, nbytes: int) -> float:
        """Return the cost to give a value of ``nbytes`` another placement."""
        key = source, target, nbytes
        cost = self._moves.get(key)
        if cost is None:
            took = reshard_seconds(self._machine, source, target, nbytes, self._parts)
            cost = self._moves[key] = ticks(took)
        return cost

    def make(self, have: Copies, want: Copies, nbytes: int) -> float:
        """Return the cost to make all wanted placements of those at hand.

        By way of one more placement if that is cheaper.
        """
        key = have, want, nbytes
        cost = self._costs.get(key)
        if cost is None:
            cost = self._each(have, want, nbytes)
            if len(want) > 1 or math.isinf(cost):  # the same op takes several, or none leads there
                for way in (Replicate(), *want):
                    first = self._each(have, (way,), nbytes)
                    cost = min(cost, first + self._each((*have, way), want, nbytes))
            self._costs[key] = cost
        return cost

    def _each(self, have: Copies, want: Copies, nbytes: int) -> float:
        return sum(min(self.move(source, target, nbytes) for source in have) for target in want)

    def table(self, have: Options, want: Options, nbytes: int) -> Table | None:
        """Return the costs with a row a choice of ``have`` and a column a choice of ``want``.

        None where nothing costs anything.
        """
        key = id(have), id(want), nbytes
        if key not in self._tables:
            costs = np.array([[self.make(h, w, nbytes) for w in want] for h in have])
            self._tables[key] = costs if costs.any() else None
        return self._tables[key]

    def copies(self, have: Options, nbytes: int) -> Table | None:
        """Return for each choice the cost of the placements after its first one.

        None where nothing costs anything.
        """
        key = id(have), nbytes
        if key not in self._copies:
            costs = np.array([self.make(h[:1], h[1:], nbytes) for h in have], dtype=float)
            self._copies[key] = costs if costs.any() else None
        return self._copies[key]
