"""From chunks to requests: when a sender has gathered enough, and what lies where.

Pure: no tensor, no clock, no transport. The rules, with a threshold of T bytes:

- a chunk that would take the open request over T first closes it; exactly T still fits;
- a chunk bigger than T goes alone, cut into as many requests as it needs, none over T;
- a parameter bigger than T is cut by bytes, at multiples of the alignment;
- there is no empty request;
- T = 0: each chunk is one request, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lazygt.transfer.spec import ALIGNMENT, Manifest, aligned

GIB = 1 << 30
PIECE_BYTES = 16 << 20
"""The longest run of bytes that one thread copies and checks.

Long, because threads that end a piece wait for the interpreter's lock: on two cores 4 MiB cost a
seventh of all the time. Copies with crc32 are cut further, to fit a core's cache.
"""


def threshold_bytes(threshold_gb: float | str, name: str = "threshold_gb") -> int:
    """GiB of a request in bytes.

    Args:
        name: of the setting, for the error.

    Raises:
        ValueError: it is no number, negative, without end, or above 0 and below 256 bytes.
    """
    try:
        nbytes = int(float(threshold_gb) * GIB)
    except (ValueError, TypeError, OverflowError):
        nbytes = -1
    if nbytes < 0 or 0 < nbytes < ALIGNMENT:
        raise ValueError(
            f"{name}={threshold_gb!r}: expected GiB, 0 (a request a chunk) or at least "
            f"{ALIGNMENT / GIB:.1e}"
        )
    return nbytes


class Piece(NamedTuple):
    """A run of bytes of one parameter.

    Attributes:
        param: the parameter's position in the manifest.
        begin: its first byte within the parameter.
        place: where it lies in the request's buffer.
    """

    param: int
    begin: int
    nbytes: int
    place: int

    def __str__(self) -> str:
        return f"bytes {self.begin} to {self.begin + self.nbytes}"


Request = tuple[Piece, ...]


def extent(request: Request) -> int:
    """Bytes of buffer that a request needs."""
    return max(piece.place + aligned(piece.nbytes) for piece in request)


class Batcher:
    """Gathers chunks into requests.

    Args:
        threshold: bytes of a request's buffer, rounded down to the alignment; 0: no limit.
    """

    def __init__(self, manifest: Manifest, threshold: int, piece_bytes: int = PIECE_BYTES) -> None:
        if threshold and threshold < ALIGNMENT:
            raise ValueError(f"a threshold of {threshold} bytes is below {ALIGNMENT}; use 0")
        self._manifest = manifest
        self._limit = threshold // ALIGNMENT * ALIGNMENT
        self._piece_bytes = piece_bytes
        self._open: list[Piece] = []
        self._used = 0

    def add(self, chunk: Iterable[int]) -> Iterator[Request]:
        """Take in a chunk (positions in the manifest); yields the requests that it completes."""
        sizes = [(number, self._manifest.params[number].nbytes) for number in chunk]
        whole = sum(aligned(nbytes) for _, nbytes in sizes)
        alone = not self._limit or whole > self._limit
        if alone or self._used + whole > self._limit:
            yield from self.flush()
        for number, nbytes in sizes:
            if alone and self._limit and self._used + aligned(nbytes) > self._limit:
                yield from self.flush()
            yield from self._place(number, nbytes)
        if alone:
            yield from self.flush()

    def flush(self) -> Iterator[Request]:
        """Yield the open request, if there is anything in it."""
        if self._open:
            request, self._open, self._used = tuple(self._open), [], 0
            yield request

    def _place(self, number: int, nbytes: int) -> Iterator[Request]:
        begin = 0
        while begin < nbytes:
            room = self._limit - self._used if self._limit else nbytes
            length = min(nbytes - begin, room, self._piece_bytes)
            self._open.append(Piece(number, begin, length, self._used))
            self._used += aligned(length)
            begin += length
            if self._used == self._limit and begin < nbytes:
                yield from self.flush()


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same bytes in as few pieces as possible: for transports that like long runs."""
    runs: list[Piece] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if last and last.param == piece.param and last.begin + last.nbytes == piece.begin:
            runs[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            runs.append(piece)
    return runs
