"""One rank of a trainer that knows nothing of lazygt but the last call: FSDP2, torch's own group.

    python trainer.py RANK RANKS DIRECTORY LAYOUT TRANSPORT FAULT

The first rank has the sender and prints its address. Every rank prints what became of each of two
calls, and then waits for a line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lazygt
from tests.transfer.child import SENDERS


class Model(nn.Module):
    """Uneven, empty and tied parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.small = nn.Linear(6, 1)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.down(torch.relu(self.up(self.embed(x)))))
        y: torch.Tensor = self.head(h) + self.small(h)
        return y


def fsdp(model: nn.Module, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hsdp(model: nn.Module, ranks: int) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("r", "s")))


def fsdp_and_tp(model: nn.Module, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "model"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    fully_shard(model, mesh=mesh["data"])


LAYOUTS: dict[str, Callable[[nn.Module, int], None]] = {
    "fsdp": fsdp,
    "hsdp": hsdp,
    "fsdp_and_tp": fsdp_and_tp,
}


def weights() -> Model:
    torch.manual_seed(0)
    return Model()


def main() -> None:
    rank, ranks, place, layout, transport, fault = sys.argv[1:]
    here = int(rank)
    store = dist.FileStore(str(Path(place) / "store"), int(ranks))
    dist.init_process_group("gloo", store=store, rank=here, world_size=int(ranks))
    model = weights()
    LAYOUTS[layout](model, int(ranks))
    if fault == "other model" and here:
        model.extra = nn.Parameter(torch.zeros(2))
    if fault == "sparse" and here:
        model.register_buffer("extra", torch.eye(2).to_sparse())
    sender = SENDERS[transport]() if here == 0 or fault == "two senders" else None
    if here == 0 and sender is not None:
        print(sender.address, flush=True)
        sender.wait_for_receivers(1)
    for version in (1, 2):
        if fault == "killed" and here and version == 2:
            lazygt.transfer.copier.Copier.copy = _killed  # type: ignore[method-assign]
        with torch.no_grad():  # FSDP leaves the outermost weights gathered after it
            model.eval()(torch.zeros(2, 3, dtype=torch.long).flatten())
        try:
            report = lazygt.transfer_weights(model, sender, timeout=30.0)
            print("sent", report.version, sorted(report.written.items()), flush=True)
        except (lazygt.LazyGTError, ValueError, TypeError) as error:
            print("failed", type(error).__name__, error, flush=True)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        sys.stdin.readline()
    if sender is not None:
        sender.close()


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
