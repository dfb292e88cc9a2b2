"""The commands of docs/clusters.md, as they stand there, start one session on several hosts, with
the losses of one."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.commands import REMOTE_SHELL, blocks, commands, text_of
from tests.clusters.hosts import Hosts, hosts_or_skip

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


@cache
def on_one_host(workers: int = 4) -> list[str]:
    """What the program prints with so many workers on this machine."""
    done = subprocess.run(
        [sys.executable, TRAIN, "--workers", str(workers)],
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


class Reader:
    """Somebody who gives the page's commands, in a folder that has the examples.

    Args:
        given: variables that the page says nothing of.
    """

    def __init__(self, hosts: Hosts, folder: Path, **given: str) -> None:
        self._hosts, self.folder = hosts, folder
        self._environment = {**os.environ, **ENVIRONMENT, **given}
        self._environment.pop("LAZYGT_TOKEN", None)
        (folder / "examples").symlink_to(ROOT / "examples")

    def start(self, host: int, section: str, block: int = 0) -> subprocess.Popen[str]:
        """Give a section's commands on a host."""
        command = ["bash", "-euc", commands(section, block, host)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        where = {"cwd": self.folder, "env": self._environment, "stdin": subprocess.DEVNULL}
        return self._hosts.start(host, command, **where, **options)

    def read(self, section: str, block: int = 0, hosts: Sequence[int] = (0,)) -> list[str]:
        """Give them on some hosts, all at once; what is printed there, once all have ended well."""
        started = [self.start(host, section, block) for host in hosts]
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
        assert [process.returncode for process in started] == [0] * len(hosts), "\n".join(outputs)
        return outputs


def test_torchrun_on_one_machine(hosts: Hosts, tmp_path: Path) -> None:
    (output,) = Reader(hosts, tmp_path).read("torchrun")
    assert printed(output) == on_one_host(2)


def test_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    reader = Reader(hosts, tmp_path)
    reader.read("The secret")
    outputs = reader.read("torchrun", 1, hosts=(0, 1))
    # which of the two hosts has rank 0 is the rendezvous's choice
    assert sorted(printed(output) for output in outputs) == [[], on_one_host()]


@pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
def test_sbatch(hosts: Hosts, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with slurm.Slurm(hosts) as cluster:
        file = ["--test-only", str(FILES / "train.sbatch")]
        tested = cluster.run(["sbatch", *file], SECONDS, ENVIRONMENT)
        assert tested.returncode == 0, text_of(tested)
        assert "using 4 processors on nodes" in tested.stderr
        # SBATCH_WAIT: the command returns with the job's end
        reader = Reader(hosts, tmp_path, HOME=str(home), SBATCH_WAIT="1", **cluster.environment)
        reader.read("SLURM")
    (output,) = tmp_path.glob("slurm-*.out")
    assert printed(output.read_text()) == on_one_host()
    assert list(home.iterdir()) == []  # the token is gone


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="there is no Open MPI")
def test_mpirun(hosts: Hosts, tmp_path: Path) -> None:
    shell = tmp_path / "remote_shell"
    named = "".join(f"host{number}) host={name};; " for number, name in enumerate(hosts.names))
    told = "host=$1; shift\n"
    assert told in REMOTE_SHELL
    shell.write_text(REMOTE_SHELL.replace(told, f"{told}case $host in {named}esac\n"))
    shell.chmod(0o755)
    passed = " ".join(f"-x {name}" for name in ENVIRONMENT)
    options = f"--allow-run-as-root --mca plm_rsh_agent {shell} {passed}"
    (output,) = Reader(hosts, tmp_path, MPIRUN_OPTIONS=options).read("MPI")
    assert printed(output) == on_one_host()


def test_by_hand(hosts: Hosts, tmp_path: Path) -> None:
    reader = Reader(hosts, tmp_path)
    reader.read("The secret")
    outputs = reader.read("By hand", hosts=(0, 1))
    assert [printed(output) for output in outputs] == [on_one_host(2), []]


def test_kubectl(hosts: Hosts, tmp_path: Path) -> None:
    """What is asked of it; test_manifest.py looks at the file itself."""
    folder = tmp_path / "bin"
    folder.mkdir()
    kubectl = folder / "kubectl"
    kubectl.write_text('#!/bin/sh\nprintf "%s\\n" "$@" --\n')
    kubectl.chmod(0o755)
    path = f"{folder}{os.pathsep}{ENVIRONMENT['PATH']}"
    (output,) = Reader(hosts, tmp_path, PATH=path).read("Kubernetes")
    manifest = (FILES / "jobset.yaml").read_text()
    create, apply, rest = output.split("--\n")
    assert rest == ""
    *words, token = create.split()
    assert words == ["create", "secret", "generic", "lazygt"]
    assert "secretKeyRef:\n                          name: lazygt\n" in manifest
    assert re.fullmatch(r"--from-literal=token=[0-9a-f]{64}", token)
    assert apply.split() == ["apply", "-f", "examples/clusters/jobset.yaml"]
    assert (tmp_path / "examples/clusters/jobset.yaml").is_file()


def test_all_commands_of_the_page_are_given_here() -> None:
    """Those for Ray are given in test_ray.py."""
    here = {"The secret": 1, "torchrun": 2, "SLURM": 1, "MPI": 1, "By hand": 1, "Kubernetes": 1}
    assert blocks() == {**here, "Ray": 1}


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
