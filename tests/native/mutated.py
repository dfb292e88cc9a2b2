"""Frames that were changed, given to all that the extension decodes: runs, numbers, mailboxes.

Run as ``python -m tests.native.mutated COUNT SEED``, which a sanitizer may watch. Real frames of a
session are recorded, changed (bits, bytes, lengths, pieces of other frames) and decoded; a decoder
may refuse a frame or do as it says, and may not read or write beside it. Prints counts as JSON.
"""

from __future__ import annotations

import copy
import json
import mmap
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import msgspec
import torch

import lazygt
from lazygt import native
from lazygt.net import mailbox
from lazygt.runtime.executors.native import number_reader
from lazygt.runtime.messages import TO_WORKER, Run
from lazygt.runtime.wire import decode, encode
from lazygt.runtime.worker import inline
from lazygt.runtime.worker.inline import InlineLink
from lazygt.runtime.worker.worker import Worker

#: Numbers at the borders of msgpack's formats, as it writes them.
_BORDERS = [
    *(bytes([byte]) for byte in (0x00, 0x7F, 0x80, 0x90, 0x9F, 0xC0, 0xC1, 0xC3, 0xE0, 0xFF)),
    *(b"\xcd" + struct.pack(">H", n) for n in (0, 0xFFFF)),
    *(b"\xce" + struct.pack(">I", n) for n in (0, 0x7FFFFFFF, 0xFFFFFFFF)),
    *(b"\xcf" + struct.pack(">Q", n) for n in (1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)),
    *(b"\xd3" + struct.pack(">q", n) for n in (-1, -(1 << 63))),
    *(b"\xdc" + struct.pack(">H", n) for n in (1, 0xFFFF)),
    b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcb\x7f\xf8\0\0\0\0\0\0",
]  # fmt: skip


#: Fields of other kinds and at the borders of 64 bits.
_FIELDS = [
    None, True, False, 0, 1, 7, 200, (1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1, -1, -(1 << 63),
    float("nan"), 1e300, b"", bytes(16), [], [0], [1, []], [0, [1, 2]], [1, [0, 1 << 62]],
    [0, [(1 << 63) - 1]], [5] * 20,
]  # fmt: skip
#: Bytes of a mailbox's memory before and within its two counters.
_COUNTERS = 8 * (mailbox._READ + 1)


class Recorded(InlineLink):
    """A link whose messages travel as bytes, by Python, and are written down."""

    made: list[Recorded]

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.encode = worker._encode = encode  # type: ignore[method-assign]
        self.worker, self.runs, self.answers, self.values = worker, [], [], {}
        Recorded.made.append(self)

    def native_fetcher(self, make: Any, *whose: Any) -> Any:
        """Return None: runs sent by C++ would pass by this link."""
        return None

    def send(self, rank: int, frames: Any) -> None:
        if len(frames) == 1 and isinstance(decode(frames, TO_WORKER), Run):
            self.runs.append(bytes(frames[0]))
        self.values.update(self.worker.store.values)
        super().send(rank, frames)
        self.values.update(self.worker.store.values)
        self.answers += [[bytes(f) for f in reply] for reply in list(self._replies)[-1:]]


def train(session: lazygt.Session) -> None:
    """Runs with inputs, frees, parameters and numbers of all kinds, most of them known ones."""
    weight, table = torch.ones(3), torch.arange(12.0).view(4, 3)
    for step in range(12):
        weight = weight * 0.5 + (0.1, -2, 2**40, -(2**62))[step % 4]
        weight.add_(table[step % 4])
        weight.sum().item()
        (table > step).any().item()
        weight.to(torch.int64).max().item()
        session.flush()


def change_field(fields: list[Any], draw: random.Random) -> None:
    """Change a number, a list's length or a kind somewhere inside a decoded frame."""
    at = draw.randrange(len(fields))
    inner = fields[at]
    if isinstance(inner, list) and inner and draw.random() < 0.8:
        change_field(inner, draw)
    elif type(inner) is int and draw.random() < 0.7:
        fields[at] = max(inner + draw.randint(-3, 3), -(1 << 63))
    else:
        fields[at] = copy.deepcopy(draw.choice(_FIELDS))


def changed(frame: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """Return a frame with one field changed, or one to three pieces of its bytes."""
    if draw.random() < 0.5:
        return changed_bytes(frame, others, draw)
    fields = msgspec.msgpack.decode(frame)
    change_field(fields, draw)
    return msgspec.msgpack.encode(fields)


def changed_bytes(frame: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at : at + draw.randint(0, 9)] = draw.choice(_BORDERS)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + draw.randint(1, 4)]
            case 4:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
            case _:
                other = draw.choice(others)
                begin = draw.randrange(len(other) + 1)
                data[at:] = other[begin:]
    return bytes(data)


def fuzz_runs(link: Recorded, count: int, draw: random.Random) -> Counter[str]:
    """Changed runs, given to a worker's known runs; what became of them."""
    values, known = link.worker.store.values, link.worker.known_runs
    assert known is not None
    seen: Counter[str] = Counter()
    values.update(link.values)
    for _ in range(count):
        frame = changed(draw.choice(link.runs), link.runs, draw)
        try:
            outcome = known.run(frame)
        except (RuntimeError, ValueError, TypeError, IndexError, OverflowError) as error:
            seen[type(error).__name__] += 1
        else:
            seen["passed on" if outcome is None else "run"] += 1
        if outcome is not None:
            values.clear()
            values.update(link.values)
    return seen


def fuzz_numbers(link: Recorded, count: int, draw: random.Random) -> Counter[str]:
    """Changed answers, given to the client's reader of numbers."""
    answers = [answer for answer in link.answers if len(answer) == 2]
    heads, reader = [answer[0] for answer in answers], number_reader()
    seen: Counter[str] = Counter()
    for _ in range(count):
        head, data = draw.choice(answers)
        if draw.random() < 0.3:
            data = changed_bytes(data, heads, draw)
        seq = msgspec.msgpack.decode(head)[1]
        told = reader.number([changed(head, heads, draw), data], seq)
        seen["refused" if told is None else "a number"] += 1
    return seen


def fuzz_mailbox(link: Recorded, count: int, draw: random.Random) -> Counter[str]:
    """A mailbox whose memory the other process has written anything to."""
    first, slot, slots = mailbox._RING_HEADER_BYTES, mailbox._SLOT, mailbox._SLOTS
    memory = mmap.mmap(-1, first + slot * slots)
    box = native.extension().Mailbox(memory, 0, first, slot, slots)
    seen: Counter[str] = Counter()
    for _ in range(count):
        memory[:_COUNTERS] = bytes(_COUNTERS)
        box.put([draw.choice(link.runs) for _ in range(draw.randint(0, 3))], 0)
        for _ in range(draw.randint(1, 3)):
            at = draw.choice((draw.randrange(_COUNTERS), first + draw.randrange(64)))
            memory[at] = draw.randrange(256)
        try:
            told = box.take(draw.choice((0, 1 << 63)))
        except ValueError:
            seen["refused"] += 1
        else:
            seen["empty" if told is None else "taken"] += 1
    box.close()
    return seen


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    draw, Recorded.made = random.Random(seed), []
    fuzzers: dict[str, Callable[[Recorded, int, random.Random], Counter[str]]] = {
        "runs": fuzz_runs, "numbers": fuzz_numbers, "mailbox": fuzz_mailbox,
    }  # fmt: skip
    with (
        mock.patch.object(inline, "InlineLink", Recorded),
        lazygt.session(
            launcher="inline", compile=lazygt.Compile("off", plan_code="native")
        ) as session,
    ):
        train(session)
        (link,) = Recorded.made
        told = {name: fuzz(link, count, draw) for name, fuzz in fuzzers.items()}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
