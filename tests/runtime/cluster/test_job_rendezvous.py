"""Rank 0 says where it listens, others find it, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lazygt.errors import LaunchError, SecurityError
from lazygt.runtime.cluster import job_rendezvous
from lazygt.runtime.cluster.environment import Job
from tests.runtime.cluster.jobs import POD, TORCHRUN

pytestmark = pytest.mark.timeout(120)

TOKEN = b"t" * 32
ENDPOINT = "tcp://host0:4711"


@pytest.fixture
def job() -> Iterator[Job]:
    """A job whose store is served here, as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    job = Job.from_environment({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert job is not None
    yield job
    del store  # it serves until here


def test_endpoint_of_rank_0_is_found_before_and_after_publication(job: Job) -> None:
    found: list[str] = []
    early = threading.Thread(target=lambda: found.append(job_rendezvous.find(job, TOKEN, 60)))
    early.start()
    job_rendezvous.publish(job, ENDPOINT, TOKEN, 60)
    early.join()
    assert [*found, job_rendezvous.find(job, TOKEN, 60)] == [ENDPOINT, ENDPOINT]


def test_the_next_start_is_not_taken_for_the_last(job: Job) -> None:
    job_rendezvous.publish(job, ENDPOINT, TOKEN, 60)
    with pytest.raises(LaunchError, match=r"rank 0 did not appear within 0\.3 s"):
        job_rendezvous.find(replace(job, name="after a restart"), TOKEN, 0.3)


def test_endpoint_under_another_token_is_refused(job: Job) -> None:
    job_rendezvous.publish(job, ENDPOINT, b"another" * 5, 60)
    with pytest.raises(SecurityError, match="LAZYGT_TOKEN"):
        job_rendezvous.find(job, TOKEN, 60)


def test_rank_with_another_token_is_named_to_rank_0(job: Job) -> None:
    job_rendezvous.publish(job, ENDPOINT, TOKEN, 60)
    look = job_rendezvous.refusals(job, 60)
    assert look() == ""
    with pytest.raises(SecurityError):
        job_rendezvous.find(job, b"another" * 5, 60)
    assert look() == f"rank {job.rank} on {socket.gethostname()}"


def test_a_changed_endpoint_is_not_believed(job: Job) -> None:
    job_rendezvous.publish(job, ENDPOINT, TOKEN, 60)
    store = dist.TCPStore(job.address, job.port, is_master=False, wait_for_workers=False)
    (key,) = (key for key in [f"lazygt/client/{job.name}"] if store.check([key]))
    store.set(key, store.get(key).decode().replace("host0", "host9"))
    with pytest.raises(SecurityError, match="host9"):
        job_rendezvous.find(job, TOKEN, 60)


def test_a_store_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    job = Job.from_environment({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert job is not None
    with pytest.raises(LaunchError, match=f"torchrun's store is at 127.0.0.1:{port}"):
        job_rendezvous.find(job, TOKEN, 1)


def test_a_store_that_goes_is_named() -> None:
    program = (
        "import torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\ninput()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdin is not None
    port = server.stdout.readline().strip()
    job = Job.from_environment({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert job is not None
    killer = threading.Timer(0.5, os.kill, (server.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(LaunchError, match="has gone"):
        job_rendezvous.find(job, TOKEN, 60)
    killer.join()
    server.wait()
    server.stdin.close()
    server.stdout.close()


def test_without_a_store_the_port_is_the_jobs() -> None:
    job = Job.from_environment(POD)
    assert job is not None
    assert job_rendezvous.port_to_bind(job) == 29400
    assert job_rendezvous.find(job, TOKEN, 1) == "tcp://train-hosts-0-0.train:29400"
    assert job_rendezvous.find(replace(job, address="fd00::1"), TOKEN, 1) == "tcp://[fd00::1]:29400"
    job_rendezvous.publish(job, "tcp://0.0.0.0:29400", TOKEN, 1)
    with pytest.raises(LaunchError, match=r"listens on tcp://0\.0\.0\.0:29401"):
        job_rendezvous.publish(job, "tcp://0.0.0.0:29401", TOKEN, 1)


# -- slots -----------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
#: What each process of a job does: the first reads a line and goes, the others hold.
SLOT = """
import os, sys
from lazygt.runtime.cluster import job_rendezvous
from lazygt.runtime.cluster.environment import Job
job = Job.from_environment(os.environ)
print("rank", job.rank, flush=True)
if job.is_client:
    input()
else:
    job_rendezvous.hold(job)
    print("ended", job.rank, flush=True)
"""


def slot(rank: int, shell: bool = False) -> subprocess.Popen[str]:
    """A process of a job whose engine is this process."""
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    command = [sys.executable, "-c", SLOT]
    # env: a real start, since /proc shows what a process was started with
    wrapped = ["sh", "-c", '"$@"; exit $?', "sh", *command] if shell else ["env", *command]
    process = subprocess.Popen(
        wrapped,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **given, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"rank {rank}\n"
    return process


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shell", [False, True], ids=["plain", "shells"])
@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_the_others_end_when_the_first_has(killed: bool, shell: bool) -> None:
    first, second, third = (slot(rank, shell) for rank in range(3))
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.3)
    if killed:
        first.kill()
    else:
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
    for number, process in ((1, second), (2, third)):
        assert process.communicate(timeout=60)[0] == f"ended {number}\n"
        assert process.returncode == 0
    first.communicate()  # the child of a shell that was killed reads the end of its input


def test_latecomer_ends_after_first_has_ended() -> None:
    second = slot(1)
    assert second.communicate(timeout=60)[0] == "ended 1\n"
