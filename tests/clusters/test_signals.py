"""Ctrl-C and SIGTERM, to programs on two hosts: to the client, to all of a host, to a whole job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.hosts import Hosts
from tests.clusters.running import PROGRAM, Running, alone, same, start, torchrun, worker

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

LONG = 1_000_000  # steps, which no program gets to
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def client_of(run: Running) -> int:
    """The process of the program on the first host; its engine is its parent."""
    engine = run.processes[0].pid
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    (client,) = map(int, children)
    return client


@pytest.mark.parametrize("given", SIGNALS)
def test_a_signal_to_the_client_ends_the_job_on_all_hosts(
    hosts: Hosts, given: signal.Signals
) -> None:
    run = torchrun(hosts, 1, LONG, 1)
    run.until("step 100")
    os.kill(client_of(run), given)
    here, _ = run.ended()
    assert ("KeyboardInterrupt" in here) == (given == signal.SIGINT)
    assert run.processes[0].returncode != 0


@pytest.mark.parametrize("given", SIGNALS)
def test_a_signal_to_the_first_host_s_engine_ends_the_job_on_all_hosts(
    hosts: Hosts, given: signal.Signals
) -> None:
    """What a terminal, or whoever manages the job, does: torchrun passes it on."""
    run = torchrun(hosts, 2, LONG, 1)
    run.until("step 100")
    os.killpg(run.processes[0].pid, given)
    run.ended()
    assert run.processes[0].returncode != 0


@pytest.mark.parametrize("given", SIGNALS)
def test_a_signal_to_the_other_host_s_engine_is_a_lost_host(
    hosts: Hosts, given: signal.Signals
) -> None:
    run = torchrun(hosts, 1, 300, 1)
    run.until("step 100")
    os.killpg(run.processes[1].pid, given)
    told = run.told()
    assert same(told, alone(300, 1, 2))
    (record,) = told["recoveries"]
    assert "is lost" in record
    # the first host's torchrun waits five minutes for the other's to end as it does
    assert run.processes[1].wait(60) != 0
    run.nothing_left({0: {run.processes[0].pid}})


@pytest.mark.parametrize("given", SIGNALS)
def test_a_signal_to_all_hosts_at_once_ends_the_job(hosts: Hosts, given: signal.Signals) -> None:
    run = torchrun(hosts, 2, LONG, 1)
    run.until("step 100")
    for process in run.processes:
        os.killpg(process.pid, given)
    run.ended()
    assert all(process.returncode != 0 for process in run.processes)


@pytest.mark.parametrize("given", SIGNALS)
def test_a_signal_to_an_agent_by_hand_is_a_lost_host(hosts: Hosts, given: signal.Signals) -> None:
    engine = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0]}
    client = start(hosts, 0, [sys.executable, str(PROGRAM), "300", "1"], engine)
    agent = start(hosts, 1, worker(hosts), {})
    run = Running(hosts, [client, agent])
    run.until("step 100")
    os.killpg(agent.pid, given)
    told = run.told()
    assert same(told, alone(300, 1, 2))
    assert "is lost" in told["recoveries"][0]
    run.ended()
    assert agent.returncode != 0


@pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
@pytest.mark.parametrize("given", SIGNALS)
def test_a_signal_to_srun_ends_the_job(hosts: Hosts, given: signal.Signals) -> None:
    """srun asks twice at Ctrl-C; a terminal's second one within a second ends the job."""
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, str(PROGRAM)]
    with slurm.Slurm(hosts) as cluster:
        daemons = {host: set(hosts.processes(host)) for host in range(2)}
        job = start(hosts, 0, [*command, str(LONG), "1"], cluster.environment)
        run = Running(hosts, [job])
        run.until("step 100")
        os.killpg(job.pid, given)
        if given == signal.SIGINT:
            run.until("srun: interrupt")
            os.killpg(job.pid, given)
        job.communicate(timeout=100)
        run.nothing_left(daemons)
        assert job.returncode != 0
