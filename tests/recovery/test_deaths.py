"""Real workers die, in all kinds of ways: the session goes on, with the bits of the run that was
not disturbed."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lazygt
from lazygt.runtime.messages import Snapped
from lazygt.settings import grouped
from tests.recovery.faulty import use_faulty_workers
from tests.recovery.programs import LAYOUTS, outcome
from tests.support.timeouts import DEEP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

undisturbed = cache(lambda name: outcome(name)[0])


def kill(s: lazygt.Session, *ranks: int) -> None:
    for rank in ranks:
        os.kill(s.worker_pids[rank], signal.SIGKILL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", [0, -1], ids=["first rank", "last rank"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_worker_is_a_longer_wait(name: str, rank: int, tmp_path: Path) -> None:
    def disturb(s: lazygt.Session, step: int) -> None:
        if step in (2, 5):
            kill(s, rank)

    told, recoveries = outcome(name, disturb=disturb, log=str(tmp_path / "log"))
    assert told == undisturbed(name)
    logged = (tmp_path / "log").read_text().splitlines()
    assert [str(each) in line for each, line in zip(
        recoveries, (line for line in logged if '"recover"' in line), strict=True
    )] == [True] * len(recoveries)  # fmt: skip
    assert 1 <= len(recoveries) <= 2
    assert "signal SIGKILL; back after" in str(recoveries[0])


@pytest.mark.parametrize("name", ["data parallel", "fully sharded", "pipeline"])
def test_all_workers_at_once(name: str) -> None:
    def disturb(s: lazygt.Session, step: int) -> None:
        if step == 3:
            kill(s, 0, 1)

    told, recoveries = outcome(name, disturb=disturb)
    assert told == undisturbed(name)
    assert {rank for each in recoveries for rank in each.ranks} == {0, 1}


@pytest.mark.parametrize("name", ["one worker", "fully sharded"])
def test_a_stopped_worker_is_replaced_when_it_counts_as_frozen(name: str) -> None:
    stopped = []

    def disturb(s: lazygt.Session, step: int) -> None:
        if step == 3:
            stopped.append(s.worker_pids[0])
            os.kill(stopped[0], signal.SIGSTOP)

    told, recoveries = outcome(name, disturb=disturb, frozen_after=2.0)
    assert told == undisturbed(name)
    assert "has not answered" in recoveries[0].why
    with pytest.raises(ProcessLookupError):
        os.kill(stopped[0], 0)


def test_a_worker_that_dies_while_the_session_opens() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        kill(s, 0)
        assert torch.ones(3).sum().item() == 3
        (recovery,) = s.recoveries
        assert f"recoveries (1)\n  {recovery}" in str(lazygt.why(s))
        assert 0 < recovery.replay_seconds < recovery.seconds


@pytest.mark.parametrize(
    "faults", ["0:9:inside,0:4:before:1", "0:9:after,0:1:after:1,1:5:inside:2"]
)
def test_a_death_in_a_recovery(faults: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed("fully sharded")
    use_faulty_workers(monkeypatch, faults)
    told, recoveries = outcome("fully sharded")
    assert told == expected
    assert recoveries[0].ranks == (0,)


def dies_once(x: torch.Tensor, path: str) -> torch.Tensor:
    """Ends its worker, the first time; the client runs it, too, to know shapes."""
    if "LAZYGT_WORKER" in os.environ and not Path(path).exists():
        Path(path).touch()
        os._exit(3)
    return x + 1


def test_an_exit_in_a_function(tmp_path: Path) -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x = lazygt.apply(dies_once, torch.ones(2), str(tmp_path / "once"))
        assert x.tolist() == [2.0, 2.0]
        assert "exit code 3" in s.recoveries[0].why


def crashes(x: torch.Tensor) -> torch.Tensor:
    """Ends its worker by SIGSEGV."""
    if "LAZYGT_WORKER" in os.environ:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x


def test_a_run_that_kills_its_worker_again_and_again_is_given_up() -> None:
    with (
        pytest.raises(lazygt.WorkerDied) as caught,
        lazygt.session(workers=lazygt.Workers(1, threads=1)),
    ):
        x = torch.ones(4) * 2
        lazygt.apply(crashes, x).sum().item()
    message = str(caught.value)
    assert "signal SIGSEGV" in message
    assert "3 processes died in this run" in message
    assert "crashes" in message
    assert "test_deaths.py:" in message
    assert "makes 16 bytes" in message


def runs_out_of_memory(x: torch.Tensor, path: str, times: int) -> torch.Tensor:
    """Ends its worker as C++ does without memory, so many times."""
    if "LAZYGT_WORKER" in os.environ and len(tries := Path(path).read_text()) < times:
        Path(path).write_text(f"{tries}.")
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()
    return x + 1


def test_a_run_that_is_out_of_memory_twice_is_given_up(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    tries.touch()
    with (
        pytest.raises(lazygt.WorkerDied) as caught,
        lazygt.session(workers=lazygt.Workers(1, threads=1)),
    ):
        x = torch.ones(4) * 2
        lazygt.apply(runs_out_of_memory, x, str(tries), 3).sum().item()
    assert caught.value.out_of_memory
    assert caught.value.status == "out of memory (signal SIGABRT)"
    assert tries.read_text() == ".."
    message = str(caught.value)
    assert "2 processes died in this run, the last of them at " in message
    assert "runs_out_of_memory" in message
    assert "test_deaths.py:" in message
    assert "more memory" in message


def test_a_run_that_is_out_of_memory_once_is_done_again(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    tries.touch()
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        assert lazygt.apply(runs_out_of_memory, torch.ones(4), str(tries), 1).sum().item() == 8
        (recovery,) = s.recoveries
        assert "out of memory (signal SIGABRT)" in recovery.why


def test_without_recovery_a_death_ends_the_session() -> None:
    with pytest.raises(lazygt.WorkerDied), lazygt.session(workers=1, recovery="off") as s:
        x = torch.ones(3)
        s.synchronize()
        kill(s, 0)
        x.sum().item()


def test_many_deaths_leave_nothing_open() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x, open_before = torch.ones(1 << 16), 0
        for death in range(6):
            kill(s, 0)
            x = x + 1
            assert x[0].item() == death + 2
            if death == 1:
                open_before = len(os.listdir("/proc/self/fd"))
        assert len(s.recoveries) == 6
        assert len(os.listdir("/proc/self/fd")) <= open_before


def test_ctrl_c_in_a_recovery_loses_nothing() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x = torch.ones(8) * 3
        s.synchronize()
        kill(s, 0)
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            x.sum().item()
            while True:
                time.sleep(0.01)
        assert x.sum().item() == 24
        assert len(s.recoveries) == 1


def test_a_death_is_seen_at_once_when_other_ranks_answer() -> None:
    with lazygt.session(mesh={"ranks": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = torch.ones(8)
        s.synchronize()
        kill(s, 1)
        assert (x * 2).sum().item() == 16
        s.synchronize()
        assert [each.ranks for each in s.recoveries] == [(1,)]


def test_no_room_for_a_snapshot_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Snapped(1, error="MemoryError: no memory for 64 bytes of the arena")
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x = torch.ones(8)
        s.synchronize()
        with pytest.warns(RuntimeWarning, match="could not take a snapshot.*no memory"):
            s._client._snapped(0, told)
        kill(s, 0)
        with pytest.raises(lazygt.WorkerDied):
            x.sum().item()
        s.close()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"recovery": "yes"}, "recovery='yes'"),
        ({"snapshot_cost": 0.0}, "snapshot_cost=0.0"),
        ({"snapshot_cost": 2.0}, "snapshot_cost=2.0"),
        ({"journal_bytes": 0}, "journal_bytes=0"),
        ({"spares": -1}, "spares=-1"),
    ],
)
def test_invalid_setting_is_refused(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lazygt.session(**grouped(setting))


@pytest.mark.parametrize("name", ["one worker", "fully sharded"])
def test_a_spare_process_takes_the_rank(name: str) -> None:
    took = []

    def disturb(s: lazygt.Session, step: int) -> None:
        if step in (2, 5):
            took.append([child.pid for child in psutil.Process().children()])
            kill(s, -1)
        elif step in (3, 6):
            s.synchronize()
            took.append(s.worker_pids)

    expected, before = undisturbed(name), psutil.Process().children()
    told, recoveries = outcome(name, disturb=disturb, spares=1)
    assert told == expected
    assert len(recoveries) == 2
    for children, workers in (took[:2], took[2:]):
        assert set(workers) < set(children), "nobody was started anew"
    assert psutil.Process().children() == before


#: One of so many messages of a program of two ranks is tried; in the deep profile each.
STRIDE = 1 if DEEP else 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_at_any_message_of_two_ranks(
    rank: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, died = undisturbed("fully sharded"), 0
    for message in range(1 + rank, 30, STRIDE):
        use_faulty_workers(monkeypatch, f"{rank}:{message}:{when}")
        told, recoveries = outcome("fully sharded")
        assert told == expected, message
        assert all(each.ranks == (rank,) for each in recoveries)
        died += bool(recoveries)
    assert died
