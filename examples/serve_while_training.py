"""Train on images of digits while another process keeps answering with the newest weights.

    python examples/serve_while_training.py
    python examples/serve_while_training.py --steps 400 --push-every 20

The trainer is a lazygt session. Every few steps it pushes its weights to the server through shared
memory. The server classifies test images without a break: each answer is wholly of one version,
and a push costs it the time of one assignment.
"""

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

import digits
import lazygt
from lazygt.transfer import (
    Sender,
    SharedMemoryTransferReceiver,
    SharedMemoryTransferSender,
)

TRAIN_IMAGES = 1_500


def classifier() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# -- the server ----------------------------------------------------------------------------


@dataclass
class Served:
    """What the server did with one version."""

    version: int
    answers: int = 0
    right: int = 0
    slowest: float = 0.0  # seconds


def serve(address: str, results: Connection) -> None:
    """Answer until the trainer says stop, and tell what was done with each version."""
    images, labels = (part[TRAIN_IMAGES:] for part in digits.load())
    model = classifier()
    served: list[Served] = []
    with SharedMemoryTransferReceiver(address, name="server") as receiver, torch.no_grad():
        receiver.wait_for_version(1)
        number = 0
        while not results.poll():
            image, label = images[number % len(images)], labels[number % len(labels)]
            start = time.perf_counter()
            with receiver.reading() as (version, params):
                answer = torch.func.functional_call(model, dict(params), image).argmax()
            took = time.perf_counter() - start
            if not served or served[-1].version != version:
                served.append(Served(version))
            served[-1].answers += 1
            served[-1].right += int(answer == label)
            served[-1].slowest = max(served[-1].slowest, took)
            number += 1
        results.recv()
    results.send(served)


# -- the trainer ---------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(1) == labels).float().mean().item()


def train(args: argparse.Namespace, sender: Sender) -> None:
    images, labels = (part.to("lazygt") for part in digits.load())
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    print("version  step  test accuracy  transfer ms  pause us")
    for step in trange(args.steps + 1, unit="step", disable=None):
        if step % args.push_every == 0:
            report = lazygt.transfer_weights(model, sender, timeout=10.0, progress=False)
            score = accuracy(model, images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])
            print(
                f"{report.version:7d}  {step:4d}  {score:13.3f}  {report.seconds * 1e3:11.2f}  "
                f"{report.pauses['server'] * 1e6:8.0f}"
            )
        rows = torch.randint(0, TRAIN_IMAGES, (args.batch_size,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def show(served: list[Served]) -> None:
    print("\nversion  answers  right  slowest answer ms   (by the server, meanwhile)")
    for one in served:
        right = one.right / one.answers
        print(f"{one.version:7d}  {one.answers:7d}  {right:5.3f}  {one.slowest * 1e3:17.2f}")
    print(f"{sum(one.answers for one in served):,} answers, none without weights")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--push-every", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    with SharedMemoryTransferSender() as sender:
        server = processes.Process(target=serve, args=(sender.address, theirs), daemon=True)
        server.start()
        sender.wait_for_receivers(1)
        torch.manual_seed(args.seed)
        with lazygt.session():
            train(args, sender)
        ours.send("stop")
        show(ours.recv())
        server.join()


if __name__ == "__main__":
    main()
