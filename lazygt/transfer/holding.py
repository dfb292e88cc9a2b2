"""Holding: what a receiver holds of each parameter, its own block or the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.transfer.routes import Bounds, block, shape_of, whole
from lazygt.transfer.spec import Manifest, ParamSpec

#: For each axis the dim that it shards; None: every rank has all of it.
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Holding:
    """One rank's blocks of a model that is laid out on a mesh of receivers.

    Attributes:
        placements: (name pattern, dims); the first that fits a name counts, without one the
            parameter is held whole.
    """

    mesh: Mesh
    rank: int
    placements: tuple[tuple[str, Dims], ...]

    @staticmethod
    def of(
        mesh: Mapping[str, int] | str,
        rank: int,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]],
    ) -> Holding:
        """What a user's arguments say.

        Args:
            mesh: the receivers' grid: ``{"model": 2}`` or ``"model=2"``; not the trainer's.
            placements: name pattern -> torch placements, a list in the mesh's order or a dict by
                axis.

        Raises:
            ValueError: a rank or an axis that the mesh lacks, or another placement than
                ``TorchShard(dim)`` and ``TorchReplicate()``.
        """
        grid = Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.of(mesh)
        if not 0 <= rank < grid.world_size:
            raise ValueError(f"rank {rank}: the mesh {grid} has ranks 0 to {grid.world_size - 1}")
        listed = tuple(
            (pattern, _dims(pattern, given, grid)) for pattern, given in placements.items()
        )
        return Holding(grid, rank, listed)

    @staticmethod
    def asked(
        mesh: Mapping[str, int] | str | None,
        rank: int,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None,
    ) -> Holding | None:
        """What a receiver's arguments say; None: all of each parameter. Raises as `of` does."""
        if (mesh is None) != (placements is None):
            raise ValueError("a receiver that holds blocks needs both mesh= and placements=")
        return None if mesh is None or placements is None else Holding.of(mesh, rank, placements)

    def blocks(self, manifest: Manifest) -> tuple[Bounds, ...]:
        """The block of each parameter, by position.

        Raises:
            ValueError: a pattern fits no parameter, a parameter lacks the dim, or two tied names
                would be held differently.
        """
        unused = {pattern for pattern, _ in self.placements}
        found: list[Bounds] = []
        for spec in manifest.params:
            fitting = next(
                (each for each in self.placements if fnmatchcase(spec.name, each[0])), None
            )
            if fitting is None:
                found.append(whole(spec.shape))
            else:
                unused.discard(fitting[0])
                found.append(block(self.mesh, _labels(spec, fitting[1]), spec.shape, self.rank))
            if spec.alias_of and found[-1] != found[manifest.index[spec.alias_of]]:
                raise ValueError(
                    f"{spec.name} is tied to {spec.alias_of}, but the placements give it another "
                    f"block; give both the same"
                )
        if unused:
            raise ValueError(f"no parameter fits {min(unused)!r}")
        return tuple(found)

    @property
    def packed(self) -> list[Any]:
        """As it travels."""
        return [str(self.mesh), self.rank, [[pattern, dims] for pattern, dims in self.placements]]

    @staticmethod
    def unpack(given: Any) -> Holding | None:
        """Read what `packed` holds; None for None, a receiver of whole parameters.

        Raises:
            ProtocolError: it was made by something else.
        """
        if given is None:
            return None
        try:
            text, rank, listed = given
            mesh = Mesh.parse(text)
            placements = tuple((str(pattern), tuple(dims)) for pattern, dims in listed)
            fits = 0 <= rank < mesh.world_size and all(
                len(dims) == len(mesh.names) and all(d is None or type(d) is int for d in dims)
                for _, dims in placements
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"this is no holding: {error}") from error
        if not fits:
            raise ProtocolError(f"this is no holding: {given!r}")
        return Holding(mesh, rank, placements)


def held(manifest: Manifest, blocks: Sequence[Bounds]) -> Manifest:
    """The manifest of a holding's blocks: the same names, the blocks' shapes."""
    pairs = zip(manifest.params, blocks, strict=True)
    return Manifest(tuple(ParamSpec(s.name, s.dtype, shape_of(b), s.alias_of) for s, b in pairs))


def _dims(pattern: str, given: Sequence[Any] | Mapping[str, Any], mesh: Mesh) -> Dims:
    if isinstance(given, Mapping):
        unknown = [axis for axis in given if axis not in mesh.names]
        if unknown:
            raise ValueError(f"{pattern!r}: the mesh {mesh} has no axis {unknown[0]!r}")
        given = [given.get(axis) for axis in mesh.names]
    if len(given) != len(mesh.names):
        raise ValueError(
            f"{pattern!r}: {len(given)} placements, but the mesh {mesh} has {len(mesh.names)} axes"
        )
    return tuple(_dim(pattern, placement) for placement in given)


def _dim(pattern: str, placement: Any) -> int | None:
    # why: it takes 0.3 s to load, and whoever has such placements has loaded it
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    if placement is None or isinstance(placement, TorchReplicate):
        return None
    if type(placement) is TorchShard:
        return placement.dim
    raise ValueError(
        f"{pattern!r}: a receiver holds a parameter whole or in blocks, not as {placement!r}; use "
        f"Replicate() or Shard(dim)"
    )


def _labels(spec: ParamSpec, dims: Dims) -> tuple[Placement, ...]:
    rank = len(spec.shape)
    wrong = [dim for dim in dims if dim is not None and not -rank <= dim < rank]
    if wrong:
        raise ValueError(f"{spec.name} of shape {list(spec.shape)} has no dim {wrong[0]}")
    return tuple(Replicate() if dim is None else Shard(dim % rank) for dim in dims)
