"""A transfer on its way in, and the complete version that comes of it."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.batches import Piece
from lazygt.transfer.bytework import Checksum, Crew, checksum_named
from lazygt.transfer.control import Deadline, Message
from lazygt.transfer.errors import TransferError
from lazygt.transfer.holding import Holding, held
from lazygt.transfer.routes import Bounds, slices
from lazygt.transfer.spec import Manifest

_GRACE_SECONDS = 1.0  # beyond the sender's own deadline, before the receiver gives up on it


class Version(NamedTuple):
    """A complete set of weights; its memory lives as long as one of its tensors.

    Attributes:
        whole: the manifest that was sent.
        manifest: of what is held here.
    """

    number: int
    whole: Manifest
    manifest: Manifest
    flat: Tensor
    params: dict[str, Tensor]


class Block(NamedTuple):
    """A block of one parameter that its owner has written.

    Attributes:
        param: the parameter's position in the manifest.
    """

    param: int
    bounds: Bounds

    def __str__(self) -> str:
        return f"values [{', '.join(f'{start}:{stop}' for start, stop in self.bounds)}]"


class Incoming:
    """A transfer on its way in.

    Args:
        last: what came before; its manifest is not read again if it is the same.
        holding: what the receiver holds of each parameter; None: all of it.

    Raises:
        Mismatch: the model can't be held so.
    """

    def __init__(
        self, begin: Message, last: Version | None, holding: Holding | None = None
    ) -> None:
        self.transfer, self.version = int(begin["transfer"]), int(begin["version"])
        if last is not None and last.whole.packed == begin["manifest"]:
            self.whole, self.manifest = last.whole, last.manifest
        else:
            self.whole = Manifest.unpack(begin["manifest"])
            self.manifest = _held(self.whole, holding)
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
        params = self.manifest.tensors(flat)
        self.staged = Version(self.version, self.whole, self.manifest, flat, params)

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

    def block(self, block: Block) -> Tensor:
        """Where a block belongs in the staging buffer.

        Raises:
            ProtocolError: it lies outside its parameter.
        """
        if self.staged is None or not 0 <= block.param < len(self.manifest.params):
            raise ProtocolError(f"a block of unknown parameter {block.param}")
        spec = self.manifest.params[block.param]
        tensor = self.staged.params[spec.name]
        fits = len(block.bounds) == tensor.dim() and all(
            0 <= start < stop <= size
            for (start, stop), size in zip(block.bounds, tensor.shape, strict=True)
        )
        if not fits:
            raise ProtocolError(f"a block of {spec.name} lies outside of it")
        return tensor[slices(block.bounds)] if block.bounds else tensor

    def unpack(self, buffer: Tensor, blocks: Sequence[Block], offsets: Sequence[int]) -> None:
        """Copy blocks out of a flat uint8 buffer in which each one lies by itself.

        Raises:
            ProtocolError: one lies outside its parameter or the buffer.
        """
        for block, offset in zip(blocks, offsets, strict=True):
            target = self.block(block)
            if not 0 <= offset <= buffer.numel() - target.nbytes:
                raise ProtocolError("a block lies outside of its buffer")
            packed = buffer[offset : offset + target.nbytes]
            target.copy_(packed.view(target.dtype).view(target.shape))

    def take_in(
        self,
        crew: Crew,
        pieces: Sequence[Piece | Block],
        memory: Iterable[Tensor],
        checks: Sequence[int],
    ) -> None:
        """Verify what has come, and count it.

        Args:
            memory: of each piece.
            checks: the sender's checksums.

        Raises:
            TransferError: one is not what was sent.
        """
        runs = list(memory)
        if self.check is not None:
            found = crew.check(runs, self.check)
            for piece, ours, theirs in zip(pieces, found, checks, strict=True):
                if ours != theirs:
                    raise TransferError(
                        f"{piece} of {self.manifest.params[piece.param].name} are not what was "
                        f"sent ({self.verify} {ours:#x}, sent {theirs:#x})"
                    )
        for piece, run in zip(pieces, runs, strict=True):
            self.arrived[piece.param] += run.nbytes


def _held(manifest: Manifest, holding: Holding | None) -> Manifest:
    try:
        return held(manifest, holding.blocks(manifest)) if holding else manifest
    except ValueError as error:
        raise Mismatch(str(error)) from error


class Mismatch(TransferError):
    """The offered manifest is not what this receiver takes."""


class Wake:
    """Ends a thread's poll from any other thread, also from a finalizer (no lock is taken)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def __call__(self, *_: object) -> None:
        os.eventfd_write(self.fd, 1)


class Aborted(Exception):
    """The sender has given this transfer up."""
