"""Train a small network, its batches cut over all workers, on one machine or on several.

    python examples/clusters/train.py --workers 2       # two worker processes on this machine
    torchrun --nproc-per-node 2 examples/clusters/train.py
    sbatch examples/clusters/train.sbatch               # see docs/clusters.md for the others

Nothing here says where the workers are: an engine that starts this program once for each worker
has said it. The losses are the same wherever they are.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt


def train(steps: int, session: lazygt.Session) -> list[float]:
    """The losses of all steps."""
    (axis,) = session.mesh.names
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    lazygt.data_parallel(model, axis)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x = lazygt.distribute(torch.randn(32, 64), {axis: Shard(0)})
        loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, help="left out: one for each process of the job")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with lazygt.session(workers=lazygt.Workers(args.workers, threads=1)) as session:
        losses = train(args.steps, session)
        print(f"{session.mesh.sizes[0]} workers")
    for step in range(9, args.steps, 10):
        print(f"step {step + 1:3d}  loss {losses[step]:.6f}")


if __name__ == "__main__":
    main()
