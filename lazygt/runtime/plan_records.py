"""Client's records of plans, and the messages that send, forget and swap plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from lazygt.runtime import custom_ops
from lazygt.runtime.graph_codec import plan_name, template_name
from lazygt.runtime.messages import Captured, Ship, Swap
from lazygt.runtime.plan import Plan, PlanTemplate
from lazygt.runtime.values import new_codec
from lazygt.runtime.wire import Buffer, encode


class PlanRecord:
    """Record of the plans that the ranks run together, with the state of the last run.

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
        #: the plans' templates; several records may share one
        self.templates = tuple([plan.template for plan in plans])
        #: rank 0's plan
        self.plan = self.plans[0]
        #: number of output values of a run
        self.outputs = len(self.plan.outline.outputs)
        self.salt, self.names = _names(self.plans)
        #: delta codecs of the ids of a run's inputs, and of the values freed by it
        self.inputs, self.frees = new_codec(), new_codec()
        #: the bits of the last run's run-time numbers
        self.numbers: bytes | None = None
        self.sent = False
        self.runs = 0
        #: number of times that the plan was sent, and the bytes of one message
        self.ships = self.size = 0
        #: (fused node, artifact) pairs of the compiled tier, for each of ``plans``; empty before
        self.swap: tuple[Sequence[tuple[int, str]], ...] = ()
        #: number of the first run in the compiled tier
        self.swapped_from = 0
        #: by rank, the report on its CUDA graphs
        self.captures: dict[int, Captured] = {}
        #: True once the compiled tier has looked for groups to compile
        self.considered = False

    def reset_codecs(self) -> None:
        """Reset the delta codecs and numbers of the last run, as the workers do."""
        self.inputs, self.frees, self.numbers = new_codec(), new_codec(), None

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the record in the client."""
        plans = {id(plan): plan for plan in self.plans}  # ranks that run the same have one
        return sum(plan.outline.nbytes for plan in plans.values())

    def index_of(self, rank: int) -> int:
        """Return the index in ``plans`` of a rank's plan."""
        return rank if len(self.plans) > 1 else 0

    def plan_of(self, rank: int) -> Plan:
        """Return a rank's plan."""
        return self.plans[self.index_of(rank)]

    def name(self, rank: int) -> bytes:
        """Return the name of the rank's plan on the wire."""
        return self.names[self.index_of(rank)]


class PlanRecords:
    """Records of the plans that may run again, and the swaps in progress.

    Args:
        ranks: number of workers.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._records: dict[bytes, PlanRecord] = {}
        #: templates of all known plans, each once
        self._templates: WeakValueDictionary[bytes, PlanTemplate] = WeakValueDictionary()
        #: forgotten records, to be named in the next plan message
        self._forgotten: list[PlanRecord] = []
        #: name of a plan that is being swapped -> number of ranks that have not answered
        self.swapping: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[PlanRecord]:
        """Iterate over the records, oldest first."""
        return iter(self._records.values())

    def of(self, plans: Sequence[Plan]) -> PlanRecord:
        """Return the record of the ranks' plans: the known one of equal content, or a new one.

        Args:
            plans: each rank's plan, or one that all ranks run.
        """
        entry = PlanRecord(plans)
        known = self._records.setdefault(entry.names[0], entry)
        if known is entry:
            shared = [self._templates.setdefault(each.digest, each) for each in entry.templates]
            entry.templates = tuple(shared)
        return known

    def forget(self, entries: Sequence[PlanRecord]) -> None:
        """Forget plans that will never be used again; the next plan message tells the workers."""
        for entry in entries:
            if self._records.get(entry.names[0]) is entry:
                del self._records[entry.names[0]]
                self._forgotten.append(entry)

    # -- messages ------------------------------------------------------------------------

    def plan_messages(self, entry: PlanRecord) -> list[list[Buffer]]:
        """Build each rank's message with its plan and the names of forgotten plans."""
        forgotten, self._forgotten = self._forgotten, []
        rank_messages: list[list[Buffer]] = []
        messages: dict[tuple[int, bool], list[Buffer]] = {}
        for rank in range(self._ranks):
            index = entry.index_of(rank)
            has_template = rank in entry.templates[index].sent_to
            if (index, has_template) not in messages:
                name = entry.names[index]
                forget = [old.name(rank) for old in forgotten if old.name(rank) != name]
                messages[index, has_template] = _ship(entry, index, has_template, True, forget)
            entry.templates[index].sent_to.add(rank)
            rank_messages.append(messages[index, has_template])
        return rank_messages

    def swap_messages(self, entry: PlanRecord) -> list[list[Buffer]]:
        """Build each rank's message to swap in compiled code; count the answers from here on."""
        self.swapping[entry.names[0]] = self._ranks
        return [swap_message(entry, rank) for rank in range(self._ranks)]

    # -- swaps ---------------------------------------------------------------------------

    def swapped(self, rank: int, digest: bytes) -> None:
        """Note a rank's answer to the swap of the plan of this name."""
        entry = next((e for e in self if e.name(rank) == digest), None)
        name = digest if entry is None else entry.names[0]
        if entry is not None:
            entry.captures.pop(rank, None)
        if name in self.swapping:
            self.swapping[name] -= 1
            if not self.swapping[name]:
                del self.swapping[name]


def swap_message(entry: PlanRecord, rank: int) -> list[Buffer]:
    """Build the message that switches a rank to an entry's compiled code."""
    index = entry.index_of(rank)
    return encode(Swap(entry.names[index], tuple(entry.swap[index])))


def again_message(entry: PlanRecord, rank: int, compiled: bool) -> list[Buffer]:
    """Build the message that sends a rank an evicted plan and its template again.

    Args:
        compiled: whether waiting runs use the compiled code already, if there is any.
    """
    index = entry.index_of(rank)
    groups = entry.swap[index] if compiled and entry.swap else ()
    return _ship(entry, index, False, False, groups=groups)


def _ship(
    entry: PlanRecord,
    index: int,
    has_template: bool,
    fresh: bool,
    forget: Sequence[bytes] = (),
    groups: Sequence[tuple[int, str]] = (),
) -> list[Buffer]:
    """Build the message that sends one of an entry's plans.

    Args:
        has_template: whether the receiver has the template.
        fresh, forget, groups: see ``Ship``.
    """
    template = entry.templates[index]
    ship = Ship(
        entry.names[index],
        fresh,
        template.digest,
        entry.plans[index].sizes,
        tuple(forget),
        entry.salt,
        tuple(groups),
    )
    if has_template:
        return encode(ship)
    code = custom_ops.encode(template.custom_ops)
    return encode(ship, [template.encoded, *([code] if code else [])])


def _names(plans: tuple[Plan, ...]) -> tuple[bytes, list[bytes]]:
    """Return the salt, and the name of each plan on the wire.

    Two entries may have the same plan for one rank and different plans for another. That rank keeps
    a state for each entry, so the salt makes their names differ.
    """
    if len(plans) == 1:
        return b"", [plans[0].digest]
    salt = template_name(b"".join(plan.digest for plan in plans))
    return salt, [plan_name(plan.template.digest, plan.sizes, salt) for plan in plans]
