"""What is wrong with a job on two hosts is told on both, by a typed error that says what to do,
within a deadline; and nothing is left running on either."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.clusters.hosts import Hosts
from tests.clusters.running import PROGRAM, Running, alone, same, start, torchrun, worker
from tests.support.strange import LATER, OTHER_LAZYGT, OTHER_TORCH, UP_LONGER, strange

pytestmark = [pytest.mark.clusters, pytest.mark.anew, pytest.mark.timeout(400)]

OTHER_TOKEN = "another-token-that-is-as-long-as-it-has-to-be"
#: Seconds for all hosts to come: beyond what a test waits for programs to end.
LATE = {"LAZYGT_START_TIMEOUT": "300"}
SOON = {"LAZYGT_START_TIMEOUT": "20"}
LATE_CLIENT = """
import os, sys, time
print("begins", flush=True)
if os.environ["RANK"] == "0":
    time.sleep(1000)
import lazygt
lazygt.session()
"""
ASKS_FOR_THREE = """
import lazygt
lazygt.session(workers=3)
"""
COMES_NOT = """
import os, sys
if os.environ["RANK"] == "0":
    import lazygt
    lazygt.session()
"""


def written(folder: Path, text: str) -> Path:
    program = folder / "program_of_a_test.py"
    program.write_text(text)
    return program


def test_another_token_is_told_on_both_hosts(hosts: Hosts) -> None:
    run = torchrun(hosts, 1, 5, 1, given=LATE, strange={"LAZYGT_TOKEN": OTHER_TOKEN})
    here, there = run.ended()
    assert "SecurityError" in there
    assert "LAZYGT_TOKEN" in there
    assert "LaunchError" in here
    assert f"another one for 'rank 1 on {hosts.names[1]}' of this job" in here


def by_hand(hosts: Hosts, given: dict[str, str]) -> Running:
    """A program on the first host, which waits for another host."""
    engine = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], **given}
    return Running(hosts, [start(hosts, 0, [sys.executable, str(PROGRAM), "5", "1"], engine)])


def test_another_token_is_told_on_both_hosts_without_an_engine(hosts: Hosts) -> None:
    run = by_hand(hosts, LATE)
    run.processes.append(start(hosts, 1, worker(hosts), {"LAZYGT_TOKEN": OTHER_TOKEN}))
    here, there = run.ended()
    assert "AccessDenied" in there
    assert "no proof of this host's LAZYGT_TOKEN; still waiting for all hosts" in here
    assert "LaunchError: LAZYGT_TOKEN is another one on the hosts of this job" in here


def test_a_stranger_does_not_end_a_session_that_waits_for_its_host(hosts: Hosts) -> None:
    run = by_hand(hosts, {"LAZYGT_START_TIMEOUT": "1000"})
    stranger = start(hosts, 1, worker(hosts), {"LAZYGT_TOKEN": OTHER_TOKEN})
    run.until("refused")
    assert "AccessDenied" in stranger.communicate(timeout=100)[0]
    run.processes.append(start(hosts, 1, worker(hosts), {}))
    assert run.told()["workers"] == 2
    run.ended()


@pytest.mark.parametrize(
    ("what", "name", "other"), [(OTHER_LAZYGT, "lazygt", "0.0.1"), (OTHER_TORCH, "torch", "2.0.99")]
)
def test_another_version_is_told_on_both_hosts(
    what: str, name: str, other: str, hosts: Hosts, tmp_path: Path
) -> None:
    run = torchrun(hosts, 1, 5, 1, given=LATE, strange=strange(tmp_path / "strange", what))
    here, there = run.ended()
    assert "VersionMismatch" in there
    assert f"{name} is {other} here" in there
    assert "Install the same ones" in there
    assert "LaunchError" in here
    assert "other versions of lazygt, torch or Python" in here
    assert f"at {hosts.addresses[1]}: {name} is " in here


def test_more_workers_than_the_job_has(hosts: Hosts, tmp_path: Path) -> None:
    run = torchrun(hosts, 1, program=written(tmp_path, ASKS_FOR_THREE), given=SOON)
    here, _ = run.ended()
    assert "LaunchError" in here
    assert "workers asks for 3: leave workers out" in here


def test_a_host_that_does_not_come(hosts: Hosts, tmp_path: Path) -> None:
    run = torchrun(hosts, 1, program=written(tmp_path, COMES_NOT), given=SOON)
    here, _ = run.ended()
    assert "LaunchError" in here
    assert "after 20 s there are 1: 1 on this host" in here
    assert "Does the program open a lazygt.session() on all hosts" in here


def test_loss_of_torchrun_store_ends_job(hosts: Hosts, tmp_path: Path) -> None:
    run = torchrun(hosts, 1, program=written(tmp_path, LATE_CLIENT), given=SOON)
    run.until("begins")
    other = run.processes[1].stdout
    assert other is not None
    while (line := other.readline()) != "begins\n":
        assert line, "the program has not begun"
    for pid in hosts.processes(0):
        os.kill(pid, signal.SIGKILL)
    _, there = run.ended()
    assert "LaunchError" in there
    assert "torchrun's store" in there
    assert run.processes[1].returncode != 0


def test_clocks_that_are_an_hour_apart_are_of_no_account(hosts: Hosts, tmp_path: Path) -> None:
    """Neither those of a calendar nor those since the machines were started."""
    later = strange(tmp_path / "later", LATER)
    run = torchrun(hosts, 1, 20, 1, strange=later, before=UP_LONGER)
    told = run.told()
    assert same(told, alone(20, 1, 2))
    assert told["recoveries"] == []
    run.ended()
