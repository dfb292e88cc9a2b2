"""What is seen of real sessions from another process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazygt
from lazygt.errors import NoSession
from lazygt.net.status_file import sessions
from lazygt.observe.top.sources import LocalStatus, listed, open_source
from lazygt.observe.top.status import SessionStatus
from lazygt.submit.memory_categories import MemoryCategories

pytestmark = pytest.mark.timeout(120)

COMMAND = "import sys; sys.argv[0] = 'lazygt'; from lazygt.cli.__main__ import main; main()"
DEADLINE = 30.0  # seconds; on a machine that has other things to do


def run_top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "top", *arguments], capture_output=True, text=True,
        timeout=DEADLINE, check=False,
    )  # fmt: skip


def seen(source: LocalStatus, what: Callable[[SessionStatus], bool]) -> SessionStatus:
    """A status that is so; it is looked for until then."""
    until = time.monotonic() + DEADLINE
    while True:
        status = source.snapshot()
        if what(status):
            return status
        assert time.monotonic() < until, status
        time.sleep(0.05)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(frozen_after=100.0)) as session:
        torch.ones(3).sum().item()
        yield session


@pytest.fixture
def source(session: Any) -> Iterator[LocalStatus]:
    name = next(name for name, pid in sessions() if name == session._link.name)
    source = open_source(name)
    yield source
    source.close()


def train(steps: int) -> None:
    model = nn.Linear(8, 4)
    lazygt.data_parallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(
            lazygt.distribute(torch.ones(4, 8), {"data": lazygt.Shard(0)})
        ).square().mean().backward()
        optimizer.step()
    session = lazygt.current()
    session.synchronize()
    train.kept = model, optimizer  # type: ignore[attr-defined]


def test_a_session_at_rest_is_told_of_as_json(session: Any) -> None:
    train(5)
    done = run_top(session._link.name, "--once", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"at", "client", "age", "session", "memory", "ranks", "stuck"}
    client, stats = told["session"], session.stats()
    assert (told["client"], client["pid"], client["workers"]) == ("running", os.getpid(), 2)
    assert (client["device"], client["mesh"], client["name"]) == (
        "cpu", "data=2", session._link.name,
    )  # fmt: skip
    assert client["line"].startswith(f"{__file__}:")
    assert (client["queue"], client["waits_for"], told["stuck"]) == (0, [], [])
    assert (client["hits"], client["misses"]) == (stats["plan_hits"], stats["plans_built"])
    assert client["steps"] == 5
    assert client["miss"] == stats["plan_misses"][-1]["reason"]
    weights = 4 * (8 * 4 + 4)
    assert {kind: told["memory"][kind] for kind in ("parameters", "gradients")} == {
        "parameters": weights, "gradients": weights,
    }  # fmt: skip
    assert told["memory"]["optimizer"] >= 2 * weights
    living = session.memory().ranks[0].living
    assert abs(sum(told["memory"].values()) - living) <= 4096
    assert [rank["state"] for rank in told["ranks"]] == ["idle", "idle"]
    assert [rank["pid"] for rank in told["ranks"]] == session.worker_pids
    assert [rank["run"] for rank in told["ranks"]] == [client["runs"]] * 2
    assert all(rank["done"] >= client["runs"] for rank in told["ranks"])
    assert all(rank["peak"] >= rank["resident"] > 0 for rank in told["ranks"])


def test_frozen_rank_is_named_with_ranks_it_blocks(source: LocalStatus, session: Any) -> None:
    train(2)
    os.kill(session.worker_pids[1], signal.SIGSTOP)
    try:
        model, optimizer = train.kept  # type: ignore[attr-defined]
        model(
            lazygt.distribute(torch.ones(4, 8), {"data": lazygt.Shard(0)})
        ).square().mean().backward()
        optimizer.step()
        status = seen(source, lambda status: status.ranks[0].state == "waiting")
        # each process tells when it likes: the rank may have told of a later run than the client
        status = seen(
            source,
            lambda status: status.session.queue == 1 and status.ranks[0].run == status.session.runs,
        )
        assert status.ranks[0].waits_for == (1,)
        assert (status.ranks[1].state, status.ranks[1].blocks) == ("frozen", (0,))
        assert status.stuck == (1,)
        assert status.session.waits_for == (0, 1)
        assert status.ranks[0].seconds > 0
        text = run_top(session._link.name).stdout
        assert "is frozen; it blocks rank 0 and keeps the client waiting" in " ".join(text.split())
    finally:
        os.kill(session.worker_pids[1], signal.SIGCONT)
    session.synchronize()
    status = seen(source, lambda status: {rank.state for rank in status.ranks} == {"idle"})
    assert status.stuck == ()


def test_only_the_programs_thread_looks_at_gradients(
    source: LocalStatus, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may be letting go of one meanwhile: another thread would take it up again."""
    threads = []
    sizes = MemoryCategories.sizes

    def noted(self: MemoryCategories, ranks: Any) -> dict[str, int]:
        threads.append(threading.get_ident())
        return sizes(self, ranks)

    monkeypatch.setattr(MemoryCategories, "sizes", noted)
    until = time.monotonic() + DEADLINE
    while len(threads) < 2 and time.monotonic() < until:  # not before some seconds have passed
        source.snapshot()
        train(1)
    assert len(threads) >= 2
    assert set(threads) == {threading.get_ident()}


def sleep_until(x: torch.Tensor, path: str) -> torch.Tensor:
    """What a rank is busy with until a file is there."""
    # why: it is sent to workers
    import os
    import time

    in_worker = os.environ.get("LAZYGT_WORKER") == "1"  # the client runs it once, on no values
    until = time.monotonic() + 60
    while in_worker and not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.01)
    return x + 1


def test_a_busy_rank_is_in_the_users_function(
    source: LocalStatus, session: Any, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    y = lazygt.apply(sleep_until, torch.ones(3), str(ended))
    session.flush()
    try:
        status = seen(source, lambda status: all("sleep_until" in r.doing for r in status.ranks))
        assert {rank.state for rank in status.ranks} == {"busy"}
        assert status.ranks[0].doing.startswith("sleep_until ")
        assert status.ranks[0].run == status.session.runs
        assert len(status.ranks[0].plan) == 32
        assert status.session.reason == "flush()"
    finally:
        ended.touch()
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_a_dead_worker_is_gone_and_then_replaced() -> None:
    with lazygt.session(workers=1) as session:
        source = open_source(session._link.name)
        torch.ones(3).sum().item()
        first = session.worker_pids[0]
        os.kill(first, signal.SIGKILL)
        torch.ones(4).sum().item()
        status = seen(source, lambda status: status.ranks[0].pid == session.worker_pids[0])
        assert session.worker_pids[0] != first
        status = seen(source, lambda status: status.session.recoveries == 1)
        assert "SIGKILL" in status.session.recovery
    with pytest.raises(NoSession, match="has ended"):
        source.snapshot()
    source.close()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("999999999", "there is no process 999999999"),
        ("lazygt-nothing", "there is no lazygt session named 'lazygt-nothing'"),
    ],
)
def test_unknown_session_is_reported(wanted: str, message: str) -> None:
    done = run_top(wanted, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_process_without_a_session_is_no_session() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            with pytest.raises(NoSession, match="has no lazygt session with workers"):
                open_source(str(other.pid))
        finally:
            other.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_somebody_elses_process_is_not_watched() -> None:
    with subprocess.Popen(["sleep", "60"], user=65534) as other:
        try:
            with pytest.raises(NoSession, match=r"belongs to user 65534"):
                open_source(str(other.pid))
        finally:
            other.kill()


def test_of_several_sessions_one_has_to_be_named(session: Any) -> None:
    with lazygt.session(workers=1), pytest.raises(NoSession, match="name one") as raised:
        open_source(str(os.getpid()))
    assert session._link.name in str(raised.value)


def test_sessions_of_the_same_name_are_listed_by_process() -> None:
    assert listed([("alice-2", 7), ("alice-2", 8), ("bob-1", 9)]).splitlines() == [
        "  lazygt top 7  (session alice-2)",
        "  lazygt top 8  (session alice-2)",
        "  lazygt top bob-1  (process 9)",
    ]


@pytest.mark.anew
def test_the_command_loads_no_torch() -> None:
    code = COMMAND.replace("main()", "\ntry: main()\nexcept SystemExit: pass\n") + (
        "print({'torch', 'numpy', 'zmq', 'lazygt.session'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "top", "--help"], capture_output=True, text=True,
        timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
