"""Opening of a session's link: start the workers of a config."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lazygt.config import Config
from lazygt.errors import LaunchError
from lazygt.graph.mesh import Mesh
from lazygt.host.processes import in_some_directory, start_directory
from lazygt.runtime.cluster import ENGINE_VARIABLES
from lazygt.runtime.link import Link
from lazygt.runtime.wire import hand_over

if TYPE_CHECKING:
    from lazygt.runtime.cluster.environment import Job
    from lazygt.runtime.launch.start_plan import LinkSpec


def device_type(config: Config) -> str:
    """Return the type of device that the workers compute on."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _job(requested: bool) -> Job | None:
    """Return the job that this process belongs to, or None.

    Few programs belong to one, so the reader of jobs is loaded only if needed.

    Args:
        requested: True if the user has requested ``launcher="environment"``.
    """
    # The client of a job has unset the job's variables, after it has loaded the reader.
    loaded = "lazygt.runtime.cluster.environment" in sys.modules
    if not (requested or loaded) and ENGINE_VARIABLES.isdisjoint(os.environ):
        return None
    # why: see above
    from lazygt.runtime.cluster.environment import job_here, may_be_of_several

    return job_here() if requested or may_be_of_several() else None


def by_engine(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a session's settings with those of the engine that started this process.

    Does not return in a process that the engine started as one of the workers.

    Raises:
        LaunchError: the engine's variables contradict each other, or the settings.
        SystemExit: the program's rank 0, which is the client, has ended.
    """
    completed = dict(settings)
    launcher = completed.get("launcher") or os.environ.get("LAZYGT_LAUNCHER") or "auto"
    pool = completed.get("pool") or os.environ.get("LAZYGT_POOL")
    if launcher not in {"auto", "environment"} or pool:
        return completed
    completed["launcher"] = "process"
    job = _job(requested=launcher == "environment")
    if job is None:
        if launcher == "environment":
            raise LaunchError(
                "",
                "lazygt.session(launcher='environment'): no engine has started this process as one "
                "of several. Start the program with torchrun, srun, mpirun ... (docs/clusters.md), "
                "or leave launcher= out",
            )
        return completed
    # why: few programs are started by an engine
    from lazygt.runtime.cluster import attach

    config = Config.load(**{**completed, "launcher": "environment"})
    if job.rank != 0:
        attach.serve(job, config.start_timeout)
    return attach.asked(job, completed | {"launcher": "environment"})


def open_link(config: Config, mesh: Mesh, copier: str = "") -> Link:
    """Start the workers of a mesh and return their link.

    Args:
        copier: ``module:attribute`` of a factory of ``transfer.copier.Copier``, loaded when
            needed.

    Raises:
        ValueError: there is no such launcher, or it can't start so many.
        WorkerDied, WorkerFrozen: a worker did not come up.
    """
    open_workers = LAUNCHERS.get(config.launcher)
    if open_workers is None:
        *names, last = map(repr, LAUNCHERS)
        raise ValueError(
            f"lazygt.session(launcher={config.launcher!r}): expected {', '.join(names)} or {last}"
        )
    if start_directory() is not None:
        _load_now()
    return open_workers(config, mesh, copier)


def _inline(config: Config, mesh: Mesh, copier: str) -> Link:
    """Return a link to a worker in the client's own process."""
    if config.workers != 1:
        raise ValueError("lazygt.session(launcher='inline') has one worker: the client itself")
    # why: only an inline session runs plans in the client; the launcher's module loads the sockets
    from lazygt.runtime.launch.launcher import load_named
    from lazygt.runtime.worker.inline import InlineLink
    from lazygt.runtime.worker.worker import Worker

    worker = Worker(
        device_type(config),
        config=config,
        inline=True,
        copier=(lambda device: load_named(copier)(device)) if copier else None,
        encode=hand_over,
    )
    return InlineLink(worker)


def _dry(config: Config, mesh: Mesh, copier: str) -> Link:
    """Return a link to one worker that computes nothing and stands for all workers."""
    # why: few sessions are dry
    from lazygt.runtime.worker.inline import DryWorker, InlineLink

    limits = {"max_plans": config.max_plans, "max_plan_bytes": config.max_plan_bytes}
    return InlineLink(DryWorker(Config.load(**limits)))


def _processes(launcher: str, config: Config, mesh: Mesh, copier: str) -> Link:
    """Start worker processes with the `Launcher` named ``module:attribute``."""
    # why: an inline session needs neither sockets nor processes
    from lazygt.runtime.launch.launcher import load_named
    from lazygt.runtime.launch.process_link import ProcessLink

    return ProcessLink(link_spec(config, mesh, copier), load_named(launcher)())


def _attached(config: Config, mesh: Mesh, copier: str) -> Link:
    """Start workers on all hosts of the job that an engine has started."""
    # why: few programs are started by an engine
    from lazygt.runtime.cluster import attach

    return attach.open_attached(link_spec(config, mesh, copier))


def _on_ray(config: Config, mesh: Mesh, copier: str) -> Link:
    """Start workers on hosts that Ray assigns."""
    # why: few programs ask Ray, which is optional
    from lazygt.runtime.cluster.ray import open_ray

    return open_ray(link_spec(config, mesh, copier))


def link_spec(config: Config, mesh: Mesh, copier: str) -> LinkSpec:
    """Return the `LinkSpec` of a config."""
    # why: an inline session needs neither sockets nor processes
    from lazygt.runtime.launch.start_plan import LinkSpec

    # without a setting each host has its own cache directory
    cache = {"LAZYGT_CACHE_DIR": os.path.abspath(config.cache_dir)} if config.cache_dir else {}
    return LinkSpec(
        world_size=config.workers,
        mesh=str(mesh),
        device=device_type(config),
        threads=config.threads,
        transport=config.transport,
        frozen_after=config.frozen_after,
        copier=copier,
        snapshots=config.recovery == "auto",
        spares=config.spares if config.recovery == "auto" else 0,
        start_timeout=config.start_timeout,
        max_message=config.max_message_bytes,
        environment=cache
        | {
            "LAZYGT_MAX_MESSAGE_BYTES": str(config.max_message_bytes),
            "LAZYGT_MAX_PLANS": str(config.max_plans),
            "LAZYGT_MAX_PLAN_BYTES": str(config.max_plan_bytes),
            "LAZYGT_SHM_THRESHOLD": str(config.shm_threshold),
            "LAZYGT_PLAN_CODE": config.plan_code,
            "LAZYGT_CUDA_GRAPHS": config.cuda_graphs,
            "LAZYGT_MAX_CUDA_GRAPH_BYTES": str(config.max_cuda_graph_bytes or ""),
            "LAZYGT_SHIP_CODE": str(int(config.ship_code)),
        },
    )


#: ``launcher=`` -> function that opens the workers of a config. A new way to start worker processes
#: is a `Launcher` in a file beside this one, and a line here like that of "process".
LAUNCHERS: dict[str, Callable[[Config, Mesh, str], Link]] = {
    "process": partial(_processes, "lazygt.runtime.launch.launcher:Launcher"),
    "environment": _attached,
    "ray": _on_ray,
    "inline": _inline,
    "dry": _dry,
}


def _load_now() -> None:
    """Import modules that torch would import at the first op, where the import would fail."""
    with in_some_directory():
        importlib.import_module("torch.distributed.tensor")  # for dispatch to a subclass
        importlib.import_module("torch._dynamo")  # for meta kernels written in Python
