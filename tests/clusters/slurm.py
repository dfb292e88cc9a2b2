"""A real SLURM on the hosts of a test: slurmctld on the first, slurmd on all, as root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.clusters.hosts import Hosts

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
_SECONDS = 60
_CONFIGURATION = """
ClusterName=lazygt
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str | None:
    """Why there can be no SLURM here, or None."""
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"there is no {lacking[0]} (package slurm-wlm)" if lacking else None


class Slurm:
    """A cluster of all hosts; each has as many processors to give as are said.

    It lives as long as the hosts; its files go at the end of the ``with`` block.

    Attributes:
        environment: what its commands need.
    """

    def __init__(self, hosts: Hosts, processors: int = 4) -> None:
        # munged wants every user to be able to get to its socket
        folder = Path(tempfile.mkdtemp(prefix="lazygt-slurm-", dir="/tmp"))
        self._hosts, self._folder = hosts, folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={processors} State=UNKNOWN"
            for name, address in zip(hosts.names, hosts.addresses, strict=True)
        )
        self._file = folder / "slurm.conf"
        self._file.write_text(
            _CONFIGURATION.format(
                names=hosts.names, addresses=hosts.addresses, folder=folder, nodes=nodes
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        self.environment = {"SLURM_CONF": str(self._file)}

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)

    def _start(self) -> None:
        """Start the daemons, and wait until all hosts are ready for jobs."""
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        files = {"key": key}
        for name in ("socket", "pid", "seed", "log"):
            files[name] = self._folder / f"munge.{name}"
        options = [f"--{name}{'' if name == 'socket' else '-file'}={files[name]}" for name in files]
        self._daemon(0, ["munged", "--foreground", "--num-threads=1", *options])
        self._until(lambda: files["socket"].exists(), "munged")
        self._daemon(0, ["slurmctld", "-D", "-f", str(self._file)])
        for host, name in enumerate(self._hosts.names):
            (self._folder / f"spool-{name}").mkdir()
            self._daemon(host, ["slurmd", "-D", "-N", name, "-f", str(self._file)])
        self._until(self._is_ready, "slurmd")

    def run(
        self,
        command: Sequence[str],
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command such as srun on the first host."""
        given = {**self.environment, **(environment or {})}
        return self._hosts.run(0, command, timeout, given)

    def _daemon(self, host: int, command: list[str]) -> None:
        name = f"{command[0]}-{host}.out"
        with open(self._folder / name, "w") as output:
            self._hosts.start(
                host,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
            )

    def _is_ready(self) -> bool:
        shown = self.run(["sinfo", "--noheader", "-N", "-o", "%t"]).stdout.split()
        return shown == ["idle"] * len(self._hosts.names)

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _SECONDS
        while not is_so():
            if time.monotonic() > until:
                said = "".join(
                    f"{path.name}: {path.read_text()[-2_000:]}\n"
                    for path in sorted(self._folder.glob("*.out"))
                )
                raise AssertionError(f"{what} is not ready after {_SECONDS} s:\n{said}")
            time.sleep(0.1)
