"""Sessions whose workers are on other hosts, behind agents: the bits, the bytes, and deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import lazygt
from lazygt.config import Config
from lazygt.errors import ExecutionError, LazyGTError, WorkerDied
from lazygt.graph.mesh import Mesh
from lazygt.runtime.cluster.link import ClusterLink
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.launch import opening
from lazygt.runtime.launch.link import Link
from tests.runtime.cluster.wires import AgentThread, End, wire

pytestmark = pytest.mark.timeout(180)

STEPS = 40


class Hosts:
    """Agents in threads, of which each has a connection of its own."""

    def __init__(self) -> None:
        self.agents: list[AgentThread] = []
        self.ends: list[End] = []

    def open(self, workers: list[int]) -> Callable[[Config, Mesh, str], Link]:
        """A launcher for so many workers on each host; the first is the client's own."""

        def launch(config: Config, mesh: Mesh, copier: str) -> Link:
            remote = []
            for number, count in enumerate(workers[1:], 1):
                here, there = wire()
                self.agents.append(AgentThread(there))
                self.ends.append(here)
                remote.append((RemoteHost(f"host{number}", here), count))
            return ClusterLink(opening.link_spec(config, mesh, copier), workers[0], remote)

        return launch

    def lose(self, which: int) -> None:
        """A host is gone, with all that runs there."""
        for pid in self.agents[which].pids:
            os.kill(pid, signal.SIGKILL)
        self.ends[which].cut("its network is gone")

    def close(self) -> None:
        for agent, end in zip(self.agents, self.ends, strict=True):
            end.cut("the test is over")
            agent.join(60)
            assert not agent.is_alive()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def on(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Callable[..., lazygt.Session]:
    """Opens a session on so many workers a host."""

    def opened(*workers: int, **settings: object) -> lazygt.Session:
        monkeypatch.setitem(opening.LAUNCHERS, "agents", hosts.open(list(workers)))
        return lazygt.session(launcher="agents", workers=sum(workers), **settings)

    return opened


def train(session: lazygt.Session, at: int = -1, act: Callable[[], object] | None = None) -> bytes:
    """Steps of Adam; all bits of what they made. ``act`` is done before step ``at``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(16, 32, device="cpu").to("lazygt")
    large = torch.arange(1 << 18, dtype=torch.float32, device="cpu").to("lazygt")
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            session._client.snap(lambda snapshot: None)
            session._client.wait_snapped()
        if step == at and act is not None:
            act()
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values = [torch.tensor(losses, device="cpu"), (large * 2).cpu()]
    values += [parameter.detach().cpu() for parameter in model.parameters()]
    return b"".join(value.numpy().tobytes() for value in values)


@pytest.fixture(scope="module")
def expected() -> bytes:
    with lazygt.session() as session:
        return train(session)


def test_the_bits_are_those_of_a_local_worker(
    on: Callable[..., lazygt.Session], expected: bytes
) -> None:
    with on(0, 1) as session:
        assert train(session) == expected
        assert session.recoveries == []


def test_a_worker_that_is_killed_there_is_replaced(
    on: Callable[..., lazygt.Session], hosts: Hosts, expected: bytes
) -> None:
    with on(0, 1) as session:

        def kill() -> None:
            os.kill(session.worker_pids[0], signal.SIGKILL)

        assert train(session, STEPS - 5, kill) == expected
        (record,) = session.recoveries
        assert "on host host1" in record.why


def test_a_lost_host_is_recovery_on_another(
    on: Callable[..., lazygt.Session], hosts: Hosts, expected: bytes
) -> None:
    """Its snapshots are not lost: the client has copies."""
    with on(0, 1, 0) as session:
        assert train(session, STEPS - 5, lambda: hosts.lose(0)) == expected
        (record,) = session.recoveries
        assert "host1 is lost (its network is gone)" in record.why
        assert record.runs < 2 * STEPS  # from the snapshot on, not from the beginning


def test_without_another_host_a_lost_one_is_the_end(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    with pytest.raises(WorkerDied, match="host1 is lost"), on(0, 1) as session:
        train(session, 3, lambda: hosts.lose(0))


def test_an_upload_crosses_the_wire_once_a_host(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    source = torch.randn(1 << 20, device="cpu")
    with on(0, 1):
        before = hosts.ends[0].bytes_sent
        value = source.to("lazygt")
        assert value.sum().item() == pytest.approx(source.sum().item(), rel=1e-4)
        sent = hosts.ends[0].bytes_sent - before
        assert source.nbytes <= sent < 1.1 * source.nbytes


def test_an_error_there_names_the_users_line(on: Callable[..., lazygt.Session]) -> None:
    with on(0, 1):
        x = torch.randn(4, 4)
        with pytest.raises(ExecutionError, match=r"test_agent\.py"):
            torch.linalg.cholesky(-torch.eye(4) + 0 * x).sum().item()
        assert (x * 0 + 1).sum().item() == 16  # the session goes on


def test_what_an_agent_can_not_start_is_an_error(
    on: Callable[..., lazygt.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LazyGTError, match="host1"), on(0, 1, transport="tcp://256.0.0.1"):
        torch.ones(2).sum().item()


def test_nothing_is_left_running(on: Callable[..., lazygt.Session], hosts: Hosts) -> None:
    with on(0, 1) as session:
        assert torch.ones(3).sum().item() == 3
        (pid,) = session.worker_pids
        assert pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
