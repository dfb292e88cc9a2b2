"""The files of examples/clusters start one session on several hosts, with the losses of one."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.hosts import Hosts, hosts_or_skip
from tests.clusters.test_engines import REMOTE_SHELL, text_of

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "clusters"
TRAIN = str(FILES / "train.py")
#: commands such as torchrun are those beside this Python
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "LAZYGT_COMPILE": "off",
    "OMP_NUM_THREADS": "1",
}
SECONDS = 400


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as hosts:
        yield hosts


@cache
def on_one_host() -> list[str]:
    """What the program prints with four workers on this machine."""
    done = subprocess.run(
        [sys.executable, TRAIN, "--workers", "4"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return printed(done.stdout)


def printed(output: str) -> list[str]:
    """The lines of the program among those of an engine."""
    lines = [line.strip() for line in output.splitlines()]
    return [line for line in lines if line.startswith("step") or line.endswith(" workers")]


def test_torchrun(hosts: Hosts) -> None:
    command = [str(FILES / "torchrun.sh"), hosts.addresses[0]]
    token = secrets.token_hex(32)
    environment = {**os.environ, **ENVIRONMENT, "LAZYGT_TOKEN": token}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [hosts.start(host, command, env=environment, **options) for host in range(2)]
    outputs = [process.communicate(timeout=SECONDS)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    # which of the two hosts has rank 0 is the rendezvous's choice
    assert sorted(printed(output) for output in outputs) == [[], on_one_host()]


@pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
def test_sbatch(hosts: Hosts, tmp_path: Path) -> None:
    with slurm.Slurm(hosts) as cluster:
        options = [f"--chdir={ROOT}", f"--output={tmp_path}/output", str(FILES / "train.sbatch")]
        environment = {**ENVIRONMENT, "HOME": str(tmp_path)}
        tested = cluster.run(["sbatch", "--test-only", *options], SECONDS, environment)
        assert tested.returncode == 0, text_of(tested)
        assert "using 4 processors on nodes" in tested.stderr
        done = cluster.run(["sbatch", "--wait", *options], SECONDS, environment)
    output = (tmp_path / "output").read_text()
    assert done.returncode == 0, text_of(done) + output
    assert printed(output) == on_one_host()
    assert [path.name for path in tmp_path.iterdir()] == ["output"]  # the token is gone


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="there is no Open MPI")
def test_mpirun(hosts: Hosts, tmp_path: Path) -> None:
    shell = tmp_path / "remote_shell"
    shell.write_text(REMOTE_SHELL)
    shell.chmod(0o755)
    listed = tmp_path / "hosts"
    listed.write_text("".join(f"{name} slots=2\n" for name in hosts.names))
    passed = " ".join(f"-x {name}" for name in ENVIRONMENT)
    options = f"--allow-run-as-root --mca plm_rsh_agent {shell} {passed}"
    done = hosts.run(
        0,
        [str(FILES / "mpirun.sh"), str(listed)],
        SECONDS,
        {**ENVIRONMENT, "MPIRUN_OPTIONS": options},
    )
    assert done.returncode == 0, text_of(done)
    assert printed(done.stdout) == on_one_host()


def test_pods_of_a_job_set() -> None:
    """With the variables of the manifest, a host for each pod."""
    token = secrets.token_hex(32)
    with hosts_or_skip(4) as hosts:
        pods = []
        for rank in range(4):
            given = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": "29400"}
            given |= {"MASTER_ADDR": hosts.names[0], "LAZYGT_TOKEN": token}
            environment = {**os.environ, **ENVIRONMENT, **given}
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            command = [sys.executable, TRAIN]
            pods.append(hosts.start(rank, command, env=environment, **options))
        outputs = [pod.communicate(timeout=SECONDS)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * 4, "\n".join(outputs)
    assert [printed(output) for output in outputs] == [on_one_host(), [], [], []]
