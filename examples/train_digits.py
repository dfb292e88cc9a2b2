"""Train a digit classifier on 1,797 images of 8 x 8 pixels.

    python examples/train_digits.py                      # an MLP, on one worker process
    python examples/train_digits.py --model cnn
    python examples/train_digits.py --eager              # the same script without lazygt

The training code is plain torch: all that lazygt adds is the `with` line and the device's name.
"""

import argparse
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import digits

TRAIN_IMAGES = 1_500


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def data_sets() -> tuple[TensorDataset, TensorDataset]:
    """Images and labels to train with, and to test with."""
    images, labels = digits.load()
    return (
        TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES]),
        TensorDataset(images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:]),
    )


def train(args: argparse.Namespace, train_set: TensorDataset, device: str) -> nn.Module:
    model = {"mlp": mlp, "cnn": cnn}[args.model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with tqdm(total=steps, unit="step", disable=None) as bar:  # None: only on a terminal
        for epoch in range(1, args.epochs + 1):
            total: Tensor | float = 0.0
            for images, labels in loader:
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total = total + loss.detach()  # stays on the worker: reading it would wait
                bar.update()
            tqdm.write(f"epoch {epoch:2d}  loss {float(total) / len(loader):.6f}")
    return model


@torch.no_grad()
def accuracy(model: nn.Module, test_set: TensorDataset, device: str) -> float:
    images, labels = test_set.tensors
    model.eval()
    right = model(images.to(device)).argmax(dim=1) == labels.to(device)
    return right.float().mean().item()


def describe(stats: Mapping[str, Any]) -> str:
    return (
        f"{stats['ops_recorded']:,} ops recorded, {stats['plans_built']} plans built, "
        f"{stats['plan_hits']:,} replayed, {stats['messages_sent']:,} messages sent, "
        f"{stats['bytes_sent'] / 1e6:.2f} MB sent, {stats['fetches']} fetches"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--launcher", choices=["process", "inline"], default="process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without lazygt, for comparison")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    train_set, test_set = data_sets()
    with contextlib.ExitStack() as stack:
        device, session = "cpu", None
        if not args.eager:
            import lazygt

            session = stack.enter_context(
                lazygt.session(workers=args.workers, launcher=args.launcher)
            )
            device = "lazygt"
        torch.manual_seed(args.seed)
        start = time.perf_counter()
        model = train(args, train_set, device)
        print(f"test accuracy {accuracy(model, test_set, device):.4f}")
        print(f"{time.perf_counter() - start:.2f} s on device {device}")
        if session is not None:
            print(describe(session.stats()))


if __name__ == "__main__":
    main()
