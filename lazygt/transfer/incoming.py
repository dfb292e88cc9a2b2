"""A transfer on its way in, and the complete version that comes of it."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.batches import Piece
from lazygt.transfer.bytework import Checksum, checksum_named
from lazygt.transfer.control import Deadline, Message
from lazygt.transfer.spec import Manifest

_GRACE_SECONDS = 1.0  # beyond the sender's own deadline, before the receiver gives up on it


class Version(NamedTuple):
    """A complete set of weights; its memory lives as long as one of its tensors."""

    number: int
    manifest: Manifest
    flat: Tensor
    params: dict[str, Tensor]


class Incoming:
    """A transfer on its way in.

    Args:
        last: what came before; its manifest is not read again if it is the same.
    """

    def __init__(self, begin: Message, last: Version | None) -> None:
        self.transfer, self.version = int(begin["transfer"]), int(begin["version"])
        same = last is not None and last.manifest.packed == begin["manifest"]
        self.manifest = last.manifest if last and same else Manifest.unpack(begin["manifest"])
        self.deadline = Deadline(float(begin["seconds"]) + _GRACE_SECONDS)
        self.verify = str(begin["verify"])
        self.check: Checksum | None = checksum_named(self.verify)
        self.arrived: Counter[int] = Counter()
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.staged: Version | None = None
        self.complete = False

    def stage_in(self, flat: Tensor) -> None:
        """Make the parameters of the new version, still without values."""
        self.flat = flat
        self.staged = Version(self.version, self.manifest, flat, self.manifest.tensors(flat))

    def run(self, piece: Piece) -> Tensor:
        """Where a piece belongs in the staging buffer.

        Raises:
            ProtocolError: it lies outside its parameter.
        """
        if not 0 <= piece.param < len(self.manifest.params):
            raise ProtocolError(f"a piece of unknown parameter {piece.param}")
        spec, place = self.manifest.params[piece.param], self.manifest.places[piece.param]
        if piece.begin < 0 or piece.nbytes < 1 or piece.begin + piece.nbytes > spec.nbytes:
            raise ProtocolError(f"a piece of {spec.name} lies outside of it")
        return self.flat[place + piece.begin : place + piece.begin + piece.nbytes]


class Wake:
    """Ends a thread's poll from any other thread, also from a finalizer (no lock is taken)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def __call__(self, *_: object) -> None:
        os.eventfd_write(self.fd, 1)


class Aborted(Exception):
    """The sender has given this transfer up."""
