"""What is wrong with a job on two hosts is told on both, by a typed error that says what to do,
within a deadline; and nothing is left running on either."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.clusters.hosts import Hosts
from tests.clusters.running import alone, same, torchrun
from tests.strange import LATER, OTHER_LAZYGT, OTHER_TORCH, UP_LONGER, strange

pytestmark = [pytest.mark.clusters, pytest.mark.anew, pytest.mark.timeout(400)]

#: Seconds for all hosts to come.
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
    other = "another-token-that-is-as-long-as-it-has-to-be"
    run = torchrun(hosts, 1, 5, 1, given=SOON, strange={"LAZYGT_TOKEN": other})
    here, there = run.ended()
    assert "SecurityError" in there
    assert "LAZYGT_TOKEN" in there
    assert "LaunchError" in here
    assert "do all know the same LAZYGT_TOKEN" in here


@pytest.mark.parametrize(
    ("what", "name", "other"), [(OTHER_LAZYGT, "lazygt", "0.0.1"), (OTHER_TORCH, "torch", "2.0.99")]
)
def test_another_version_is_told_on_both_hosts(
    what: str, name: str, other: str, hosts: Hosts, tmp_path: Path
) -> None:
    run = torchrun(hosts, 1, 5, 1, given=SOON, strange=strange(tmp_path / "strange", what))
    here, there = run.ended()
    assert "VersionMismatch" in there
    assert f"{name} is {other} here" in there
    assert "Install the same ones" in there
    assert "LaunchError" in here
    assert "other versions of lazygt, torch or Python" in here


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


def test_the_store_in_which_hosts_meet_is_lost(hosts: Hosts, tmp_path: Path) -> None:
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
