"""Sessions whose workers are on other hosts, behind agents: the bits, the bytes, and deaths."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

import lazygt
from lazygt.config import Config
from lazygt.errors import ExecutionError, LazyGTError
from lazygt.graph.mesh import Mesh
from lazygt.machine import collective_seconds
from lazygt.runtime.launch.worker_pool import WorkerPool
from tests.runtime.cluster.agents import STEPS, Hosts, train, wait_for

pytestmark = pytest.mark.timeout(180)


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


def test_worker_answers_are_sent_by_polling_thread(
    on: Callable[..., lazygt.Session], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is woken for it: neither an agent's thread nor a pool's."""
    with on(0, 1):
        x = torch.ones(4, device="lazygt")
        assert x.sum().item() == 4.0
        there = hosts.agents[0].agent._connection
        threads, send = [], there.send

        def noted(frames: list[bytes]) -> None:
            threads.append(threading.current_thread().name)
            send(frames)

        monkeypatch.setattr(there, "send", noted)
        assert [(x * n).sum().item() for n in range(3)] == [0.0, 4.0, 8.0]
        assert len(threads) >= 3
        assert {name.rpartition("-")[0] for name in threads} == {"lazygt-part"}


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


def test_clients_host_takes_over_ranks_of_lost_host(
    on: Callable[..., lazygt.Session], hosts: Hosts, expected: bytes
) -> None:
    with on(0, 1) as session:
        assert train(session, STEPS - 5, lambda: hosts.lose(0)) == expected
        assert len(session.recoveries) == 1
        large = torch.ones(1 << 20, device="cpu").to("lazygt")  # uploads find their way there, too
        assert large.sum().item() == 1 << 20


def test_an_agent_that_ends_its_workers_unasked_is_a_lost_host(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    """As it does at Ctrl-C: it still says that they have ended. No answer is asked of them here."""
    with on(1, 1) as session:
        value = torch.ones(3)
        assert value.sum().item() == 3
        (part,) = hosts.agents[0].agent.parts.values()
        part.end()
        part.join()
        hosts.agents[0].end.close("it was interrupted")
        for step in range(3):
            assert value.add_(1).sum().item() == 6 + 3 * step
        (record,) = session.recoveries
    assert record.ranks == (1,)


def test_workers_of_a_client_that_is_gone_are_not_waited_for(
    on: Callable[..., lazygt.Session], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    end = WorkerPool.end

    def noted(pool: WorkerPool, orderly: set[int], stuck: set[int]) -> None:
        asked.append((set(orderly), set(stuck)))
        end(pool, orderly, stuck)

    with on(0, 2) as session:
        assert torch.ones(3).sum().item() == 3
        monkeypatch.setattr(WorkerPool, "end", noted)
        hosts.agents[0].end.close("the client is gone")
        hosts.agents[0].join(60)
        assert asked[0] == (set(), {0, 1})
        session.close()


def test_an_upload_crosses_the_wire_once_a_host(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    source = torch.randn(1 << 20, device="cpu")
    with on(0, 1):
        before = hosts.agents[0].end.bytes_sent
        value = source.to("lazygt")
        assert value.sum().item() == pytest.approx(source.sum().item(), rel=1e-4)
        sent = hosts.agents[0].end.bytes_sent - before
        assert source.nbytes <= sent < 1.1 * source.nbytes


def test_an_error_there_names_the_users_line(on: Callable[..., lazygt.Session]) -> None:
    with on(0, 1):
        x = torch.randn(4, 4)
        with pytest.raises(ExecutionError, match=r"test_agent\.py"):
            torch.linalg.cholesky(-torch.eye(4) + 0 * x).sum().item()
        assert (x * 0 + 1).sum().item() == 16  # the session goes on


def test_failed_start_by_agent_is_error(
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


def test_explain_uses_costs_between_hosts(on: Callable[..., lazygt.Session]) -> None:
    """Plans are those of one host, so the bits are, too; what they cost is not."""
    with on(1, 1) as session, lazygt.session(workers=2) as local:
        assert session.machine == local.machine
        assert session.costs.shares == {"workers": 0.5}
        assert local.costs == local.machine
        near, far = (
            collective_seconds(costs.along("workers"), "all_reduce", 1 << 20, 2)
            for costs in (local.costs, session.costs)
        )
        assert far > 2 * near


def test_oversized_message_is_error_and_loses_nothing(
    on: Callable[..., lazygt.Session],
) -> None:
    with on(0, 1, max_message_bytes=1 << 20):
        x = torch.ones(1 << 20)  # 4 MiB
        assert x.sum().item() == 1 << 20
        with pytest.raises(ExecutionError, match=r"4,194,304 bytes .*max_message_bytes"):
            (x + 1).cpu()
        assert (x + 1)[:1000].cpu().sum() == 2000
        large = torch.full((1 << 20,), 3.0, device="cpu").to("lazygt")  # goes in pieces
        assert large.sum().item() == 3 << 20


def test_workers_of_a_link_that_is_forgotten_are_ended(hosts: Hosts) -> None:
    """The agent, which other sessions may have, goes on."""
    config = Config.load(workers=1)
    link = hosts.open([0, 1])(config, Mesh.of({"workers": 1}), "")
    (agent,) = hosts.agents
    (part,) = wait_for(lambda: list(agent.agent.parts.values()))
    wait_for(lambda: part._link is not None)
    assert part._link is not None
    (pid,) = part._link.pids
    del link
    gc.collect()
    part.join(60)
    assert not part.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert agent.is_alive()
