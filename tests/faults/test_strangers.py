"""Other users of the machine knock at all that a session listens on, while it trains and transfers.

stranger (another user) --> every listening TCP port and UNIX socket of client and workers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * SECONDS),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

PROGRAM = """
import hashlib, sys, torch, lazygt
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from lazygt.transfer import BroadcastTransferReceiver, BroadcastTransferSender

STEPS = 12
torch.set_num_threads(1)
seen = hashlib.sha256()

def saw(t):
    seen.update(t.detach().cpu().numpy().tobytes())

def train(s, sender):
    # gradients of 2 MiB each: by sockets and in shared memory
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 512), torch.nn.Linear(512, 1024), torch.nn.Tanh(),
        torch.nn.Linear(1024, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        # no row 99: ranks part, and form a new group
        ids = [step % 8, 1, 2, 99 if step % 10 == 5 else 3]
        x, y = (lazygt.distribute(torch.tensor(n), [Shard(0)]) for n in (ids, [0, 1, 2, 3]))
        loss = F.cross_entropy(model(x), y)
        try:
            saw(loss)
        except lazygt.ExecutionError:
            continue
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step % 8 == 0:
            lazygt.transfer_weights(model, sender)
    for value in model.state_dict().values():
        saw(value)

with (
    lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1), compile="off") as s,
    BroadcastTransferSender() as sender,
    BroadcastTransferReceiver(sender.address) as receiver,
):
    torch.manual_seed(0)
    sender.wait_for_receivers(1, 20.0)
    s.synchronize()
    print("open", flush=True)
    sys.stdin.readline()
    train(s, sender)
    with receiver.reading() as (_, weights):
        for value in weights.values():
            saw(value)
    print(seen.hexdigest(), flush=True)
    sys.stdin.readline()
"""

Start = Callable[..., "Talking"]


class Talking:
    """A program that is talked to line by line."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def end(self) -> str:
        """Close its input; the rest of what it says."""
        said, errors = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 0, errors
        return said


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(*arguments: str, **environment: str) -> Talking:
            made = Talking(*arguments, **environment)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made

        yield begin


def bits(client: Talking) -> str:
    """A digest of all that the program computed."""
    client.go_on()
    return client.line()


def attacked(start: Start, **environment: str) -> tuple[str, dict[str, Any]]:
    """The same while strangers knock, and what these say."""
    client = start("-c", PROGRAM, **environment)
    assert client.line() == "open"
    stranger = start(str(Path(__file__).with_name("stranger.py")), str(client.process.pid))
    assert stranger.line() == "1"  # it has knocked at everything once
    digest = bits(client)
    report = json.loads(stranger.end().splitlines()[-1])
    client.end()
    return digest, report


@pytest.fixture(scope="module")
def calm() -> str:
    """The digest when nobody disturbs."""
    client = Talking("-c", PROGRAM)
    try:
        assert client.line() == "open"
        digest = bits(client)
        client.end()
        return digest
    finally:
        client.process.kill()
        client.process.wait()


def test_strangers_reach_nothing_and_disturb_nothing(start: Start, calm: str) -> None:
    digest, report = attacked(start)
    assert report["user"] != os.geteuid()
    assert report["cycles"] > 3
    assert len(report["tried"]) >= 7, "data, control, rendezvous of each worker, and the transfer's"
    assert not [name for name in report["tried"] if name.startswith("tcp")]
    assert report["accepted"] == {}
    assert digest == calm


def test_strangers_at_a_port_that_wants_a_key_disturb_nothing(start: Start, calm: str) -> None:
    """A TCP transport was asked for: anybody can connect, and nobody gets further."""
    digest, report = attacked(start, LAZYGT_TRANSPORT="tcp://127.0.0.1")
    ports = [name for name in report["accepted"] if name.startswith("tcp")]
    assert len(ports) == len(report["accepted"]) == 4, "data and control of each worker"
    assert digest == calm
