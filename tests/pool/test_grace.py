"""A pool and its client on two hosts, and a link between them that goes down."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

import lazygt
from lazygt.net.keys import Keyring
from tests.clusters.hosts import hosts_or_skip, missing
from tests.pool.serving import SECONDS

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(240),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]
STEPS = """
import sys, torch, lazygt
def steps(told, heard):
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    for step in range(6):
        x = torch.tanh(x @ x.t() / 64 + step)
        told(f"{x.sum().item().hex()}")
        if step == 2:
            heard()
"""
CLIENT = (
    STEPS
    + """
def heard():
    sys.stdin.readline()
try:
    with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2],
                                               grace=float(sys.argv[3])),
                        workers=lazygt.Workers(1, frozen_after=60.0)):
        steps(lambda line: print(line, flush=True), heard)
except lazygt.LazyGTError as error:
    print(type(error).__name__, flush=True)
"""
)
exec(STEPS)


@pytest.fixture
def hosts():
    with hosts_or_skip(2) as hosts:
        yield hosts


class PoolOnAHost:
    """A pool on host 0."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        Keyring(folder / "keys").new("alice").write(folder / "alice.key")
        words = ["serve", "--workers", "1", "--keys", str(folder / "keys"), "--device", "cpu"]
        self.process = hosts.start(
            0, [sys.executable, "-m", "lazygt.cli", *words, "--bind",
                f"tcp://{hosts.addresses[0]}:7000"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "LAZYGT_CACHE_DIR": str(folder)},
        )  # fmt: skip
        self.on = re.search(r"tcp://[\d.:]+", self.process.stdout.readline())[0]

    def client(self, grace):
        return self.hosts.start(
            1, [sys.executable, "-c", CLIENT, self.on, str(self.folder / "alice.key"), str(grace)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def states(self):
        keys = str(self.folder / "keys")
        words = [sys.executable, "-m", "lazygt.cli", "pool", "status", self.on, "--keys", keys]
        done = self.hosts.run(0, [*words, "--json"])
        assert done.returncode == 0, done.stderr
        return [row["state"] for row in json.loads(done.stdout)["sessions"]]

    def until(self, states):
        until = time.monotonic() + SECONDS
        while (now := self.states()) != states:
            assert time.monotonic() < until, now

    def close(self):
        self.process.terminate()
        self.process.wait(SECONDS)
        self.process.stdout.close()


@pytest.fixture
def pool(hosts, tmp_path):
    pool = PoolOnAHost(hosts, tmp_path)
    yield pool
    pool.close()


def at_home():
    told = []
    with lazygt.session(workers=1):
        steps(told.append, lambda: None)  # noqa: F821 - see STEPS
    return told


def end(client):
    rest = client.stdout.read().split()
    assert client.wait(SECONDS) == 0
    client.stdin.close()
    client.stdout.close()
    return rest


def test_a_session_outlives_a_link_that_is_down_for_less_than_its_grace(hosts, pool):
    client = pool.client(grace=60.0)
    told = [client.stdout.readline().strip() for _ in range(3)]
    hosts.cut(1)
    pool.until(["alone"])
    client.stdin.write("\n")
    client.stdin.flush()
    hosts.mend(1)
    told += end(client)
    assert told == at_home()
    pool.until([])


def test_after_its_grace_a_session_ends_and_its_client_is_told(hosts, pool):
    client = pool.client(grace=1.0)
    for _ in range(3):
        client.stdout.readline()
    hosts.cut(1)
    pool.until([])
    hosts.mend(1)
    client.stdin.write("\n")
    client.stdin.flush()
    (error,) = end(client)
    assert error in {"SessionEnded", "WorkerDied", "ConnectionLost"}
