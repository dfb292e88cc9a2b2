"""A transfer on its way in, and the complete version that comes of it."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.checksums import Checksum, CopyPool, checksum_named
from lazygt.transfer.connection import Deadline, Message
from lazygt.transfer.errors import TransferError
from lazygt.transfer.layout import Bounds, ReceiverLayout, localized, slices
from lazygt.transfer.manifest import Manifest

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


class StagedVersion:
    """A transfer on its way in.

    Args:
        last: what came before; its manifest is not read again if it is the same.
        layout: what the receiver holds of each parameter; None: all of it.

    Raises:
        Mismatch: the model can't be held so.
    """

    def __init__(
        self, begin: Message, last: Version | None, layout: ReceiverLayout | None = None
    ) -> None:
        self.transfer, self.version = int(begin["transfer"]), int(begin["version"])
        if last is not None and last.whole.packed == begin["manifest"]:
            self.whole, self.manifest = last.whole, last.manifest
        else:
            self.whole = Manifest.unpack(begin["manifest"])
            self.manifest = _localized(self.whole, layout)
        self.deadline = Deadline(float(begin["seconds"]) + _GRACE_SECONDS)
        self.verify = str(begin["verify"])
        self.check: Checksum | None = checksum_named(self.verify)
        self.arrived: Counter[int] = Counter()
        self.new: Version | None = None
        self.complete = False

    def allocate(self, flat: Tensor) -> None:
        """Make the parameters of the new version, still without values."""
        params = self.manifest.tensors(flat)
        self.new = Version(self.version, self.whole, self.manifest, flat, params)

    def block(self, block: Block) -> Tensor:
        """Return a block's part of the staging buffer.

        Raises:
            ProtocolError: it lies outside its parameter.
        """
        if self.new is None or not 0 <= block.param < len(self.manifest.params):
            raise ProtocolError(f"a block of unknown parameter {block.param}")
        spec = self.manifest.params[block.param]
        tensor = self.new.params[spec.name]
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

    def verify_blocks(self, pool: CopyPool, blocks: Sequence[Block], checks: Sequence[int]) -> None:
        """Verify what has come, and count it.

        Args:
            checks: the sender's checksums.

        Raises:
            ProtocolError: a block lies outside its parameter.
            TransferError: one is not what was sent.
        """
        memory = [self.block(block) for block in blocks]
        if self.check is not None:
            sums = pool.check(memory, self.check)
            for block, ours, theirs in zip(blocks, sums, checks, strict=True):
                if ours != theirs:
                    raise TransferError(
                        f"{block} of {self.manifest.params[block.param].name} are not what was "
                        f"sent ({self.verify} {ours:#x}, sent {theirs:#x})"
                    )
        for block, tensor in zip(blocks, memory, strict=True):
            self.arrived[block.param] += tensor.nbytes

    def keep(self, last: Version | None, blocks: Sequence[Block], *, are_there: bool) -> None:
        """Count blocks that did not travel, and copy them from the last version.

        Args:
            are_there: they need not be copied.

        Raises:
            ProtocolError: there is no last version of this kind.
        """
        if blocks and (last is None or last.manifest.digest != self.manifest.digest):
            raise ProtocolError("unchanged parameters for a receiver that has none")
        for block in blocks:
            target = self.block(block)
            if last is not None and not are_there:
                source = last.params[self.manifest.params[block.param].name]
                target.copy_(source[slices(block.bounds)] if block.bounds else source)
            self.arrived[block.param] += target.nbytes


def _localized(manifest: Manifest, layout: ReceiverLayout | None) -> Manifest:
    try:
        return localized(manifest, layout.blocks(manifest)) if layout else manifest
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
