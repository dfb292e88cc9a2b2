"""Nonsense on the wire: real messages with something in them changed, by the hundred thousand.

``python -m tests.runtime.nonsense 250000`` sends so many to workers and to clients. Either side may
understand them (a changed value is a value) or refuse them with ProtocolError; nothing else.
"""

from __future__ import annotations

import hashlib
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec import MsgspecError, msgpack

import lazygt
from lazygt.errors import LazyGTError, ProtocolError
from lazygt.runtime import graph_codec
from lazygt.runtime.messages import Renew, Ship, Swap, Write
from lazygt.runtime.wire import encode
from lazygt.runtime.worker.inline import InlineLink
from lazygt.runtime.worker.worker import Worker
from lazygt.transfer.copier import copier_for
from lazygt.transfer.copy_request import CopyRequest
from lazygt.transfer.transports.shared_memory import SharedMemoryAddress

Frames = list[bytes]

#: What takes a field's place.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32 + 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -0.0, 0.5, float("nan"), float("inf"), "", "x", "aten.exp.default", "os.system.default",
    b"", b"\xff", bytes(16), b"0" * 17, [], [0], [1, [2, [3]]], [[]] * 3, {}, {"a": 1}, {1: None},
    msgpack.Ext(1, b"\x05"), msgpack.Ext(2, b"\x00"), msgpack.Ext(3, b"torch.float32"),
    msgpack.Ext(3, b"torch.os"), msgpack.Ext(4, b""), msgpack.Ext(5, b"\x92\x01"),
    msgpack.Ext(6, b"\x95\xa3f32\x91\x04\xc0\x00\x00"), msgpack.Ext(7, b"\x00"),
    msgpack.Ext(7, b"\xcd\xff\xff"), msgpack.Ext(7, b"\xff"), msgpack.Ext(99, b"?"),
)  # fmt: skip


def program() -> None:
    """Something of every kind: uploads, fetches, numbers, results that depend on data."""
    weight = torch.arange(6.0).reshape(2, 3)
    for rate in (0.1, 0.2, 0.3):
        weight.sub_(weight.sin() * rate)
        weight.sum().item()
    weight[weight > 1.0].tolist()
    torch.tensor([3, 1, 3]).unique(return_counts=True)
    weight.t().contiguous().tolist()
    try:
        torch.ones(3)[torch.tensor([7])].sum().item()
    except lazygt.ExecutionError:
        weight.numpy()


class Recording(InlineLink):
    """Keeps what goes either way."""

    encode = staticmethod(encode)

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.to_worker: list[Frames] = []
        self.to_client: list[Frames] = []

    def send(self, rank: int, frames: Any) -> None:
        self.to_worker.append([bytes(frame) for frame in frames])
        super().send(rank, frames)

    def receive(self, timeout: float | None, beside: int | None = None) -> Any:
        message = super().receive(timeout, beside)
        if message is not None:
            self.to_client.append([bytes(frame) for frame in message[1]])
        return message


def opened(link: InlineLink) -> lazygt.Session:
    """A session over this link."""
    session = lazygt.session(launcher="inline", compile="off")
    session._link = session._client.link = link
    return session


def conversation() -> Recording:
    """What a session and its worker said to each other."""
    link = Recording(Worker(inline=True, copier=copier_for))
    with opened(link) as s, lazygt.profile(s):
        program()
    request = CopyRequest("here", (), "shared_memory", SharedMemoryAddress(1, 2, 3, 0, 256))
    name = hashlib.sha256(b"").digest()[:16]
    for message in (Renew(1, 5), Swap(name, ((0, "0" * 32),)), Write(3, request.packed)):
        link.to_worker.append([bytes(frame) for frame in encode(message)])
    return link


# -- changes -------------------------------------------------------------------------------


def changed(frames: Frames, draw: random.Random) -> Frames:
    """The message with one thing changed, at least."""
    frames = list(frames)
    kind = draw.random()
    if kind < 0.55:
        which = 0
        if len(frames) == 2 and draw.random() < 0.6:
            which = 1  # a graph, or the bytes of a tensor
        frames[which] = _other_fields(frames[which], draw)
    elif kind < 0.9:
        which = draw.randrange(len(frames))
        frames[which] = _other_bytes(frames[which], draw)
    elif kind < 0.95:
        frames.insert(draw.randrange(len(frames) + 1), draw.choice([b"", b"\x00" * 9, frames[0]]))
    else:
        del frames[draw.randrange(len(frames))]
    return _named(frames) if draw.random() < 0.8 else frames


def _other_bytes(data: bytes, draw: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(made) + 1)
        if draw.random() < 0.6 and place < len(made):
            made[place] ^= 1 << draw.randrange(8)
        elif draw.random() < 0.5:
            made[place:place] = draw.randbytes(draw.randrange(1, 4))
        else:
            del made[place : place + draw.randrange(1, 9)]
    return bytes(made)


def _other_fields(data: bytes, draw: random.Random) -> bytes:
    """A msgpack value with parts of it replaced, doubled, moved or left out."""
    try:
        value = msgpack.decode(data)
    except (MsgspecError, ValueError, RecursionError):
        return _other_bytes(data, draw)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        value = _other(value, draw)
    return msgpack.encode(value)


def _other(value: Any, draw: random.Random) -> Any:
    if not isinstance(value, list) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    value = list(value)
    place = draw.randrange(len(value))
    what = draw.random()
    if what < 0.1:
        del value[place]
    elif what < 0.2:
        value.insert(place, draw.choice([*VALUES, value[place]]))
    elif what < 0.25:
        draw.shuffle(value)
    else:
        value[place] = _other(value[place], draw)
    return value


def ship(graph: bytes, sizes: tuple[int, ...] = ()) -> Frames:
    """The message that brings a plan, by its right name."""
    template = graph_codec.template_name(graph)
    name = graph_codec.plan_name(template, sizes)
    return [*encode(Ship(name, True, template, sizes)), graph]


def _named(frames: Frames) -> Frames:
    """A changed plan under the name that its new content has, so that it is looked at."""
    try:
        header = msgpack.decode(frames[0])
        if isinstance(header, list) and header[0] == 1 and len(frames) > 1:
            header[3] = graph_codec.template_name(frames[1])
            sizes, salt = tuple(header[4]) if len(header) > 4 else (), header[6:7]
            header[1] = graph_codec.plan_name(header[3], sizes, *salt)
            return [msgpack.encode(header), *frames[1:]]
    except (MsgspecError, ValueError, TypeError, IndexError, RecursionError):
        return frames
    return frames


# -- both ends -----------------------------------------------------------------------------


def to_workers(count: int, draw: random.Random) -> Iterator[Callable[[], object]]:
    """Calls that each give a worker in the middle of its work one changed message."""
    said = conversation().to_worker
    for _ in range(count):
        until = draw.randrange(len(said))
        yield _Told(said[:until], changed(said[until], draw), said[until:])


class _Told:
    def __init__(self, before: list[Frames], message: Frames, after: list[Frames]) -> None:
        self.before, self.message, self.after = before, message, after

    def __call__(self) -> None:
        worker = Worker(inline=True, copier=copier_for, device="cpu")
        for frames in self.before:
            worker.handle(list(frames))
        worker.handle(list(self.message))
        for frames in self.after:  # what it took to be sense, it has to live with
            worker.handle(list(frames))


class Tampering(InlineLink):
    """Changes one of the worker's answers."""

    def __init__(self, worker: Worker, which: int, draw: random.Random) -> None:
        super().__init__(worker)
        self._left, self._draw = which, draw
        self.message: Frames = []

    def receive(self, timeout: float | None, beside: int | None = None) -> Any:
        found = super().receive(timeout, beside)
        if found is None:
            return None
        self._left -= 1
        if self._left == 0:
            self.message = changed([bytes(frame) for frame in found[1]], self._draw)
            return 0, [memoryview(frame) for frame in self.message]
        return found


def to_clients(count: int, draw: random.Random) -> Iterator[Callable[[], object]]:
    """Calls that each run a program of which one answer is changed."""
    answers = len(conversation().to_client)
    for _ in range(count):
        yield _Answered(
            Tampering(Worker(inline=True, copier=copier_for), draw.randrange(answers) + 1, draw)
        )


class _Answered:
    def __init__(self, link: Tampering) -> None:
        self.link = link

    @property
    def message(self) -> Frames:
        return self.link.message

    def __call__(self) -> None:
        with opened(self.link) as s, lazygt.profile(s):
            program()


def outcome(call: Callable[[], object]) -> str:
    """What became of a call: understood, refused, or what was raised instead."""
    try:
        call()
    except ProtocolError:
        return "refused"
    except lazygt.ExecutionError:
        return "understood"  # as an op that failed
    except LazyGTError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - these are what is looked for
        return f"{type(error).__name__}: {error}"
    return "understood"


def main() -> None:
    """Try many, on a thread and with little memory, and print what was not as it should be."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    limit = 6 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seen: Counter[str] = Counter()
    slowest = 0.0
    for make, share in ((to_workers, 0.8), (to_clients, 0.2)):
        for call in make(int(count * share), random.Random(seed)):
            begin = time.monotonic()
            what = outcome(call)
            slowest = max(slowest, time.monotonic() - begin)
            seen[what.split("\n")[0][:150]] += 1
            if what not in ("refused", "understood") and seen[what.split("\n")[0][:150]] == 1:
                print(make.__name__, what, call.message, flush=True)
    print(*seen.most_common(), sep="\n")
    print(f"{sum(seen.values())} messages, the slowest took {slowest:.2f} s")


if __name__ == "__main__":
    main()
