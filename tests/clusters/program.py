"""A program that knows nothing of clusters; tests start it on several hosts and read what it says.

    program.py STEPS MEGABYTES

It says ``step N`` after each step, waits for nobody, and at last prints a line of JSON.
"""

import hashlib
import json
import sys

import torch
from torch import nn

import lazygt


def main(steps: int, megabytes: int) -> None:
    with lazygt.session(recovery=lazygt.Recovery(snapshot_cost=0.5)) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.randn(16, 32)
        large = torch.arange(megabytes << 18, dtype=torch.float32, device="cpu").to("lazygt")
        summed = large.sum(dtype=torch.float64).item()
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            last = loss.item()
            print("step", step, flush=True)
        values = [parameter.detach().cpu() for parameter in model.parameters()]
        bits = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values))
        told = {
            "workers": session._link.world_size,
            "launcher": session.config.launcher,
            "bits": bits.hexdigest(),
            "loss": last,
            "sum": summed,
            "pids": session.worker_pids,
            "compiled": sum(made.tier == "compiled" for made in session.compiles()),
            "recoveries": [str(record) for record in session.recoveries],
        }
    if not told["recoveries"]:  # else a host is missing
        with lazygt.session():
            told["again"] = torch.ones(3).sum().item()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
