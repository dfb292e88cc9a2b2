"""Messages between the client and a worker: each class is a message and its schema.

A message is sent as a header (tag and fields) and raw buffers. A reader accepts only messages that
match the schema: all bytes of a peer become one of these classes, or a ProtocolError.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from lazygt.graph.meta import TensorMeta
from lazygt.runtime.wire import Count, Message

#: Kind of a failed collective, most likely caused by another rank's failure.
COLLECTIVE_ERROR = "CollectiveError"
#: Kind of a failure when ranks were about to run different collectives.
MISMATCH = "CollectiveMismatch"

#: The name of a plan.
Name = Annotated[bytes, Meta(min_length=16, max_length=16)]
#: An update of a list of ids; see ``DeltaCodec``.
Update = tuple[Literal[0, 1], tuple[Count, ...]]


class Put(Message):
    """A tensor sent to the workers: in the arena at ``offset``, or as the next buffer."""

    id: Count
    meta: TensorMeta
    offset: Count | None = None


class Fetched(Message, tag=0):
    """A fetched value: its meta, and its arena offset (None: it is the next buffer)."""

    meta: TensorMeta
    offset: Count | None = None


class Failure(Message, tag=1):
    """Reason of a value's failure: node number, kind of exception, message."""

    node: int
    kind: str
    detail: str
    seq: int = 0

    def during(self, seq: int) -> Failure:
        """Return the failure with a run number: its own, or ``seq`` if it has none."""
        return self if self.seq else Failure(self.node, self.kind, self.detail, seq)


class Timings(Message):
    """Start and end times of a run, in nanoseconds of the worker host's monotonic clock."""

    begin: int  # start of the handling of the run message
    end: int  # completion of its answer
    #: (step, count, begin, end) of each node that ran; a node covers ``count`` of ``plan.steps``,
    #: from ``step`` on
    steps: tuple[tuple[Count, Count, int, int], ...] = ()


class MemoryUse(Message):
    """A worker's memory, in bytes."""

    #: bytes of values' memory: one number for each requested group of ids, and one for all
    #: others; memory that several values share counts once
    living: tuple[Count, ...]
    #: bytes that the allocator has handed out: torch's on GPUs, malloc's elsewhere, for the whole
    #: process
    allocated: Count
    peak: Count  # the maximum of ``allocated`` so far on GPUs; elsewhere that of ``resident``
    resident: Count  # resident bytes of the process in the host's memory


class Made(Message, tag=0):
    """A tensor that a data-dependent node returned or wrote, under the worker's id."""

    meta: TensorMeta
    id: Count


class Several(Message, tag=1):
    """A list that a data-dependent node returned."""

    items: tuple[Made | Several | Plain, ...] = ()


class Plain(Message, tag=2):
    """A Python value that a data-dependent node returned."""

    value: Any = None


class Reply(Message):
    """Result of a data-dependent last node, and the tensors that it wrote; or its failure."""

    returned: tuple[Made | Several | Plain, ...] = ()
    written: tuple[Made, ...] = ()
    failure: Failure | None = None


# -- to a worker ---------------------------------------------------------------------------


class Ship(Message, tag=1):
    """Plan for a worker: a template in these sizes.

    The template is the next buffer, and the buffer after that the code of its custom ops, if it has
    any. Without buffers, the template was sent before. A worker that has evicted the template
    requests it when the plan is run.
    """

    digest: Name  # the plan's name
    fresh: bool  # the delta codecs of its id lists are reset
    template: Name  # the template's name
    sizes: tuple[Count, ...] = ()  # for each symbol in it
    forget: tuple[Name, ...] = ()  # plans never used again
    salt: bytes = b""  # non-empty if ranks have different graphs; see ``plan_name``
    #: groups that run compiled from the next run on; see ``Swap``
    groups: tuple[tuple[Count, str], ...] = ()


class Run(Message, tag=2):
    """Request to run a plan (or nothing) after receiving ``puts``; then to answer ``fetches``.

    Attributes:
        seq: number of the run, from 1.
        digest: name of the plan; None runs nothing.
        base: id of the plan's first output; the others follow.
        inputs, frees: updates of predicted id lists; without a plan, ``frees`` is a full list.
        params: run-time numbers; None: the same as in the last run of this plan.
        releases: arena offsets that the client does not read any more.
        fetches: ids of the requested values.
        timed: wait for all earlier launches, run the plan node by node with a device
            synchronization after each, and report their times (``Done.timings``).
        measure: groups of ids; report the memory of each (``Done.memory``).
        failed: do not run the plan; mark all outputs as failed for this reason.
    """

    seq: Count
    digest: Name | None = None
    base: Count = 0
    inputs: Update | None = None
    frees: Update | None = None
    params: tuple[Any, ...] | None = None
    puts: list[Put] = []  # noqa: RUF012 - each gets its own
    releases: tuple[Count, ...] = ()
    fetches: tuple[Count, ...] = ()
    timed: bool = False
    measure: tuple[tuple[Count, ...], ...] | None = None
    failed: Failure | None = None


class Swap(Message, tag=5):
    """Request to run these fused nodes of a plan as these artifacts from now on: (node, key)."""

    digest: Name
    groups: tuple[tuple[Count, str], ...] = ()


class Install(Message, tag=17):
    """Request to store an artifact in the host's cache; answered by ``Installed``.

    Its record and its code are the next buffers; without them, report whether it is cached.
    """

    key: str  # of the artifact; empty: report whether code of this toolchain runs here
    toolchain: str  # see `kernel_group.toolchain`


class Write(Message, tag=7):
    """Request to copy blocks for a transfer; see ``transfer.copier.Copier``."""

    number: int
    request: Any


class Renew(Message, tag=10):
    """Request to leave the current process group, and join the one of this number."""

    number: Count
    since: Count  # id of the first value that a broken collective may have left incomplete


class Copied(Message):
    """A value in a snapshot."""

    id: Count
    meta: TensorMeta
    offset: Count  # of its memory, from the beginning of its storage on
    nbytes: Count
    borrowed: bool = False  # in the client's arena, not in the snapshots' memory


class Snap(Message, tag=13):
    """Request to take a snapshot. The delta codecs of all plans are reset."""

    number: Count
    committed: Count = 0  # number of the last snapshot that all ranks have; drop older ones


class Restore(Message, tag=14):
    """Request to drop all state, plans included, and restore a snapshot."""

    epoch: Count  # number of recoveries so far, this one included; ``Restored`` returns it
    group: Count  # number of the process group to join
    number: Count = 0  # of the snapshot; 0: of the beginning
    values: tuple[Copied, ...] = ()  # see ``Snapped``, also for next_dynamic and generator
    #: values that count as failed if they are not in memory any more
    failed: tuple[tuple[Count, Failure], ...] = ()
    next_dynamic: Count = 0
    generator: bytes = b""


# -- to the client -------------------------------------------------------------------------


class Done(Message, tag=3):
    """The answer to a run.

    Attributes:
        failures: the failures of this run.
        releases: upload arena offsets that are free again.
        fetched: one Fetched or Failure for each requested value.
        reply: results and written tensors of a data-dependent last node.
        timings: times of a timed run.
        memory: memory report, if requested.
    """

    seq: Count
    failures: list[Failure] = []  # noqa: RUF012 - each gets its own
    releases: list[Count] = []  # noqa: RUF012
    fetched: list[Fetched | Failure] = []  # noqa: RUF012
    reply: Reply | None = None
    timings: Timings | None = None
    memory: MemoryUse | None = None


class Need(Message, tag=4):
    """Request for the plan of run ``seq``, which the worker has evicted."""

    seq: Count
    digest: Name


class Swapped(Message, tag=6):
    """Report that a plan was swapped, or an error that keeps it on its tier."""

    digest: Name
    error: str = ""


class Installed(Message, tag=18):
    """Report that a host has an artifact in its cache, lacks it, or can't have it."""

    key: str
    lacks: bool = False
    error: str = ""


class Wrote(Message, tag=8):
    """Checksums of the blocks that were written, or the error."""

    number: int
    checks: tuple[int, ...] = ()
    error: str = ""
    handles: tuple[Any, ...] = ()  # handles by which receivers find the blocks


class Left(Message, tag=9):
    """Report that the worker has left the session's process group of this number, for good."""

    number: Count


class Relaid(Message, tag=11):
    """Report of kernel results with other strides than the plan has."""

    digest: Name
    #: (node of the plan's steps, index of the new output, its strides)
    rows: tuple[tuple[Count, Count, tuple[int, ...]], ...]


class Captured(Message, tag=12):
    """Report that a plan runs as CUDA graphs from now on, or why it can't."""

    digest: Name
    graphs: Count = 0
    steps: Count = 0  # of the plan, in these graphs
    nbytes: Count = 0  # memory of all graphs of the worker
    gain: float = 0.0  # speedup over running without graphs; 0.0: not measured
    error: str = ""
    failed: bool = False  # a capture has failed, for ``error``


class Snapped(Message, tag=15):
    """Report that a snapshot was taken."""

    number: Count
    values: tuple[Copied, ...] = ()  # the copied values, with their offsets
    failed: tuple[tuple[Count, Failure], ...] = ()  # values that could not be computed
    next_dynamic: Count = 0  # id of the next result of a data-dependent op
    generator: bytes = b""  # the generator's state
    nbytes: Count = 0  # bytes that were copied
    #: begin, nanoseconds: start of the snapshot, by the host's monotonic clock, and its duration
    begin: Count = 0
    nanoseconds: Count = 0
    error: str = ""  # reason of a failure; empty: the snapshot was taken


class Restored(Message, tag=16):
    """Report that a worker has the values of a snapshot again."""

    epoch: Count


class Lost(Message, tag=19):
    """Report of the loss of the device after a failed kernel; the worker's last message."""

    #: failure of the op that met the error, with its run; node -1: no op
    failure: Failure
    is_culprit: bool = False  # the failure is that of the op whose kernel failed


TO_WORKER: tuple[type[Message], ...] = (Ship, Run, Swap, Install, Write, Renew, Snap, Restore)
TO_CLIENT: tuple[type[Message], ...] = (
    Done, Need, Swapped, Installed, Wrote, Left, Relaid, Captured, Snapped, Restored, Lost,
)  # fmt: skip
