"""Sessions on Ray: several nodes on one machine, gangs, and a node that is removed."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.errors import LaunchError
from lazygt.runtime.cluster.ray import AGENT, RayHosts
from lazygt.settings import grouped
from tests.clusters.commands import commands

ray = pytest.importorskip("ray", reason="needs Ray: pip install lazygt[ray]")

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(200),
    # Ray's own
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROOT = Path(__file__).parents[2]
STEPS = 30
_STORE_BYTES = 80_000_000


class Nodes:
    """A cluster on this machine: a head without processors, and nodes that can be removed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[Any] = []
        ray.init(
            address=self._cluster.address,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
        )

    def add(self, processors: int) -> None:
        node = self._cluster.add_node(num_cpus=processors, object_store_memory=_STORE_BYTES)
        self._nodes.append(node)

    def remove(self, which: int) -> None:
        """As if its machine were gone."""
        self._cluster.remove_node(self._nodes.pop(which), allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()


def agents() -> list[psutil.Process]:
    """The processes of agents on this machine."""
    there = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if AGENT in process.cmdline():
                there.append(process)
    return there


def all_gone(processes: list[psutil.Process] | None = None) -> bool:
    """Whether processes, or all agents, end; those of a killed actor need a moment."""
    _, alive = psutil.wait_procs(agents() if processes is None else processes, timeout=60)
    return not alive


def one_ends(processes: list[psutil.Process]) -> bool:
    """Whether one of them ends: the processes of a removed node notice that by themselves."""
    until = time.monotonic() + 100
    while all(process.is_running() for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def trained(between: Callable[[lazygt.Session, int], None], **settings: Any) -> list[torch.Tensor]:
    """The weights after some steps, and the losses."""
    torch.manual_seed(0)
    with lazygt.session(**grouped({"threads": 1, **settings})) as session:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        lazygt.data_parallel(model, "workers")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            x = lazygt.distribute(torch.randn(8, 16), {"workers": Shard(0)})
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
            between(session, step)
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return [*weights, *losses]


def nothing(session: lazygt.Session, step: int) -> None:
    """Between two steps."""


def test_a_session_on_two_nodes_has_the_bits_of_one_here(nodes: Nodes) -> None:
    nodes.add(1)
    nodes.add(1)
    pids: set[int] = set()

    def look(session: lazygt.Session, step: int) -> None:
        if step == 0:
            assert len(agents()) == 2
            for agent in agents():
                workers = {child.pid for child in agent.children()}
                pids.update(workers & set(session.worker_pids))

    there = trained(look, launcher="ray", workers=2)
    assert len(pids) == 2
    assert all_gone()
    assert all_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    here = trained(nothing, workers=2)
    assert all(map(torch.equal, there, here))


def test_a_removed_node_is_recovery(nodes: Nodes) -> None:
    nodes.add(1)
    nodes.add(1)
    recovered: list[Any] = []

    def remove(session: lazygt.Session, step: int) -> None:
        if step == STEPS // 2:
            there = agents()
            nodes.add(1)
            nodes.remove(1)
            assert one_ends(there)
        recovered[:] = session.recoveries

    there = trained(remove, launcher="ray", workers=2)
    (lost,) = (recovery.ranks for recovery in recovered)
    assert len(lost) == 1  # which rank was there is Ray's choice
    assert f"its host {os.uname().nodename} is lost" in recovered[0].why
    here = trained(nothing, workers=2)
    assert all(map(torch.equal, there, here))
    assert all_gone()


def test_unplaceable_ray_gang_names_missing_cpus(nodes: Nodes) -> None:
    nodes.add(2)
    with pytest.raises(LaunchError) as caught:
        lazygt.session(launcher="ray", workers=lazygt.Workers(4, start_timeout=3)).__enter__()
    text = str(caught.value)
    assert "has not placed 4 workers within 3 s" in text
    assert "asked for 4 CPU, free in the whole cluster: 2 CPU" in text
    assert f"{os.uname().nodename}: 2 CPU" in text
    assert ray.util.placement_group_table() == {} or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )
    assert all_gone()


def test_room_comes_while_a_gang_waits(nodes: Nodes) -> None:
    nodes.add(1)
    launcher = RayHosts(2)
    group = ray.util.placement_group([{"CPU": 1.0}] * 2, strategy="PACK")
    assert not group.wait(0.5)
    ray.util.remove_placement_group(group)
    nodes.add(1)
    hosts = launcher.start(100)
    assert [workers for _, workers in hosts] == [1, 1]
    launcher.close()
    launcher.close()
    assert all_gone()


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(LaunchError, match="RAY_ADDRESS leads to no cluster of Ray"):
        RayHosts(2).start(5)


def test_the_example_prints_the_losses_of_one_machine(nodes: Nodes) -> None:
    """By the command of docs/clusters.md."""
    nodes.add(2)
    install, command = commands("Ray").splitlines()
    assert install == "pip install 'lazygt[ray]'"
    assert "ray = [" in (ROOT / "pyproject.toml").read_text()
    environment = {
        **os.environ,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LAZYGT_COMPILE": "off",
    }
    shown = []
    for given in (command, "python examples/clusters/train.py --workers 2"):
        done = subprocess.run(
            shlex.split(given),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        shown.append([line for line in done.stdout.splitlines() if line.startswith("step")])
    assert len(shown[0]) == 3
    assert shown[0] == shown[1]
