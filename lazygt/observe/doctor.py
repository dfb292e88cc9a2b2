"""`lazygt doctor`: checks of this machine, and of a session on it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lazygt import native
from lazygt.config import Config
from lazygt.errors import MachineError
from lazygt.host.gpus import host_gpus, why_none
from lazygt.host.processes import cpu_quota
from lazygt.machine import CALIBRATED, calibrated_path, default_machine, machine_of
from lazygt.native import build

OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY = 2 << 30

Status = Literal["ok", "warn", "fail"]
SessionFactory = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fail`: lazygt can't work; `warn`: it works, but not as well as it could."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def report(open_session: SessionFactory | None = None) -> list[Check]:
    """Run all checks of this machine (the functions below), and return their findings.

    Args:
        open_session: opens a session with one worker, as `lazygt.session` does. Without it no
            session is tried.
    """
    checks = [
        python(), torch_version(), cuda(), collectives(), compiler(), recorder(), plan_code(),
        cores(), threads(), memory(), memfd(), pidfd(), costs(),
    ]  # fmt: skip
    return checks if open_session is None else [*checks, session(open_session)]


def python() -> Check:
    """Check the version of Python, and the platform."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", "fail", detail, "lazygt needs Python 3.11 or newer")
    if platform.system() != "Linux":
        return Check("python", "warn", detail, "worker processes are tested on Linux only")
    return Check("python", "ok", detail)


def torch_version() -> Check:
    """Check the version of torch."""
    if version_of(torch.__version__) < OLDEST_TORCH:
        return Check("torch", "fail", torch.__version__, "install torch 2.11 or newer")
    return Check("torch", "ok", torch.__version__)


def version_of(text: str) -> tuple[int, int]:
    """Return major and minor version: (2, 13) of "2.13.0a0+cpu"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def cuda() -> Check:
    """Check whether torch sees the GPUs that the driver knows."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        advice = why_none() if host_gpus() else ""
        status: Status = "warn" if advice else "ok"
        return Check("cuda", status, f"no GPU; torch is {built}; workers run on the CPU", advice)
    gpus = "; ".join(map(gpu, range(torch.cuda.device_count())))
    return Check("cuda", "ok", f"{gpus}; CUDA graphs of hot plans: {Config.load().cuda_graphs}")


def gpu(index: int) -> str:
    """Describe a GPU: index, name and memory."""
    facts = torch.cuda.get_device_properties(index)
    return f"{index}: {facts.name}, {gib(facts.total_memory)}"


def collectives() -> Check:
    """Check the backends of collectives: NCCL for several GPUs."""
    gpus = torch.cuda.device_count()
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    detail = "sockets and shared memory of this host, which only you can reach"
    if gpus > 1 and not nccl:
        return Check("collectives", "warn", detail, "several GPUs, but torch has no NCCL")
    if gpus and nccl:
        detail += f"; NCCL for sessions of up to {gpus} workers on GPUs, one each"
    return Check("collectives", "ok", detail)


def compiler() -> Check:
    """Check for a C++ compiler."""
    if path := build.compiler():
        return Check("compiler", "ok", path)
    advice = "install g++ or clang++, or set CXX: without one no plan can be compiled for the CPU"
    return Check("compiler", "warn", "no C++ compiler", advice)


def recorder() -> Check:
    """Check this process's recorder, and the native one if it was asked for."""
    choice = native.choice()
    detail = f"{choice.recorder}: {choice.reason}"
    if choice.missing:
        return Check("recorder", "fail", detail, native.ADVICE)
    return Check("recorder", "ok", detail)


def plan_code() -> Check:
    """Check the code, native or Python, that runs plans after their first run on workers."""
    wanted = Config.load().plan_code
    loaded = native.load()
    if wanted == "native" and loaded.module is None:
        return Check("plan code", "fail", f"no native one: {loaded.reason}", native.ADVICE)
    if wanted == "python" or loaded.module is None:
        reason = "LAZYGT_PLAN_CODE=python" if wanted == "python" else loaded.reason
        return Check("plan code", "ok", f"python: {reason}")
    return Check("plan code", "ok", f"native: LAZYGT_PLAN_CODE={wanted}, and {loaded.reason}")


def cores() -> Check:
    """Check the usable cores against the container's quota."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{usable} of {there} usable, load {os.getloadavg()[0]:.1f}"
    quota = cpu_quota()
    if quota is not None and quota < usable:
        advice = (
            f"the container may use {quota:g} cores: pass workers=Workers(threads=...) to "
            f"lazygt.session"
        )
        return Check("cores", "warn", f"{detail}, quota {quota:g}", advice)
    if usable == 1:
        return Check("cores", "warn", detail, "client and worker share the only core")
    return Check("cores", "ok", detail)


def threads() -> Check:
    """Check torch's number of threads against the cores."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    detail = (
        f"torch uses {torch.get_num_threads()}; {', '.join(variables) or 'no OMP_* variable set'}"
    )
    if torch.get_num_threads() > len(os.sched_getaffinity(0)):
        return Check("threads", "warn", detail, "more threads than cores: lower OMP_NUM_THREADS")
    return Check("threads", "ok", detail)


def memory() -> Check:
    """Check the available memory."""
    available = available_memory()
    if available is None:
        return Check("memory", "warn", "unknown", "/proc/meminfo can't be read")
    detail = f"{gib(available)} available"
    if available < LITTLE_MEMORY:
        return Check("memory", "warn", detail, "each worker loads torch: about 0.3 GiB by itself")
    return Check("memory", "ok", detail)


def available_memory() -> int | None:
    """Return the available memory in bytes, by /proc/meminfo and the control group's limit.

    None: /proc/meminfo does not tell.
    """
    words = read_words("/proc/meminfo")
    if "MemAvailable:" not in words:
        return None
    available = int(words[words.index("MemAvailable:") + 1]) * 1024
    limit, used = (
        read_words("/sys/fs/cgroup/memory.max"),
        read_words("/sys/fs/cgroup/memory.current"),
    )
    if limit and used and limit[0] != "max":
        available = min(available, int(limit[0]) - int(used[0]))
    return available


def read_words(path: str) -> list[str]:
    """Return the words of a small system file; none if it can't be read."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def memfd() -> Check:
    """Check for anonymous memory files, by which large tensors are shared."""
    try:
        os.close(os.memfd_create("lazygt-doctor"))
    except (AttributeError, OSError) as error:
        advice = "large tensors will travel through the socket, several times slower"
        return Check("shared memory", "warn", f"no memfd: {error}", advice)
    return Check("shared memory", "ok", "memfd")


def pidfd() -> Check:
    """Check for process descriptors, by which the end of a worker is noticed."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        advice = "the death of a worker is noticed by its socket alone"
        return Check("process watch", "warn", f"no pidfd: {error}", advice)
    return Check("process watch", "ok", "pidfd")


def costs() -> Check:
    """Check the machine model by which sessions plan by default."""
    config = Config.load()
    if config.machine is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        detail = f"plans by the costs of {default_machine(kind)}"
        path = calibrated_path(config.cache_dir)
        advice = f"to plan by {path}: LAZYGT_MACHINE={CALIBRATED}" if path.is_file() else ""
        return Check("costs", "ok", detail, advice)
    try:
        machine = machine_of(config.machine, config.cache_dir)
    except MachineError as error:
        return Check("costs", "fail", str(error), "correct LAZYGT_MACHINE")
    return Check("costs", "ok", f"plans by the costs of {machine}: LAZYGT_MACHINE={config.machine}")


def session(open_session: SessionFactory) -> Check:
    """Open a session, compute something on its worker, and close it."""
    try:
        with open_session():
            values = (torch.arange(4, device="lazygt") * 2 + 1).tolist()
    except Exception as error:  # noqa: BLE001  the doctor reports any error
        advice = "run with LAZYGT_LOG=path and look at its last lines"
        return Check("session", "fail", f"{type(error).__name__}: {error}", advice)
    if values != [1, 3, 5, 7]:
        return Check("session", "fail", f"a worker computed {values}, not [1, 3, 5, 7]")
    return Check("session", "ok", "one worker started, computed and stopped")


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
