"""Train while the workers are killed at random, beside a run that nobody disturbs.

    python examples/survive.py                  # one worker, killed every 30 steps or so
    python examples/survive.py --workers 2      # weights and optimizer in blocks on two workers

Both runs draw the same numbers, so each line shows one loss twice, and the weights at the end are
equal in every bit.
"""

import argparse
import hashlib
import os
import random
import signal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt


def checksum(model: nn.Module) -> str:
    """The beginning of SHA-256 of all weights."""
    told = hashlib.sha256()
    for parameter in model.parameters():
        told.update(parameter.detach().cpu().numpy().tobytes())
    return told.hexdigest()[:16]


def train(args: argparse.Namespace, kills: frozenset[int]) -> tuple[list[float], str, list[str]]:
    """Losses of every tenth step, the weights' checksum, and what was recovered from.

    Args:
        kills: steps in which a worker is killed.
    """
    torch.manual_seed(0)
    chance = random.Random(args.seed)
    with lazygt.session(mesh={"data": args.workers}, workers=lazygt.Workers(threads=1)) as session:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
        lazygt.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(args.steps):
            x = lazygt.distribute(torch.randn(32, 64), {"data": Shard(0)})
            y = x[:, :10].argmax(1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if step in kills:
                os.kill(chance.choice(session.worker_pids), signal.SIGKILL)
            optimizer.step()
            if step % 10 == 9:
                losses.append(loss.item())
        weights = checksum(model)
        return losses, weights, [str(each) for each in session.recoveries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kills = frozenset(random.Random(args.seed).sample(range(args.steps), args.kills))
    calm, calm_weights, _ = train(args, frozenset())
    losses, weights, recoveries = train(args, kills)
    for at, (undisturbed, disturbed) in enumerate(zip(calm, losses, strict=True)):
        print(f"step {at * 10 + 10:3d}  undisturbed {undisturbed:.6f}  killed {disturbed:.6f}")
    for recovery in recoveries:
        print(recovery)
    print(f"weights {calm_weights} and {weights}")


if __name__ == "__main__":
    main()
