"""Messages between a session's client and the agents of its hosts.

An agent has one or more *parts* of a session: some of its ranks, which run on the agent's host. A
part is numbered by the client, its workers from 0. Messages between client and workers travel
behind a header with part and worker, and are not decoded.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec

from lazygt.errors import ProtocolError
from lazygt.net.status_file import Page, decoded
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.wire import Buffer, Count, Message

# -- to an agent -----------------------------------------------------------------------------


class Open(Message, tag=1):
    """Request: start the workers of a part."""

    part: Count
    spec: str  # specification of the workers, see ``spec_text``


class Tell(Message, tag=2):
    """Message for these workers, in the following frames.

    Without frames the last such message is repeated.
    """

    part: Count
    workers: tuple[Count, ...]
    mirrors: Count = 0  # number of the last piece of uploads that must arrive before it


class Mirror(Message, tag=3):
    """Piece of an upload: the following frame, at this offset of the client's arena.

    The client sends it, or the agent of another host.
    """

    first: Count  # size of that arena's first segment in bytes
    offset: Count
    number: Count = 0  # number of this piece; 0: pieces are not counted
    done: Count = 0  # number of the last piece that all hosts have


class Shadow(Message, tag=4):
    """Piece of a worker's snapshots from a lost host: the following frame, at this offset.

    Sent before the part is opened.
    """

    part: Count
    worker: Count
    first: Count  # size of the snapshot memory's first segment in bytes
    offset: Count


class Replace(Message, tag=5):
    """Request: start another process in a worker's place, in the group of this number."""

    part: Count
    worker: Count
    group: Count


class Refill(Message, tag=6):
    """Request: start spare processes up to the configured number."""

    part: Count


class Close(Message, tag=7):
    """Request: end the workers of a part."""

    part: Count


class Look(Message, tag=15):
    """Request for the status of a part's workers; always answered by ``Seen``."""

    part: Count
    seconds: float  # time for which the workers shall report more details


class Begin(Message, tag=17):
    """Request: count the pieces of uploads, and relay them."""

    session: Count  # number of the session, for the answers
    number: Count = 0  # number of the last piece that the host has already
    #: the session's secret, in hexadecimal; "": the session ends, and the counting with it
    token: str = ""


class Follow(Message, tag=18):
    """Request: receive pieces from the agent at this endpoint; "": from the client."""

    turn: Count  # number of this request, for the answer, if there is one
    endpoint: str


# -- to the client ---------------------------------------------------------------------------


class Opened(Message, tag=8):
    """Process ids of a part's workers: all have been started, perhaps anew."""

    part: Count
    pids: tuple[Count, ...]
    replaced: Count | None = None  # the worker that was replaced, if that was requested


class Said(Message, tag=9):
    """Message of a worker, in the following frames."""

    part: Count
    worker: Count


class Kept(Message, tag=10):
    """Piece of a worker's snapshots: the following frame, at this offset."""

    part: Count
    worker: Count
    offset: Count


class Died(Message, tag=11):
    """Death of a worker."""

    part: Count
    worker: Count
    pid: Count
    status: str  # see ``WorkerDied``, also for stderr
    stderr: str
    run: Count = 0  # its last run and step, if known
    step: Count = 0


class Frozen(Message, tag=12):
    """Report of a worker without a sign of life for ``deadline`` seconds."""

    part: Count
    worker: Count
    pid: Count
    deadline: float


class Refused(Message, tag=13):
    """Report of a part that can't go on, or could not fulfil a request."""

    part: Count
    why: str


class Closed(Message, tag=14):
    """Report that a part's workers have ended."""

    part: Count


class Seen(Message, tag=16):
    """Status pages of workers, in the following frame, which `pages_of` reads."""

    part: Count


class Listens(Message, tag=19):
    """Endpoint of an agent for followers; "": the agent has none, and follows no others."""

    session: Count
    endpoint: str


class Has(Message, tag=20):
    """Report of the last piece stored; the host has all pieces before it, too.

    An agent also sends it to the agent that it follows.
    """

    session: Count
    number: Count


class Alone(Message, tag=21):
    """Report of a host that follows no other, and needs later pieces from the client."""

    session: Count
    turn: Count  # turn of the last `Follow`
    number: Count
    met: bool  # True if it had reached the other agent
    why: str  # the error


TO_AGENT: tuple[type[Message], ...] = (
    Open, Tell, Mirror, Shadow, Replace, Refill, Close, Look, Begin, Follow,
)  # fmt: skip
TO_CLIENT: tuple[type[Message], ...] = (
    Opened, Said, Kept, Died, Frozen, Refused, Closed, Seen, Listens, Has, Alone,
)  # fmt: skip


#: Constants of Python's JSON that a specification may have; not NaN.
_CONSTANTS = {"Infinity": math.inf}


def spec_text(spec: LinkSpec) -> str:
    """Encode a specification of workers as JSON text.

    Python's JSON has infinite numbers, and paths that are not UTF-8 (the environment has some).
    """
    return json.dumps(msgspec.to_builtins(spec))


def spec_of(text: str) -> LinkSpec:
    """Decode the output of `spec_text`; unknown fields are ignored.

    Raises:
        ProtocolError: the text is no JSON, or a field is of another type.
    """
    try:
        spec = msgspec.convert(json.loads(text, parse_constant=_CONSTANTS.__getitem__), LinkSpec)
        msgspec.json.encode(replace(spec, environment={}))  # raises for text that is not UTF-8
        return spec
    except (ValueError, KeyError, msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"a specification of workers cannot be read: {error}") from error


def pages_of(frame: Buffer) -> tuple[Page | None, ...]:
    """Decode the status pages of a part's workers.

    Raises:
        ProtocolError: the frame has no such pages.
    """
    return decoded(frame, tuple[Page | None, ...])
