"""What is left of a session whose client has gone and left it running."""

from __future__ import annotations

import json

import psutil
import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.errors import OverQuota, PoolError
from lazygt.pool.pool_client import Pool
from tests.pool.serving import SECONDS, served, start_client

pytestmark = pytest.mark.timeout(240)

DIES = """
import sys, torch, lazygt
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2], detach=True),
                    workers=1) as s:
    x = torch.arange(float(10 << 20))
    s.publish("large", {"a": x * 2, "b": x[:7] + 1})
    print(*s.worker_pids, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    quota = folder / "quota.toml"
    quota.write_text('[client.small]\nsessions = 1\nmemory = "700 MiB"\n')
    with served(folder, "--workers", "2", "--quota", str(quota)) as pool:
        yield pool


def status(pool, name):
    words = ["pool", "status", pool.on, "--json", "--key", str(pool.key(name))]
    return json.loads(CliRunner().invoke(app, words).stdout)


def test_restarted_client_finds_published_values_and_evicts_old_session(pool):
    client = start_client(DIES, pool.on, pool.key("small"))
    (pid,) = map(int, client.stdout.readline().split())
    client.kill()
    client.wait(SECONDS)
    client.stdout.close()
    pool.until(lambda told: [row["state"] for row in told["sessions"]] == ["alone"])
    assert psutil.pid_exists(pid)
    # it is there for its own key, and for nobody else's
    (row,) = status(pool, "small")["sessions"]
    assert (row["client"], row["pids"]) == ("small", [pid])
    assert status(pool, "other")["sessions"] == []
    # it counts for the quota: its slot, and its memory with what it has published
    with pytest.raises(OverQuota, match="quota of 1 sessions"):
        lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("small")), workers=1)
    nbytes = (40 << 20) + 28
    with Pool(pool.on, pool.key("small"), SECONDS) as small:
        with pytest.raises(OverQuota) as refused:
            small.publish("more", torch.empty(650 << 20, dtype=torch.uint8))
        assert refused.value.used > nbytes
        told = small.fetch("large")
        x = torch.arange(float(10 << 20))
        assert torch.equal(told["a"], x * 2)
        assert torch.equal(told["b"], x[:7] + 1)
        with Pool(pool.on, pool.key("other"), SECONDS) as other:
            with pytest.raises(PoolError, match="nothing is published"):
                other.fetch("large")
            with pytest.raises(PoolError, match="may not administer"):
                other.evict(row["session"])
        small.evict(row["session"])
        pool.until(lambda told: told["free"] == 2)
        assert not psutil.pid_exists(pid)
        assert torch.equal(small.fetch("large")["b"], x[:7] + 1)
        small.forget("large")


def test_detached_session_ends_at_expiry(tmp_path):
    with served(tmp_path, "--workers", "1", "--expiry", "0.5") as pool:
        with lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=pool.key("alice"), detach=True), workers=1
        ) as session:
            assert torch.ones(3).sum().item() == 3.0
            (pid,) = session.worker_pids
        pool.until(lambda told: told["free"] == 1)
        assert not psutil.pid_exists(pid)
