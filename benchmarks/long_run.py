"""Memory of the client and of the worker over thousands of training steps: it must stay flat.

Each step uploads a new batch, and a schedule changes the learning rate, so that anything kept
per step (a plan, a scalar, a freed handle) would show.
"""

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import lazygt
from benchmarks.harness import Report, parser, pin, resident_mb

CHECKPOINTS = 10


class Training:
    """A small MLP on new random batches, AdamW under a cosine schedule."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.random = torch.Generator().manual_seed(0)

    def step(self) -> Tensor:
        images = torch.rand(32, 64, generator=self.random, device="cpu")
        labels = torch.randint(10, (32,), generator=self.random, device="cpu")
        loss = F.cross_entropy(self.model(images.to("lazygt")), labels.to("lazygt"))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def measure(args: argparse.Namespace) -> Report:
    columns = ["after steps", "client MB", "worker MB", "plans built", "descriptors open"]
    report = Report("long_run", f"Resident memory over {args.steps:,} training steps", columns)
    part = max(args.steps // CHECKPOINTS, 1)
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        training = Training(args.steps)
        for _ in range(20):
            training.step().item()
        if args.pin:
            pin(s.worker_pids)
        pids = (os.getpid(), s.worker_pids[0])
        readings = []
        for done in tqdm(range(1, args.steps + 1), disable=None):
            loss = training.step()
            if done % part == 0:
                loss.item()
                readings.append([resident_mb(pid) for pid in pids])
                built, files = s.stats()["plans_built"], len(os.listdir("/proc/self/fd"))
                client, worker = readings[-1]
                report.add(f"{done:,}", f"{client:.1f}", f"{worker:.1f}", str(built), str(files))
    growth = [readings[-1][side] - readings[len(readings) // 5][side] for side in (0, 1)]
    report.remarks.append(
        f"growth over the last four fifths: client {growth[0]:+.1f} MB, worker {growth[1]:+.1f} MB"
    )
    if max(growth) > args.allowed:
        report.remarks.append(f"NOT FLAT: more than {args.allowed} MB")
    return report


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--steps", type=int, default=10_000)
    options.add_argument("--allowed", type=float, default=8.0, help="growth in MB that passes")
    args = options.parse_args()
    torch.set_num_threads(1)
    report = measure(args)
    report.finish(save=args.save)
    if any(remark.startswith("NOT FLAT") for remark in report.remarks):
        sys.exit(1)


if __name__ == "__main__":
    main()
