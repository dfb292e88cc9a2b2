"""Train on the nodes of a Ray cluster; the training is that of examples/clusters/train.py.

    pip install 'lazygt[ray]'
    python examples/ray_train.py --workers 2     # on the cluster of RAY_ADDRESS, or on this machine

Ray finds room for all workers at once, or it is an error that says what is missing. A node that
goes away is a longer wait: its workers begin again on another one, with the numbers that they had.
"""

import argparse
import runpy
from pathlib import Path

import lazygt

TRAIN = str(Path(__file__).parent / "clusters" / "train.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--patience", type=float, default=60, help="seconds until Ray has room")
    args = parser.parse_args()
    train = runpy.run_path(TRAIN)["train"]
    with lazygt.session(
        launcher="ray", workers=lazygt.Workers(args.workers, start_timeout=args.patience, threads=1)
    ) as session:
        losses = train(args.steps, session)
        for recovery in session.recoveries:
            print(recovery)
    for step in range(9, args.steps, 10):
        print(f"step {step + 1:3d}  loss {losses[step]:.6f}")


if __name__ == "__main__":
    main()
