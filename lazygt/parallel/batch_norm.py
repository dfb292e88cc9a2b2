"""Batch norm with each rank's own statistics, as in ``DistributedDataParallel``.

By default the statistics are those of the global batch, as on one device, so each batch norm
exchanges them between ranks (``SyncBatchNorm``). Local statistics need no exchange, but the numbers
depend on the number of ranks of the axis, because each block of samples is normalised separately.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lazygt.record.annotate import mesh_of
from lazygt.record.tensor import is_lazy
from lazygt.session import current


def local_batch_norm(module: nn.Module, mesh_dim: str = "data") -> nn.Module:
    """Make every batch norm in a module compute statistics of each rank's block of samples.

    ``lazygt.distribute(batch, {"data": Shard(0)})`` shards the batches. Running statistics are of
    the first block, as DDP keeps those of rank 0. Evaluation is unchanged, and so is training in a
    session with a mesh that lacks the axis.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or the module no batch norm; later, in training, the
            ranks can't share a batch evenly.
    """
    current().mesh.size(mesh_dim)
    norms = [inner for inner in module.modules() if isinstance(inner, _BatchNorm)]
    if not norms:
        raise ValueError(f"{type(module).__name__} has no batch norm")
    for norm in norms:
        norm.forward = _LocalForward(norm, mesh_dim)  # type: ignore[assignment, method-assign]
    return module


@dataclass(frozen=True)
class _LocalForward:
    """Forward of one batch norm, with separate statistics of each rank's block of samples."""

    norm: _BatchNorm
    mesh_dim: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self._block_count(x)
        if blocks == 1:
            output: torch.Tensor = type(self.norm).forward(self.norm, x)
            return output
        self.norm._check_input_dim(x)
        if x.shape[0] % blocks:
            raise ValueError(
                f"local_batch_norm: a batch of {list(x.shape)} can't be shared evenly by the "
                f"{blocks} ranks of axis {self.mesh_dim!r}; leave the last samples out "
                f"(DataLoader(drop_last=True)), or use the statistics of the whole batch"
            )
        # (N, C, ...) -> (N / blocks, blocks * C, ...): blocks become separate channels
        stacked = x.unflatten(0, (blocks, -1)).transpose(0, 1).flatten(1, 2)
        y = self._normalise(stacked, blocks)
        joined: torch.Tensor = y.unflatten(1, (blocks, -1)).transpose(0, 1).flatten(0, 1)
        return joined

    def _block_count(self, x: torch.Tensor) -> int:
        """Return the number of blocks with statistics of their own."""
        uses_batch = self.norm.training or self.norm.running_mean is None
        if not uses_batch or not is_lazy(x) or self.mesh_dim not in mesh_of(x).names:
            return 1
        return mesh_of(x).size(self.mesh_dim)

    def _normalise(self, stacked: torch.Tensor, blocks: int) -> torch.Tensor:
        """Normalise (N / blocks, blocks * C, ...); update the running statistics by block 0."""
        norm, momentum = self.norm, self._momentum()
        mean, var = (
            _repeated(t if norm.training else None, blocks)
            for t in (norm.running_mean, norm.running_var)
        )
        weight, bias = _repeated(norm.weight, blocks), _repeated(norm.bias, blocks)
        y = F.batch_norm(stacked, mean, var, weight, bias, True, momentum, norm.eps)
        with torch.no_grad():
            for running, new in ((norm.running_mean, mean), (norm.running_var, var)):
                if running is not None and new is not None:
                    running.copy_(new[: norm.num_features])
        return y

    def _momentum(self) -> float:
        """Return the weight of the new batch in the running statistics; count the batch."""
        norm = self.norm
        if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if norm.momentum is None:  # cumulative mean of all batches
                return 1.0 / float(norm.num_batches_tracked)
        return 0.0 if norm.momentum is None else norm.momentum


def _repeated(t: torch.Tensor | None, blocks: int) -> torch.Tensor | None:
    """Repeat a tensor of channels (C,) for each block: (blocks * C,)."""
    return None if t is None else t.repeat(blocks)
