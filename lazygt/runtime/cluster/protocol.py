"""What goes between a session's client and the agents of its hosts.

An agent has one or more *parts* of a session: some of its ranks, which run on the agent's host. A
part is numbered by the client, its workers from 0. Messages between client and workers travel
behind a header that says whose they are, and are not looked into.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from lazygt.errors import ProtocolError
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.status_file import decoded
from lazygt.runtime.launch.status_reader import Page
from lazygt.runtime.wire import Buffer, Count, Part, decode

# -- to an agent -----------------------------------------------------------------------------


class Open(Part, tag=1):
    """Start the workers of a part.

    Attributes:
        spec: what they are to be, see ``spec_text``.
    """

    part: Count
    spec: str


class Tell(Part, tag=2):
    """The frames that follow are for these workers; none: those of the last such message are.

    Attributes:
        mirrors: number of the last piece of uploads that must be there before.
    """

    part: Count
    workers: tuple[Count, ...]
    mirrors: Count = 0


class Mirror(Part, tag=3):
    """The frame that follows lies at this offset of the client's arena of uploads. Comes from the
    client, or from the agent of another host.

    Attributes:
        first: bytes of that memory's first segment.
        number: of this piece; 0: nobody counts.
        done: number of the last piece that all hosts have.
    """

    first: Count
    offset: Count
    number: Count = 0
    done: Count = 0


class Shadow(Part, tag=4):
    """The frame that follows lies at this offset in the memory of a worker's snapshots, which was
    on a host that is lost. Comes before the part is opened.

    Attributes:
        first: bytes of that memory's first segment.
    """

    part: Count
    worker: Count
    first: Count
    offset: Count


class Replace(Part, tag=5):
    """Start another process in a worker's place, which joins the group of this number."""

    part: Count
    worker: Count
    group: Count


class Refill(Part, tag=6):
    """Have as many spare processes as there are to be."""

    part: Count


class Close(Part, tag=7):
    """End the workers of a part."""

    part: Count


class Look(Part, tag=15):
    """Tell what the workers of a part do; answered by ``Seen``, whatever has become of the part.

    Attributes:
        seconds: for so long they are to find out more about themselves.
    """

    part: Count
    seconds: float


class Begin(Part, tag=17):
    """From now on pieces of uploads are counted, and hosts pass them on.

    Attributes:
        session: number of the session, for the answers.
        number: of the last piece that is here already.
        token: the session's secret, in hexadecimal; "": it ends, and so does all that.
    """

    session: Count
    number: Count = 0
    token: str = ""


class Follow(Part, tag=18):
    """Take pieces from the agent that listens there; "": from the client.

    Attributes:
        turn: for the answer, if there is one.
    """

    turn: Count
    endpoint: str


# -- to the client ---------------------------------------------------------------------------


class Opened(Part, tag=8):
    """The processes of a part's workers: all of them have been started, perhaps anew.

    Attributes:
        replaced: the worker that is another one now, if that was asked for.
    """

    part: Count
    pids: tuple[Count, ...]
    replaced: Count | None = None


class Said(Part, tag=9):
    """The frames that follow are a worker's."""

    part: Count
    worker: Count


class Kept(Part, tag=10):
    """The frame that follows lies at this offset in the memory of a worker's snapshots."""

    part: Count
    worker: Count
    offset: Count


class Died(Part, tag=11):
    """A worker has ended.

    Attributes:
        status, stderr: see ``WorkerDied``.
        run, step: what it did last, if that is known.
    """

    part: Count
    worker: Count
    pid: Count
    status: str
    stderr: str
    run: Count = 0
    step: Count = 0


class Frozen(Part, tag=12):
    """A worker has given no sign of life for so many seconds."""

    part: Count
    worker: Count
    pid: Count
    deadline: float


class Refused(Part, tag=13):
    """A part can't go on, or could not do what it was asked."""

    part: Count
    why: str


class Closed(Part, tag=14):
    """A part's workers have ended."""

    part: Count


class Seen(Part, tag=16):
    """What workers do: the frame that follows is what `pages_of` reads."""

    part: Count


class Listens(Part, tag=19):
    """Other agents may follow this one there; "": they can't, nor does it follow others."""

    session: Count
    endpoint: str


class Has(Part, tag=20):
    """All pieces are here up to this number. Also what an agent says to the one that it follows."""

    session: Count
    number: Count


class Alone(Part, tag=21):
    """This host follows nobody, and needs what comes after this number from the client.

    Attributes:
        turn: of the last `Follow`.
        met: whether it had reached the other agent.
        why: what is wrong.
    """

    session: Count
    turn: Count
    number: Count
    met: bool
    why: str


TO_AGENT: tuple[type[Part], ...] = (
    Open, Tell, Mirror, Shadow, Replace, Refill, Close, Look, Begin, Follow,
)  # fmt: skip
TO_CLIENT: tuple[type[Part], ...] = (
    Opened, Said, Kept, Died, Frozen, Refused, Closed, Seen, Listens, Has, Alone,
)  # fmt: skip

_SPEC_KEYS = frozenset(LinkSpec.__dataclass_fields__)


def spec_text(spec: LinkSpec) -> str:
    """What workers are to be, as text."""
    fields = {**asdict(spec), "environment": dict(spec.environment)}
    fields["token"] = None if spec.token is None else spec.token.hex()
    return json.dumps(fields)


def spec_of(text: str) -> LinkSpec:
    """Read what `spec_text` wrote.

    Raises:
        ProtocolError: another version wrote it, or something else.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        unknown = sorted(fields.keys() - _SPEC_KEYS)
        if unknown:
            raise ValueError(f"there is no {', '.join(unknown)}")
        ranks, token = fields.get("ranks"), fields.get("token")
        fields["ranks"] = None if ranks is None else tuple(ranks)
        fields["token"] = None if token is None else bytes.fromhex(token)
        return msgspec.convert(fields, LinkSpec)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"what workers are to be cannot be read: {error}") from error


def pages_of(frame: Buffer) -> tuple[Page | None, ...]:
    """The status pages of a part's workers.

    Raises:
        ProtocolError: they are none.
    """
    return decoded(frame, tuple[Page | None, ...])


def read(frames: Sequence[Buffer], kinds: tuple[type[Part], ...]) -> Part:
    """The header of a message between client and agent.

    Raises:
        ProtocolError: it is none of these kinds.
    """
    return decode(frames[:1], kinds)
