"""What a row of a table takes, of a few small programs that are recorded, planned and simulated.

Programs of few layers and one or two microbatches give the coefficients of what is bilinear,

    seconds = once + once_a_layer * layers + (ends + block * layers) * microbatches,

and what gradients that all ranks add up once a step take beside that is found by simulating the
same with and without other ranks. Stages of a pipeline are put together by the law of 1F1B
(Narayanan et al., arXiv 2104.04473, sec. 2.2): the last stage, which has the head, sets the pace,
and a step waits once for the stages before it, divided by the stages that a rank has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from benchmarks.foresight_program import Training, mesh_of
from benchmarks.foresight_rows import Row
from lazygt.machine import Machine, machine_of
from lazygt.machine.prices import axis_group_seconds
from lazygt.session import Session
from lazygt.settings import grouped
from lazygt.simulation import DRY, LiveValue, Rehearsal
from lazygt.simulation.node_costs import ACTIVATIONS, KINDS
from lazygt.submit.memory_categories import GRADIENTS

#: Settings of a session in which a step is one plan, however long.
_ONE_PLAN = {"flush_on_backward": False, "max_graph_nodes": 1_000_000, "max_graph_bytes": 1 << 62}
_SHARDED = ("fsdp", "hsdp")
#: (layers, microbatches) of a program.
Corner = tuple[int, int]


class Program(NamedTuple):
    """A step of few layers.

    Attributes:
        peak: the most bytes that a rank has at once.
        activations: the most that a step has of them before the first gradient of a weight is
            there, beside what counts as such before it.
    """

    rehearsal: Rehearsal
    peak: int
    activations: int


@lru_cache(maxsize=16)
def recorded(row: Row, layers: int, microbatches: int) -> Program:
    """A step of one stage of so many layers, planned and not priced."""
    machine = machine_of(row.machine)
    settings = {**DRY, **_ONE_PLAN, "device": machine.device, "machine": row.machine}
    with Session(**grouped({"mesh": mesh_of(row), **settings})) as session:
        living = LiveValue(session)
        training = Training(row, layers)
        session.flush()
        training.step(microbatches)
        session.flush()
        flush, entries = session.history.recent[-1], session.entries()
    (entry,) = (entry for entry in entries if entry.plan.digest == flush.digest)
    categories, beside = living.categories[entry.plan.digest], living.beside[flush.run]
    rehearsal = Rehearsal(entry.plans, session.mesh, compiled=row.compiled, categories=categories)
    memories = [ranks.memory for ranks in rehearsal.on(machine).classes]
    by_kind = [dict(zip(KINDS, nbytes, strict=True)) for _, nbytes in memories[0].history]
    forward = takewhile(lambda kinds: not kinds[GRADIENTS], by_kind)
    return Program(
        rehearsal,
        sum(beside.values()) + max(memory.peak for memory in memories),
        max(kinds[ACTIVATIONS] for kinds in forward) - by_kind[0][ACTIVATIONS],
    )


class Bilinear(NamedTuple):
    """See above; also of bytes."""

    once: float
    once_a_layer: float
    ends: float
    block: float

    @staticmethod
    def through(corners: Mapping[Corner, float]) -> "Bilinear":
        """Through the values at two numbers of layers, with one and two microbatches."""
        few, many = min(corners)[0], max(corners)[0]
        one, two = ((corners[few, count], corners[many, count]) for count in (1, 2))
        slopes = [(high - low) / (many - few) for low, high in (one, two)]
        begins = [low - few * slope for (low, _), slope in zip((one, two), slopes, strict=True)]
        ends, block = begins[1] - begins[0], slopes[1] - slopes[0]
        return Bilinear(begins[0] - ends, slopes[0] - block, ends, block)


@dataclass(frozen=True)
class Programs:
    """Those of the rows that share them.

    Attributes:
        alone: without what is exchanged once a step between ranks that are parallel in data.
        together: with it, with one microbatch; empty where each microbatch exchanges something.
    """

    alone: Mapping[Corner, Program]
    together: Mapping[Corner, Program]

    @staticmethod
    def of(row: Row) -> "Programs":
        """The programs of a row."""
        few = 2 if row.sharding in _SHARDED else 1
        corners = [(layers, count) for layers in (few, few + 1) for count in (1, 2)]
        once = row.dp > 1 and row.sharding not in _SHARDED
        solo = programs_key(replace(row, dp=1, sharding="none")) if once else row
        alone = {corner: recorded(solo, *corner) for corner in corners}
        return Programs(alone, {c: recorded(row, *c) for c in corners if c[1] == 1} if once else {})

    def times(self, machine: Machine) -> "Times":
        """Simulated on a machine."""
        alone = {at: program.rehearsal.on(machine).seconds for at, program in self.alone.items()}
        together = {
            layers: program.rehearsal.on(machine).seconds - alone[layers, count]
            for (layers, count), program in self.together.items()
        }
        return Times(Bilinear.through(alone), Line.through(together))

    def peak(self) -> "Line":
        """The most bytes that a rank has with one microbatch under way."""
        programs = self.together or self.alone
        return Line.through({at[0]: p.peak for at, p in programs.items() if at[1] == 1})

    def activations(self) -> "Line":
        """Of these what is kept for the backward pass, at most."""
        return Line.through({at[0]: p.activations for at, p in self.alone.items() if at[1] == 1})


class Line(NamedTuple):
    """What grows with layers."""

    once: float
    a_layer: float

    @staticmethod
    def through(points: Mapping[int, float]) -> "Line":
        """Through the values at two numbers of layers; nothing, where there are none."""
        if not points:
            return Line(0.0, 0.0)
        few, many = min(points), max(points)
        slope = (points[many] - points[few]) / (many - few)
        return Line(points[few] - few * slope, slope)

    def at(self, layers: float) -> float:
        """The value at a number of layers."""
        return self.once + self.a_layer * layers


class Times(NamedTuple):
    """Seconds of a rank, and what it waits once a step for others."""

    alone: Bilinear
    waits: Line


def programs_key(row: Row) -> Row:
    """The row but for what its programs do not depend on."""
    return replace(
        row, model=replace(row.model, layers=1), gpus=row.dp * row.tp, pp=1, interleave=1,
        hosts=row.hosts if row.sharding == "hsdp" else 1, global_batch=row.dp * row.microbatch,
        seconds=None, gib=None, activation_gib=None, line=0,
    )  # fmt: skip


def step_seconds(row: Row, times: Times, machine: Machine) -> float:
    """Of the whole model on all its stages."""
    alone, layers = times.alone, row.stage_layers
    once = alone.once + alone.once_a_layer * layers + max(times.waits.at(layers), 0.0)
    middle = alone.block * layers
    if row.pp == 1:
        return once + row.microbatches * (middle + alone.ends)
    waiting = (row.pp - 1) / row.interleave * middle
    return once + row.microbatches * (middle + alone.ends) + waiting + _sending(row, machine)


def _sending(row: Row, machine: Machine) -> float:
    """Seconds that a rank waits for its neighbours: each microbatch goes on and its gradient comes
    back, once for each stage that the rank has."""
    model = row.model
    itemsize = 4 if row.precision == "fp32" else 2
    nbytes = row.microbatch * model.sequence * model.hidden * itemsize // row.tp
    hop = axis_group_seconds(machine, "send_recv", nbytes, (0, row.dp * row.tp))
    return 2 * hop * (row.microbatches * row.interleave + row.pp - 1)


def activation_bytes(row: Row, programs: Programs) -> float:
    """What layers of the first stage keep at most for backward passes: of so many microbatches as
    there are stages, and of some more where a rank has several (Korthikanti et al., arXiv
    2205.05198, sec. 4.2.3)."""
    return programs.activations().a_layer * row.stage_layers * _under_way(row)


def peak_bytes(row: Row, programs: Programs) -> float:
    """The most that a rank has: with one microbatch under way, and what is kept of the others."""
    others = programs.activations().a_layer * row.stage_layers * (_under_way(row) - 1)
    return programs.peak().at(row.stage_layers) + others


def _under_way(row: Row) -> float:
    """Microbatches that the first stage has begun and not ended, at most."""
    ahead = (
        row.pp * (1 + (row.pp - 1) / (row.pp * row.interleave)) if row.interleave > 1 else row.pp
    )
    return min(ahead, row.microbatches)
