"""A model that is trained in mixed precision, by lazygt and by torch's own FSDP2.

    python -m tests.parallel.mixed RANK RANKS DIRECTORY POLICY MICROBATCHES

is one rank of FSDP2; the first writes the trained weights to ``DIRECTORY/weights``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 3
HALF, FULL = torch.bfloat16, torch.float32
POLICIES = {
    "param": MixedPrecisionPolicy(param_dtype=HALF),
    "param, reduce wide": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL),
    "reduce narrow": MixedPrecisionPolicy(reduce_dtype=HALF),
    "output": MixedPrecisionPolicy(param_dtype=HALF, output_dtype=FULL),
}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.to(self.norm.weight.dtype)))))


class Network(nn.Module):
    """Blocks between two layers, of which one is applied to what has no gradient."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, dim), nn.Linear(dim, 4)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.last(x.to(self.last.weight.dtype))
        return y


def trained(
    lay: Callable[[nn.Module], object],
    mine: Callable[[torch.Tensor], torch.Tensor],
    microbatches: int,
) -> nn.Module:
    """The model after some steps of gradient descent.

    Args:
        lay: shards each block, then the model.
        mine: what a rank has of a batch.
    """
    torch.manual_seed(0)
    model, x, y = Network(), torch.randn(16, 8), torch.randn(16, 4)
    for module in (*model.blocks, model):
        lay(module)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(STEPS):
        opt.zero_grad()
        for inputs, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = (model(mine(inputs)).float() - mine(targets)).square().mean()
            (loss / microbatches).backward()
        opt.step()
    return model


def main() -> None:
    here, count, place, policy, microbatches = sys.argv[1:]
    rank, ranks = int(here), int(count)
    store = dist.FileStore(str(Path(place) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = trained(
        lambda module: fully_shard(module, mesh=mesh, mp_policy=POLICIES[policy]),
        lambda batch: batch.chunk(ranks)[rank],
        int(microbatches),
    )
    weights = {name: t.full_tensor() for name, t in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, Path(place) / "weights")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
