"""Plan records: what the client keeps of the plans that the ranks run together, and what the
workers have been told of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from lazygt.runtime.foreign import schema
from lazygt.runtime.graph_codec import plan_name, template_name
from lazygt.runtime.messages import Captured, Ship, Swap
from lazygt.runtime.plan import Plan, PlanTemplate
from lazygt.runtime.values import new_codec
from lazygt.runtime.wire import Buffer, encode


class PlanRecord:
    """What the ranks run, with what they are known to remember of its last run.

    Args:
        plans: each rank's plan, or one that all of them run.
    """

    __slots__ = (
        "captures",
        "considered",
        "frees",
        "inputs",
        "names",
        "numbers",
        "outputs",
        "plan",
        "plans",
        "runs",
        "salt",
        "sent",
        "ships",
        "size",
        "swap",
        "swapped_from",
        "templates",
    )

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        #: theirs; several records' may be one
        self.templates = tuple([plan.template for plan in plans])
        #: rank 0's
        self.plan = self.plans[0]
        #: how many values its run makes
        self.outputs = len(self.plan.outline.outputs)
        self.salt, self.names = _names(self.plans)
        self.inputs, self.frees = new_codec(), new_codec()
        #: the bits of the last run's run-time numbers
        self.numbers: bytes | None = None
        self.sent = False
        self.runs = 0
        #: how often it was shipped, and the bytes of one such message
        self.ships = self.size = 0
        #: (fused node, artifact) of the compiled tier, for each of ``plans``, once it is there
        self.swap: tuple[Sequence[tuple[int, str]], ...] = ()
        #: the first run that is run so
        self.swapped_from = 0
        #: what ranks have said of its CUDA graphs
        self.captures: dict[int, Captured] = {}
        #: whether it has been decided what of it is compiled
        self.considered = False

    def begin_anew(self) -> None:
        """Workers forget what they know of its last run."""
        self.inputs, self.frees, self.numbers = new_codec(), new_codec(), None

    @property
    def nbytes(self) -> int:
        """What keeping it takes of the client's memory, about."""
        plans = {id(plan): plan for plan in self.plans}  # ranks that run the same have one
        return sum(plan.outline.nbytes for plan in plans.values())

    def of(self, rank: int) -> int:
        """Which of ``plans`` a rank runs."""
        return rank if len(self.plans) > 1 else 0

    def name(self, rank: int) -> bytes:
        """What the rank's plan is called on the wire."""
        return self.names[self.of(rank)]


class PlanRecords:
    """The entries of the plans that may run again, and the swaps that are under way.

    Args:
        ranks: how many workers are told of them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[bytes, PlanRecord] = {}
        #: of all plans that are known: each is one object
        self._templates: WeakValueDictionary[bytes, PlanTemplate] = WeakValueDictionary()
        #: no longer known; workers have not been told yet
        self._forgotten: list[PlanRecord] = []
        #: plans that are being swapped -> ranks that have not said so yet
        self.swapping: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[PlanRecord]:
        """Oldest first."""
        return iter(self._known.values())

    def of(self, plans: Sequence[Plan]) -> PlanRecord:
        """The entry of the ranks' plans: the one there is for the same content, or a new one.

        Args:
            plans: each rank's, or one that all ranks run.
        """
        entry = PlanRecord(plans)
        known = self._known.setdefault(entry.names[0], entry)
        if known is entry:
            shared = [self._templates.setdefault(each.digest, each) for each in entry.templates]
            entry.templates = tuple(shared)
        return known

    def forget(self, entries: Sequence[PlanRecord]) -> None:
        """Plans that will never be used again: workers drop them with the next plan."""
        for entry in entries:
            if self._known.get(entry.names[0]) is entry:
                del self._known[entry.names[0]]
                self._forgotten.append(entry)

    # -- messages ------------------------------------------------------------------------

    def plan_messages(self, entry: PlanRecord) -> list[list[Buffer]]:
        """What brings each rank its plan, and tells it which others to forget."""
        forgotten, self._forgotten = self._forgotten, []
        told_so: list[list[Buffer]] = []
        messages: dict[tuple[int, bool], list[Buffer]] = {}
        for rank in range(self._ranks):
            which = entry.of(rank)
            told = rank in entry.templates[which].told
            if (which, told) not in messages:
                name = entry.names[which]
                forget = [old.name(rank) for old in forgotten if old.name(rank) != name]
                messages[which, told] = _ship(entry, which, told, True, forget)
            entry.templates[which].told.add(rank)
            told_so.append(messages[which, told])
        return told_so

    def swap_messages(self, entry: PlanRecord) -> list[list[Buffer]]:
        """What has each rank run an entry's compiled code; the swap is under way from here on."""
        self.swapping[entry.names[0]] = self._ranks
        return [swap_message(entry, rank) for rank in range(self._ranks)]

    # -- swaps ---------------------------------------------------------------------------

    def swapped(self, rank: int, digest: bytes) -> None:
        """A rank has answered the swap of the plan that it knows by this name."""
        entry = next((e for e in self if e.name(rank) == digest), None)
        name = digest if entry is None else entry.names[0]
        if entry is not None:
            entry.captures.pop(rank, None)
        if name in self.swapping:
            self.swapping[name] -= 1
            if not self.swapping[name]:
                del self.swapping[name]


def swap_message(entry: PlanRecord, rank: int) -> list[Buffer]:
    """What has a rank run an entry's compiled code from its next run on."""
    which = entry.of(rank)
    return encode(Swap(entry.names[which], tuple(entry.swap[which])))


def again_message(entry: PlanRecord, rank: int, compiled: bool) -> list[Buffer]:
    """What brings a rank the plan that it has forgotten, and its template with it.

    Args:
        compiled: it runs so at once, with the runs that wait for it, if it is to run so at all.
    """
    which = entry.of(rank)
    groups = entry.swap[which] if compiled and entry.swap else ()
    return _ship(entry, which, False, False, groups=groups)


def _ship(
    entry: PlanRecord,
    which: int,
    told: bool,
    fresh: bool,
    forget: Sequence[bytes] = (),
    groups: Sequence[tuple[int, str]] = (),
) -> list[Buffer]:
    """The message that brings one of an entry's plans.

    Args:
        told: whether its receiver has been sent the template.
        fresh, forget, groups: see ``Ship``.
    """
    template = entry.templates[which]
    ship = Ship(
        entry.names[which],
        fresh,
        template.digest,
        entry.plans[which].sizes,
        tuple(forget),
        entry.salt,
        tuple(groups),
    )
    if told:
        return encode(ship)
    code = schema.encode(template.foreign)
    return encode(ship, [template.encoded, *([code] if code else [])])


def _names(plans: tuple[Plan, ...]) -> tuple[bytes, list[bytes]]:
    """The salt, and the name of each plan on the wire.

    Two entries may have the same plan for one rank and different ones for another; the rank
    remembers the last run of each entry, so it must not take one for the other.
    """
    if len(plans) == 1:
        return b"", [plans[0].digest]
    salt = template_name(b"".join(plan.digest for plan in plans))
    return salt, [plan_name(plan.template.digest, plan.sizes, salt) for plan in plans]
