"""Real engines on two hosts: each process knows who it is, and the hosts meet."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import slurm
from tests.clusters.commands import REMOTE_SHELL, text_of
from tests.clusters.hosts import Hosts
from tests.clusters.meets import ENDPOINT_PORT

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
MEETS = str(Path(__file__).with_name("meets.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def remote_shell(tmp_path: Path) -> str:
    script = tmp_path / "remote_shell"
    script.write_text(REMOTE_SHELL)
    script.chmod(0o755)
    return str(script)


def check_job(folder: Path, hosts: Hosts, engine: str) -> list[dict[str, Any]]:
    """What the four processes of a job said, which must be in order."""
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    assert [job["engine"] for job in told] == [engine] * 4
    assert [job["rank"] for job in told] == [0, 1, 2, 3]
    assert [job["local_rank"] for job in told] == [0, 1, 0, 1]
    assert [job["world_size"] for job in told] == [4] * 4
    assert [job["local_world_size"] for job in told] == [2] * 4
    first, second = hosts.names
    assert [job["host_name"] for job in told] == [first, first, second, second]
    assert [job["held"] for job in told] == [False, True, False, True]
    assert len({(job["name"], job["port"]) for job in told}) == 1
    return told


def test_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=weekly"]
    meet = f"--rdzv-endpoint={hosts.addresses[0]}:29400"
    command = [*TORCHRUN, *options, meet, MEETS, str(tmp_path)]
    environment = {**os.environ, **ENVIRONMENT}
    other = hosts.start(1, command, env=environment)
    done = hosts.run(0, command, 200, ENVIRONMENT)
    assert done.returncode == 0, text_of(done)
    assert other.wait(60) == 0
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    # which of the two hosts gets the first ranks is the rendezvous's choice
    first = told[0]["host_name"]
    assert [job["host_name"] == first for job in told] == [True, True, False, False]
    assert [job["held"] for job in told] == [False, True, False, True]
    assert [job["meets_by_store"] for job in told] == [True] * 4
    assert [job["name"] for job in told] == ["weekly/0"] * 4
    assert [job["hosts"] for job in told] == [2] * 4
    assert told[2]["met"] == f"tcp://{told[0]['address']}:{ENDPOINT_PORT}"


def test_torchrun_on_one_host(hosts: Hosts, tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node=4"]
    done = hosts.run(0, [*TORCHRUN, *options, MEETS, str(tmp_path)], 200, ENVIRONMENT)
    assert done.returncode == 0, text_of(done)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [job["held"] for job in told] == [False, True, True, True]
    assert [job["hosts"] for job in told] == [1] * 4


@pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
def test_srun(hosts: Hosts, tmp_path: Path) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, MEETS, str(tmp_path)]
    with slurm.Slurm(hosts) as cluster:
        done = cluster.run(command, 200, ENVIRONMENT)
    assert done.returncode == 0, text_of(done)
    told = check_job(tmp_path, hosts, "slurm")
    assert [(job["host"], job["hosts"]) for job in told] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [job["address"] for job in told] == [hosts.names[0]] * 4
    assert told[2]["met"] == f"tcp://{hosts.names[0]}:{told[0]['port']}"


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="there is no Open MPI")
def test_mpirun_of_open_mpi(hosts: Hosts, tmp_path: Path, remote_shell: str) -> None:
    listed = tmp_path / "hosts"
    listed.write_text("".join(f"{name} slots=2\n" for name in hosts.names))
    options = ["--allow-run-as-root", "--mca", "plm_rsh_agent", remote_shell, "-np", "4"]
    passed = [word for name in (*ENVIRONMENT, "MASTER_ADDR") for word in ("-x", name)]
    command = ["mpirun.openmpi", *options, *passed, "--hostfile", str(listed)]
    environment = {**ENVIRONMENT, "MASTER_ADDR": hosts.names[0]}
    done = hosts.run(0, [*command, sys.executable, MEETS, str(tmp_path)], 200, environment)
    assert done.returncode == 0, text_of(done)
    told = check_job(tmp_path, hosts, "openmpi")
    assert told[2]["met"] == f"tcp://{hosts.names[0]}:{told[0]['port']}"


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="there is no MPICH")
def test_mpiexec_of_mpich(hosts: Hosts, tmp_path: Path, remote_shell: str) -> None:
    options = ["-launcher", "ssh", "-launcher-exec", remote_shell, "-ppn", "2", "-np", "4"]
    command = ["mpiexec.hydra", *options, "-hosts", ",".join(hosts.names)]
    given = ["-genv", "MASTER_ADDR", hosts.names[0]]
    done = hosts.run(0, [*command, *given, sys.executable, MEETS, str(tmp_path)], 200, ENVIRONMENT)
    assert done.returncode == 0, text_of(done)
    told = check_job(tmp_path, hosts, "hydra")
    assert told[2]["met"] == f"tcp://{hosts.names[0]}:{told[0]['port']}"
