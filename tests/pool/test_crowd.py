"""Eight clients of one pool at once: four honest, one of each kind that could harm them."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest

import lazygt
from lazygt.errors import PoolDraining
from lazygt.pool.pool_client import Pool
from lazygt.runtime.cluster.protocol import Tell
from lazygt.runtime.messages import Run
from lazygt.runtime.wire import encode
from tests.pool.hostile import is_dropped, opened, refused
from tests.pool.serving import SECONDS, served, start_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLIENT = """
import sys, torch, lazygt
on, key, kind = sys.argv[1:]
with lazygt.session(pool=lazygt.PoolAccess(on, key=key),
                    workers=lazygt.Workers(1, threads=1, start_timeout=200)) as session:
    torch.manual_seed(0)
    x = torch.randn(64, 64) / 8
    session.synchronize()
    print("open", flush=True)
    sys.stdin.readline()
    if kind == "greedy":
        kept = []
        try:
            for _ in range(200):
                kept.append(torch.ones(16 << 18))
                kept[-1].sum().item()
        except lazygt.OverQuota as error:
            print("over", flush=True)
        raise SystemExit
    for step in range(200):
        x = (x @ x.T).tanh()
        if kind == "slow":
            torch.ones(1 << 18).cpu()
        else:
            x.sum().item()
    print(x.sum().item(), flush=True)
"""
HONEST = ("alice", "bob", "carol", "dave")


def test_honest_clients_in_crowd_match_solo_results(tmp_path):
    quota = tmp_path / "quota.toml"
    quota.write_text('[client.greedy]\nmemory = "600 MiB"\n')
    options = ["--workers", "8", "--at-once", "4", "--quota", str(quota)]
    with served(tmp_path, *options) as pool:
        kinds = dict.fromkeys(HONEST, "honest") | {
            "greedy": "greedy",
            "slow": "slow",
            "hung": "hung",
        }
        clients = {
            name: start_client(CLIENT, pool.on, pool.key(name), kind, stdin=subprocess.PIPE)
            for name, kind in kinds.items()
        }
        stranger = opened(pool, "eve")
        assert all(client.stdout.readline() == "open\n" for client in clients.values())
        clients["hung"].send_signal(signal.SIGSTOP)
        before = refused(pool, "protocol")
        for client in clients.values():
            client.stdin.write("\n")
            client.stdin.flush()
        for _ in range(2):
            stranger.connection.send(encode(Tell(0, (7,)), encode(Run(1))))
        is_dropped(stranger)
        assert refused(pool, "protocol") == before + 1
        with Pool(pool.on, pool.server) as server:
            server.drain()
        with pytest.raises(PoolDraining):
            lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("late")), workers=1)
        told = {name: clients[name].stdout.readline() for name in (*HONEST, "slow", "greedy")}
        assert told["greedy"] == "over\n"
        assert len({told[name] for name in (*HONEST, "slow")}) == 1
        pids = [pid for name in HONEST for row in pool.sessions(name) for pid in row["pids"]]
        clients["hung"].kill()
        for client in clients.values():
            client.wait(SECONDS)
            client.stdin.close()
            client.stdout.close()
        assert pool.process.wait(SECONDS) == 0
        until = time.monotonic() + SECONDS
        while any(map(psutil.pid_exists, pids)):
            assert time.monotonic() < until
