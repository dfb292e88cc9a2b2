"""Entries: the plans that the client knows, and what the workers have been told of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lazygt.runtime import code, wire
from lazygt.runtime.messages import Swap, encode, encode_plan
from lazygt.runtime.plan import Plan
from lazygt.runtime.prediction import Prediction
from lazygt.runtime.wire import Buffer


class PlanEntry:
    """What the ranks run, with what they are known to remember of its last run.

    Args:
        plans: each rank's plan, or one that all of them run.
    """

    __slots__ = (
        "considered",
        "foreign",
        "frees",
        "inputs",
        "names",
        "numbers",
        "plans",
        "runs",
        "salt",
        "sent",
        "ships",
        "size",
        "swap",
    )

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.salt, self.names = _names(self.plans)
        #: for each of ``plans`` the foreign ops that it names
        self.foreign = tuple([code.foreign_ops(plan.graph) for plan in self.plans])
        self.inputs, self.frees = Prediction(), Prediction()
        #: the bits of the last run's run-time numbers
        self.numbers: bytes | None = None
        self.sent = False
        self.runs = 0
        #: how often it was shipped, and the bytes of one such message
        self.ships = self.size = 0
        #: (fused node, artifact) of the compiled tier, for each of ``plans``, once it is there
        self.swap: tuple[Sequence[tuple[int, str]], ...] = ()
        #: whether it has been decided what of it is compiled
        self.considered = False

    @property
    def plan(self) -> Plan:
        """Rank 0's."""
        return self.plans[0]

    @property
    def nbytes(self) -> int:
        """What keeping it takes of the client's memory, about."""
        return sum(plan.graph.nbytes for plan in self.plans)

    def of(self, rank: int) -> int:
        """Which of ``plans`` a rank runs."""
        return rank if len(self.plans) > 1 else 0

    def name(self, rank: int) -> bytes:
        """What the rank's plan is called on the wire."""
        return self.names[self.of(rank)]


class Entries:
    """The entries of the plans that may run again, and the swaps that are under way.

    Args:
        ranks: how many workers are told of them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[bytes, PlanEntry] = {}
        #: no longer known; workers have not been told yet
        self._forgotten: list[PlanEntry] = []
        #: plans that are being swapped -> ranks that have not said so yet
        self._swapping: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[PlanEntry]:
        """Oldest first."""
        return iter(self._known.values())

    def of(self, plans: Sequence[Plan]) -> PlanEntry:
        """The entry of the ranks' plans: the one there is for the same content, or a new one.

        Args:
            plans: each rank's, or one that all ranks run.
        """
        entry = PlanEntry(plans)
        return self._known.setdefault(entry.names[0], entry)

    def forget(self, entries: Sequence[PlanEntry]) -> None:
        """Plans that will never be used again: workers drop them with the next plan."""
        for entry in entries:
            if self._known.get(entry.names[0]) is entry:
                del self._known[entry.names[0]]
                self._forgotten.append(entry)

    # -- messages ------------------------------------------------------------------------

    def plan_messages(self, entry: PlanEntry) -> list[list[Buffer]]:
        """What brings each rank its plan, and tells it which others to forget."""
        forgotten, self._forgotten = self._forgotten, []
        made: dict[int, list[Buffer]] = {}
        for rank in range(self._ranks):
            which = entry.of(rank)
            if which not in made:
                name = entry.names[which]
                forget = [old.name(rank) for old in forgotten if old.name(rank) != name]
                graph = entry.plans[which].graph
                made[which] = encode_plan(
                    name, graph, True, forget, entry.salt, code.encode(entry.foreign[which])
                )
        return [made[entry.of(rank)] for rank in range(self._ranks)]

    def swap_messages(self, entry: PlanEntry) -> list[list[Buffer]]:
        """What has each rank run an entry's compiled code; the swap is under way from here on."""
        self._swapping[entry.names[0]] = self._ranks
        return [swap_message(entry, rank) for rank in range(self._ranks)]

    # -- swaps ---------------------------------------------------------------------------

    @property
    def swapping(self) -> bool:
        """Whether some rank has yet to answer a swap."""
        return bool(self._swapping)

    def swapped(self, rank: int, digest: bytes) -> None:
        """A rank has answered the swap of the plan that it knows by this name."""
        name = next((e.names[0] for e in self if e.name(rank) == digest), digest)
        if name in self._swapping:
            self._swapping[name] -= 1
            if not self._swapping[name]:
                del self._swapping[name]


def swap_message(entry: PlanEntry, rank: int) -> list[Buffer]:
    """What has a rank run an entry's compiled code from its next run on."""
    which = entry.of(rank)
    return encode(Swap(entry.names[which], tuple(entry.swap[which])))


def again_message(entry: PlanEntry, rank: int) -> list[Buffer]:
    """What brings a rank the plan that it has forgotten."""
    which = entry.of(rank)
    foreign = code.encode(entry.foreign[which])
    return encode_plan(
        entry.name(rank), entry.plans[which].graph, False, salt=entry.salt, code=foreign
    )


def _names(plans: tuple[Plan, ...]) -> tuple[bytes, list[bytes]]:
    """The salt, and the name of each plan on the wire.

    Two entries may have the same plan for one rank and different ones for another; the rank
    remembers the last run of each entry, so it must not take one for the other.
    """
    if len(plans) == 1:
        return b"", [plans[0].digest]
    salt = wire.plan_name(b"".join(plan.digest for plan in plans))
    return salt, [wire.plan_name(wire.encode_graph(plan.graph), salt) for plan in plans]
