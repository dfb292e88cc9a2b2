"""Identity of a process in a job of an engine: torchrun, srun, mpirun, a JobSet.

Every engine sets variables of its own. They are read once, checked for consistency, and converted
to a `Job`. The process of rank 0 is the client; on every other host the process with local rank 0
starts the host's workers; the other processes only occupy their slots.

Sources: torch's ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` (torchrun), the
section "OUTPUT ENVIRONMENT VARIABLES" of srun(1), the FAQ of Open MPI 4 on OMPI_COMM_WORLD_*, and
MPICH's ``src/pm/hydra/proxy/pmip_cb.c`` (PMI_RANK, MPI_LOCALRANKID).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from lazygt.errors import LaunchError
from lazygt.runtime.cluster import ENGINE_VARIABLES

#: First port and number of ports derived from a job's name: below Linux's ephemeral ports.
_PORTS: Final = (15_000, 15_000)
_DEFAULT_PORT = 29_400
_YES = {"1", "true", "True"}
#: Variables of a process that is one of several; `be_alone` unsets them.
_OF_SEVERAL = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_(RUN_ID|USE_AGENT_STORE)|OMPI_COMM_WORLD_\w+|PMIX?_\w+|MPI_LOCAL\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NPROCS|NTASKS\w*|TASKS_PER_NODE|STEP_\w+)"
    r"|JOB_COMPLETION_INDEX"
)
#: Process id -> its job, once the job's variables are unset; a forked child has none.
_attached_jobs: dict[int, Job] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """Process of a job."""

    #: ``torchrun``, ``slurm``, ``openmpi``, ``hydra``, or ``generic`` for any other that sets RANK
    #: and WORLD_SIZE, as a Kubernetes JobSet does
    engine: str
    #: rank_variable, local_rank_variable: the engine's variables for rank and local rank; the
    #: second is "" if each host has one process
    rank_variable: str
    local_rank_variable: str
    rank: int  # rank of this process in the job; 0 is the client
    world_size: int  # number of processes of the job
    local_rank: int  # rank of this process on its host; 0 leads the host
    local_world_size: int  # number of processes that the engine started on this host
    host: int | None  # number of this host, or None if the engine does not set it
    #: number of hosts, or None if the engine does not set it; then there are several
    hosts: int | None
    address: str  # address of rank 0; "" on a single host if the engine does not set it
    port: int  # port of rank 0; if ``meets_by_store``, of torchrun's store
    #: True if the port is taken by torchrun's store, in which rank 0 publishes its endpoint; see
    #: `lazygt.runtime.cluster.job_rendezvous`
    meets_by_store: bool = False
    name: str = ""  # distinguishes this job, and its restarts, from others

    @property
    def is_client(self) -> bool:
        return self.rank == 0

    @property
    def is_on_one_host(self) -> bool:
        return self.world_size == self.local_world_size

    @property
    def leads_host(self) -> bool:
        """True if this process starts its host's workers, for a client on another host."""
        return self.local_rank == 0 and not self.is_client

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Job | None:
        """Return the job that this process belongs to.

        Returns:
            None if no engine started this process, it started nothing else, or the process is a
            worker of a session.

        Raises:
            LaunchError: the variables contradict one another, or some are missing.
        """
        if environment.get("LAZYGT_WORKER"):
            return None
        variables = _Variables(environment)
        reader = next((read for variable, read in _ENGINES if environment.get(variable)), None)
        if reader is None:
            _check_world_size(variables)
            return None
        job = reader(variables)
        if job.world_size == 1:
            return None
        _check(job)
        return job


def may_be_of_several() -> bool:
    """Return whether this process may belong to a job with several processes."""
    return os.getpid() in _attached_jobs or not ENGINE_VARIABLES.isdisjoint(os.environ)


def job_here() -> Job | None:
    """Return the job of this process; see `Job.from_environment`."""
    return _attached_jobs.get(os.getpid()) or Job.from_environment(os.environ)


def be_alone(job: Job, environment: MutableMapping[str, str] = os.environ) -> None:
    """Unset the job's variables, so that the client's program appears as its only process.

    Training libraries would otherwise look for the job's other processes, and wait for them for
    ever; so would programs that this one starts.
    """
    _attached_jobs[os.getpid()] = job
    for name in filter(_OF_SEVERAL.fullmatch, list(environment)):
        del environment[name]


class _Variables:
    """Environment variables with typed access."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def number(self, name: str, advice: str = "") -> int:
        """Return the number in a variable that must be set."""
        if not self.text(name):
            raise LaunchError(name, f"is not set. {advice or 'The engine sets it: start anew.'}")
        return self.number_or(name, 0)

    def number_or(self, name: str, default: int) -> int:
        """Return the number in a variable, or a default if it is not set."""
        text = self.text(name)
        if not text:
            return default
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise LaunchError(name, f"is {text!r}: expected a number of at least 0")
        return int(text)

    def port(self, default: int) -> int:
        """Return the port of rank 0: LAZYGT_PORT, MASTER_PORT or a default."""
        name = "LAZYGT_PORT" if self.text("LAZYGT_PORT") else "MASTER_PORT"
        return self.port_in(name, self.number_or(name, default))

    def port_in(self, name: str, number: int) -> int:
        """Check and return a port read from a variable."""
        if not 0 < number < 1 << 16:
            raise LaunchError(name, f"is {number}: expected a port, 1 to 65535")
        return number

    def address(self, is_on_one_host: bool, example: str) -> str:
        """Return the address of rank 0, required for several hosts."""
        address = self.text("MASTER_ADDR")
        if not address and not is_on_one_host:
            raise LaunchError(
                "MASTER_ADDR",
                f"is not set, and the job has several hosts: set it to the name or address of the "
                f"host of rank 0, {example}",
            )
        return address


# -- engines ---------------------------------------------------------------------------------------


def _torchrun(variables: _Variables) -> Job:
    """Read a job of torchrun."""
    by_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") in _YES
    run = variables.text("TORCHELASTIC_RUN_ID")
    restarts = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0)
    port = variables.port(_DEFAULT_PORT)
    if by_store:
        port = variables.port_in("MASTER_PORT", variables.number("MASTER_PORT"))
    return Job(
        engine="torchrun",
        rank_variable="RANK",
        local_rank_variable="LOCAL_RANK",
        rank=variables.number("RANK"),
        world_size=variables.number("WORLD_SIZE"),
        local_rank=variables.number("LOCAL_RANK"),
        local_world_size=variables.number("LOCAL_WORLD_SIZE"),
        host=variables.number("GROUP_RANK"),
        hosts=variables.number("GROUP_WORLD_SIZE"),
        address=variables.address(False, "as torchrun does"),
        port=port,
        meets_by_store=by_store,
        name=f"{run}/{restarts}",
    )


def _slurm(variables: _Variables) -> Job:
    """Read a job of SLURM's srun."""
    host = variables.number("SLURM_NODEID")
    hosts = variables.number_or("SLURM_STEP_NUM_NODES", variables.number_or("SLURM_NNODES", 1))
    counts = _task_counts(variables)
    if not host < hosts == len(counts):
        raise LaunchError(
            "SLURM_STEP_TASKS_PER_NODE",
            f"is of {len(counts)} hosts, SLURM_STEP_NUM_NODES is {hosts}, and this is host "
            f"{host}: don't set or pass on SLURM_* variables by hand",
        )
    job = variables.text("SLURM_JOB_ID")
    name = f"{job}.{variables.text('SLURM_STEP_ID')}"
    first = first_of_hosts(variables.text("SLURM_STEP_NODELIST"))
    return Job(
        engine="slurm",
        rank_variable="SLURM_PROCID",
        local_rank_variable="SLURM_LOCALID",
        rank=variables.number("SLURM_PROCID"),
        world_size=variables.number("SLURM_STEP_NUM_TASKS"),
        local_rank=variables.number("SLURM_LOCALID"),
        local_world_size=counts[host],
        host=host,
        hosts=hosts,
        address=variables.text("MASTER_ADDR") or first,
        port=variables.port(_port_of(name)),
        name=name,
    )


def _openmpi(variables: _Variables) -> Job:
    """Read a job of Open MPI's mpirun."""
    size = variables.number("OMPI_COMM_WORLD_SIZE")
    local_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")
    name = variables.text("PMIX_NAMESPACE") or variables.text("OMPI_MCA_ess_base_jobid")
    return Job(
        engine="openmpi",
        rank_variable="OMPI_COMM_WORLD_RANK",
        local_rank_variable="OMPI_COMM_WORLD_LOCAL_RANK",
        rank=variables.number("OMPI_COMM_WORLD_RANK"),
        world_size=size,
        local_rank=variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_size,
        host=0 if size == local_size else None,
        hosts=1 if size == local_size else None,
        address=variables.address(size == local_size, "as in `mpirun -x MASTER_ADDR=host0`"),
        port=variables.port(_port_of(name)),
        name=name,
    )


def _hydra(variables: _Variables) -> Job:
    """Read a job of MPICH's mpiexec (Hydra)."""
    size = variables.number("PMI_SIZE")
    local_size = variables.number("MPI_LOCALNRANKS")
    return Job(
        engine="hydra",
        rank_variable="PMI_RANK",
        local_rank_variable="MPI_LOCALRANKID",
        rank=variables.number("PMI_RANK"),
        world_size=size,
        local_rank=variables.number("MPI_LOCALRANKID"),
        local_world_size=local_size,
        host=0 if size == local_size else None,
        hosts=1 if size == local_size else None,
        address=variables.address(size == local_size, "as in `mpiexec -genv MASTER_ADDR host0`"),
        port=variables.port(_DEFAULT_PORT),
        name="hydra",
    )


def _generic(variables: _Variables) -> Job:
    """Return the job by RANK and WORLD_SIZE; without LOCAL_RANK, one process per host."""
    rank = variables.number("RANK")
    size = variables.number("WORLD_SIZE", "Set it to the number of processes of the job.")
    has_local = bool(variables.text("LOCAL_RANK"))
    advice = "Set it to the number of processes on this host, beside LOCAL_RANK."
    local_size = variables.number("LOCAL_WORLD_SIZE", advice) if has_local else 1
    local_rank = variables.number_or("LOCAL_RANK", 0)
    is_even = local_size > 0 and size % local_size == 0
    return Job(
        engine="generic",
        rank_variable="RANK",
        local_rank_variable="LOCAL_RANK" if has_local else "",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        host=rank // local_size if is_even and rank % local_size == local_rank else None,
        hosts=size // local_size if is_even else None,
        address=variables.address(size == local_size, "as in `export MASTER_ADDR=host0`"),
        port=variables.port(_DEFAULT_PORT),
        name="generic",
    )


#: A variable that each engine sets, and its reader, the innermost engine first: torchrun is run
#: under srun, and mpirun in a job of SLURM.
_ENGINES: Final[tuple[tuple[str, Callable[[_Variables], Job]], ...]] = (
    ("TORCHELASTIC_RUN_ID", _torchrun),
    ("OMPI_COMM_WORLD_RANK", _openmpi),
    ("MPI_LOCALNRANKS", _hydra),
    ("SLURM_STEP_NUM_TASKS", _slurm),
    ("RANK", _generic),
)


def _check_world_size(variables: _Variables) -> None:
    """Raise LaunchError for a WORLD_SIZE above 1 without a rank."""
    if variables.text("WORLD_SIZE") not in ("", "0", "1"):
        variables.number("RANK", "Set it to this process's number, or unset WORLD_SIZE.")


def _check(job: Job) -> None:
    """Raise LaunchError for a job with contradictory numbers."""
    pairs = (
        (job.rank_variable, job.rank, job.world_size, "in all"),
        (job.local_rank_variable, job.local_rank, job.local_world_size, "on this host"),
    )
    for variable, rank, size, where in pairs:
        if not rank < size:
            raise LaunchError(
                variable or "LOCAL_RANK", f"is {rank}, but there are {size} processes {where}"
            )
    if job.local_world_size > job.world_size or job.local_rank > job.rank:
        raise LaunchError(
            job.rank_variable,
            f"is {job.rank} of {job.world_size} processes, but the process is {job.local_rank} of "
            f"{job.local_world_size} on its host: a host can't have more than the job",
        )


def _port_of(name: str) -> int:
    """Return a port that the processes of a job derive from its name."""
    return _PORTS[0] + zlib.crc32(name.encode()) % _PORTS[1]


# -- SLURM's compressed lists ----------------------------------------------------------------------


def _task_counts(variables: _Variables) -> list[int]:
    """Return the number of tasks of each host, from SLURM's form ``2(x3),1``."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = variables.text(name)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise LaunchError(name, f"is {text!r}: expected tasks a host, such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_of_hosts(hosts: str) -> str:
    """Return the first host of a SLURM hostlist, such as ``rack1-[07-09,12],b``.

    Raises:
        LaunchError: the text is not such a list.
    """
    match = re.match(r"[^,\[\]]*(?:\[[^\[\]]+\][^,\[\]]*)*", hosts)
    if match is None or not match[0]:
        raise LaunchError(
            "SLURM_STEP_NODELIST", f"is {hosts!r}: expected hosts, or set MASTER_ADDR"
        )
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", match[0])
