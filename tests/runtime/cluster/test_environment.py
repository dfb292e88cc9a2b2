"""Who a process is, as each engine says it, and what is wrong when the variables are."""

from __future__ import annotations

import copy

import pytest

from lazygt.errors import LaunchError
from lazygt.runtime.cluster.environment import Job, first_of_hosts
from tests.runtime.cluster.jobs import (
    HYDRA,
    OPENMPI,
    POD,
    SLURM,
    SLURM_BATCH,
    TORCHRUN,
)


def job_of(environment: dict[str, str]) -> Job:
    job = Job.from_environment(environment)
    assert job is not None
    return job


@pytest.mark.parametrize(
    ("engine", "environment", "host", "hosts"),
    [
        ("torchrun", TORCHRUN, 1, 2),
        ("slurm", SLURM, 1, 2),
        ("openmpi", OPENMPI, None, None),
        ("hydra", HYDRA, None, None),
    ],
)
def test_the_last_of_two_hosts_of_two(
    engine: str, environment: dict[str, str], host: int | None, hosts: int | None
) -> None:
    job = job_of(environment)
    assert (job.engine, job.host, job.hosts, job.address) == (engine, host, hosts, "host0")
    assert (job.rank, job.world_size, job.local_rank, job.local_world_size) == (3, 4, 1, 2)
    assert (job.is_client, job.leads_host, job.is_on_one_host) == (False, False, False)


def test_a_pod_is_a_host_of_one_process() -> None:
    job = job_of(POD)
    assert (job.engine, job.rank, job.world_size) == ("generic", 3, 4)
    assert (job.local_rank, job.local_world_size, job.host, job.hosts) == (0, 1, 3, 4)
    assert (job.address, job.port) == ("train-hosts-0-0.train", 29400)
    assert job.leads_host


def test_rank_0_is_the_client_and_the_first_elsewhere_leads_its_host() -> None:
    parts = []
    for rank in range(4):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
        job = job_of({**TORCHRUN, **given})
        parts.append((job.is_client, job.leads_host))
    assert parts == [(True, False), (False, False), (False, True), (False, False)]


def test_only_torchruns_store_takes_the_port() -> None:
    assert job_of(TORCHRUN).meets_by_store
    assert not job_of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).meets_by_store
    assert not job_of(SLURM).meets_by_store


def test_a_restart_is_another_job_and_so_is_another_step() -> None:
    assert job_of(TORCHRUN).name != job_of({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).name
    other = job_of({**SLURM, "SLURM_STEP_ID": "1"})
    assert job_of(SLURM).name != other.name
    assert job_of(SLURM).port != other.port


def test_all_processes_of_a_step_have_one_port_unless_they_are_given_one() -> None:
    first = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert job_of(first).port == job_of(SLURM).port
    assert 15_000 <= job_of(first).port < 30_000
    assert job_of({**SLURM, "MASTER_PORT": "4711"}).port == 4711
    assert job_of({**SLURM, "MASTER_PORT": "4711", "LAZYGT_PORT": "4712"}).port == 4712


def test_hosts_of_a_step_may_have_different_numbers_of_tasks() -> None:
    given = {
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,3",
        "SLURM_STEP_NUM_TASKS": "8",
    }
    sizes = []
    for host, (rank, local) in enumerate([(0, 0), (3, 1), (4, 0), (7, 2)]):
        place = {"SLURM_NODEID": host, "SLURM_PROCID": rank, "SLURM_LOCALID": local}
        text = {name: str(number) for name, number in place.items()}
        sizes.append(job_of({**SLURM, **given, **text}).local_world_size)
    assert sizes == [2, 2, 1, 3]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node[03-07,9]", "node03"),
        ("node[3,5],b", "node3"),
        ("rack[1-2]-n[07-09].site,b", "rack1-n07.site"),
    ],
)
def test_the_first_of_hosts_that_are_folded(hosts: str, first: str) -> None:
    assert first_of_hosts(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",a", "[1-2"])
def test_malformed_host_list_is_refused(hosts: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        first_of_hosts(hosts)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {**TORCHRUN, "LAZYGT_WORKER": "1"},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        SLURM_BATCH,
        {"MASTER_ADDR": "host0", "MASTER_PORT": "1"},
    ],
)
def test_environment_without_job(environment: dict[str, str]) -> None:
    assert Job.from_environment(environment) is None


def test_torchrun_under_srun_and_mpirun_in_a_job_are_the_inner_ones() -> None:
    assert job_of({**SLURM, **TORCHRUN}).engine == "torchrun"
    assert job_of({**SLURM, **OPENMPI}).engine == "openmpi"
    assert job_of({**SLURM, **POD, "RANK": "2"}).engine == "slurm"


@pytest.mark.parametrize(
    ("environment", "variable", "what"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK", "is 4, but there are 4 processes in all"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK", "is '-1': expected a number"),
        ({**TORCHRUN, "RANK": "three"}, "RANK", "is 'three': expected a number"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK", "is 2, but there are 2 processes on this"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE", "is not set"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT", "is not set"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT", "is 70000: expected a port"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "RANK", "a host can't have more than the job"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR", "is not set"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_STEP_TASKS_PER_NODE", "of 1 hosts"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE", "is 'x'"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST", "or set MASTER_ADDR"),
        ({**SLURM, "LAZYGT_PORT": "0"}, "LAZYGT_PORT", "is 0: expected a port"),
        ({**OPENMPI, "MASTER_ADDR": ""}, "MASTER_ADDR", "mpirun -x MASTER_ADDR=host0"),
        ({**HYDRA, "MASTER_ADDR": ""}, "MASTER_ADDR", "-genv MASTER_ADDR host0"),
        ({**HYDRA, "PMI_SIZE": ""}, "PMI_SIZE", "is not set"),
        ({"RANK": "1", "MASTER_ADDR": "host0"}, "WORLD_SIZE", "is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "host0"}, "RANK", "is not set"),
        ({**POD, "MASTER_ADDR": ""}, "MASTER_ADDR", "export MASTER_ADDR=host0"),
        ({**POD, "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE", "is not set"),
    ],
)
def test_wrong_variables_are_named(environment: dict[str, str], variable: str, what: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Job.from_environment(environment)
    assert caught.value.variable == variable
    assert what in str(caught.value)
    copied = copy.copy(caught.value)
    assert (copied.variable, str(copied)) == (variable, str(caught.value))


def test_one_host_needs_no_address() -> None:
    given = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "MASTER_ADDR": ""}
    job = job_of({**OPENMPI, **given})
    assert (job.is_on_one_host, job.address, job.hosts) == (True, "", 1)
