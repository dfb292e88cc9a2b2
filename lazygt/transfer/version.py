"""Incoming transfer, and the complete version that results from it."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.control import ControlMessage, Deadline
from lazygt.transfer.copier import Checksum, CopyPool, checksum_named
from lazygt.transfer.layout import Bounds, ReceiverLayout, localized, slices
from lazygt.transfer.manifest import Manifest
from lazygt.transfer.transfer_errors import TransferError

_EXTRA_SECONDS = 1.0  # after the sender's own deadline, before the receiver leaves a frozen sender


class Version(NamedTuple):
    """Complete set of weights; the memory lives as long as any of the tensors.

    Attributes:
        full_manifest: the sender's manifest, of full parameters.
        manifest: manifest of the blocks on this receiver.
    """

    number: int
    full_manifest: Manifest
    manifest: Manifest
    flat: Tensor
    params: dict[str, Tensor]


class Block(NamedTuple):
    """Bounds of a block in one parameter.

    Attributes:
        param: the parameter's position in the manifest.
    """

    param: int
    bounds: Bounds

    def __str__(self) -> str:
        return f"values [{', '.join(f'{start}:{stop}' for start, stop in self.bounds)}]"


class StagedVersion:
    """Staging buffer of an incoming transfer.

    Args:
        last: the current version; its manifest is reused if equal.
        layout: layout of the receiver's blocks; None: full parameters.

    Raises:
        Mismatch: the model can't have this layout.
    """

    def __init__(
        self, begin: ControlMessage, last: Version | None, layout: ReceiverLayout | None = None
    ) -> None:
        self.transfer, self.version = int(begin["transfer"]), int(begin["version"])
        if last is not None and last.full_manifest.packed == begin["manifest"]:
            self.full_manifest, self.manifest = last.full_manifest, last.manifest
        else:
            self.full_manifest = Manifest.unpack(begin["manifest"])
            self.manifest = _local_manifest(self.full_manifest, layout)
        self.deadline = Deadline(float(begin["seconds"]) + _EXTRA_SECONDS)
        self.verify = str(begin["verify"])
        self.check: Checksum | None = checksum_named(self.verify)
        self.arrived: Counter[int] = Counter()
        self.new: Version | None = None
        self.complete = False

    def allocate(self, flat: Tensor) -> None:
        """Create the parameters of the new version in ``flat``, still without values."""
        params = self.manifest.tensors(flat)
        self.new = Version(self.version, self.full_manifest, self.manifest, flat, params)

    def block(self, block: Block) -> Tensor:
        """Return a view of a block in the staging buffer.

        Raises:
            ProtocolError: the block lies outside its parameter.
        """
        if self.new is None or not 0 <= block.param < len(self.manifest.params):
            raise ProtocolError(f"a block of unknown parameter {block.param}")
        spec = self.manifest.params[block.param]
        tensor = self.new.params[spec.name]
        is_inside = len(block.bounds) == tensor.dim() and all(
            0 <= start < stop <= size
            for (start, stop), size in zip(block.bounds, tensor.shape, strict=True)
        )
        if not is_inside:
            raise ProtocolError(f"a block of {spec.name} lies outside of it")
        return tensor[slices(block.bounds)] if block.bounds else tensor

    def unpack(self, buffer: Tensor, blocks: Sequence[Block], offsets: Sequence[int]) -> None:
        """Copy blocks out of a flat uint8 buffer, in which each block is contiguous.

        Raises:
            ProtocolError: a block lies outside its parameter or the buffer.
        """
        for block, offset in zip(blocks, offsets, strict=True):
            target = self.block(block)
            if not 0 <= offset <= buffer.numel() - target.nbytes:
                raise ProtocolError("a block lies outside of its buffer")
            packed = buffer[offset : offset + target.nbytes]
            target.copy_(packed.view(target.dtype).view(target.shape))

    def verify_blocks(self, pool: CopyPool, blocks: Sequence[Block], checks: Sequence[int]) -> None:
        """Verify received blocks, and count their bytes.

        Args:
            checks: the sender's checksums.

        Raises:
            ProtocolError: a block lies outside its parameter.
            TransferError: a block's checksum differs from the sender's.
        """
        views = [self.block(block) for block in blocks]
        if self.check is not None:
            checksums = pool.check(views, self.check)
            for block, actual, expected in zip(blocks, checksums, checks, strict=True):
                if actual != expected:
                    raise TransferError(
                        f"{block} of {self.manifest.params[block.param].name} are not what was "
                        f"sent ({self.verify} {actual:#x}, sent {expected:#x})"
                    )
        for block, tensor in zip(blocks, views, strict=True):
            self.arrived[block.param] += tensor.nbytes

    def add_unchanged(
        self, last: Version | None, blocks: Sequence[Block], *, are_there: bool
    ) -> None:
        """Add blocks that were not sent, copied from the last version.

        Args:
            are_there: True if the blocks are in the buffer already; nothing is copied.

        Raises:
            ProtocolError: there is no last version with this manifest.
        """
        if blocks and (last is None or last.manifest.digest != self.manifest.digest):
            raise ProtocolError("unchanged parameters for a receiver that has none")
        for block in blocks:
            target = self.block(block)
            if last is not None and not are_there:
                source = last.params[self.manifest.params[block.param].name]
                target.copy_(source[slices(block.bounds)] if block.bounds else source)
            self.arrived[block.param] += target.nbytes


def _local_manifest(manifest: Manifest, layout: ReceiverLayout | None) -> Manifest:
    """Return the manifest of a receiver's blocks; raise Mismatch for impossible layouts."""
    try:
        return localized(manifest, layout.blocks(manifest)) if layout else manifest
    except ValueError as error:
        raise Mismatch(str(error)) from error


class Mismatch(TransferError):
    """The receiver does not accept the offered manifest."""


class Wake:
    """Eventfd that ends a poll from any thread, also from a finalizer (no lock is taken)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def __call__(self, *_: object) -> None:
        os.eventfd_write(self.fd, 1)


class Aborted(Exception):
    """The sender has aborted this transfer."""
