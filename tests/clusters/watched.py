"""A program that trains on all workers until a file is there; tests look at it meanwhile.

    watched.py FILE

It says ``client PID`` as soon as it has a model.
"""

import os
import sys

import torch
from torch import nn

import lazygt


def main(ended: str) -> None:
    workers = int(os.environ["WORLD_SIZE"])
    with lazygt.session(mesh={"data": workers}, workers=lazygt.Workers(frozen_after=300.0)):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
        lazygt.data_parallel(model)
        optimizer = torch.optim.Adam(model.parameters())
        rows = lazygt.distribute(torch.ones(16 * workers, 64), {"data": lazygt.Shard(0)})
        print("client", os.getpid(), flush=True)
        while not os.path.exists(ended):
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()


if __name__ == "__main__":
    main(sys.argv[1])
