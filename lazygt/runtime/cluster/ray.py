"""Hosts from Ray: a placement group with one bundle per worker, and an agent on each node in use.

Ray places the bundles and detects lost nodes; it transfers no tensors and no plans, and of pickles
only the name of a class. Ray's restarts are off, since lazygt recovers itself: a bundle that Ray
has placed anew gets a new agent. Only public keys go through Ray, so an eavesdropper on Ray cannot
read the session.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq

from lazygt.errors import LaunchError
from lazygt.net.channel import MAX_MESSAGE_BYTES, Keys
from lazygt.net.connection import Listener
from lazygt.runtime.cluster.cluster_link import ClusterLink
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.launch.launcher import same_package
from lazygt.runtime.launch.start_plan import LinkSpec

_log = logging.getLogger("lazygt")

#: Bytes of the longest message of a worker, with its envelope.
_MAX_MESSAGE: Final = MAX_MESSAGE_BYTES + (1 << 16)
#: Seconds that Ray may take to place lost bundles anew, before other hosts take their workers.
ANOTHER_SECONDS = 60.0
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.5
AGENT = "lazygt.runtime.cluster.agent"


class RaySlot:
    """Actor of a bundle with resources for one worker; one slot of each node starts the agent.

    Ray loads this class by its name, so lazygt must be installed on its nodes; the actor exchanges
    only texts.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def where(self, node: str) -> tuple[str, str, list[str]]:
        """Return the node's id and name, and the GPUs of this bundle.

        Args:
            node: the id, if the caller knows it, else "".
        """
        ray: Any = importlib.import_module("ray")
        context: Any = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return node or str(context.get_node_id()), socket.gethostname(), gpus

    def start(self, gpus: list[str]) -> str:
        """Start the agent with these GPUs; return its public key."""
        environment = {**os.environ, **same_package()}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", AGENT],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._read_line()

    def join(self, request: str) -> str:
        """Let the agent join a session; return "" or the error."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._read_line()

    def _read_line(self) -> str:
        """Return the next line of the agent's output; RuntimeError if the agent has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise RuntimeError(f"the agent has ended with exit code {self._process.wait()}")
        return line[:-1]


class _ActorGone(LaunchError):
    """Error of an ended actor: Ray had placed it on a dead node, not known to be dead yet."""


@dataclass(frozen=True, slots=True)
class RayBundle:
    """Bundle, with its placement by Ray."""

    bundle: int  # number of the bundle in the placement group
    actor: Any  # handle of its `RaySlot`
    node: str  # id of the node; name: name of the machine
    name: str
    gpus: tuple[str, ...]


class RayHosts:
    """`HostLauncher` on Ray.

    Connects to the cluster that RAY_ADDRESS names, unless the program has called ``ray.init``.

    Args:
        workers: number of bundles to place.
        device: ``cpu``, or ``cuda`` for a GPU in each bundle.

    Raises:
        LaunchError: Ray is not installed.
    """

    def __init__(self, workers: int, device: str = "cpu") -> None:
        self._ray = _ray()
        self._workers = workers
        self._bundle_resources = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
        self._is_ours = not self._ray.is_initialized()
        self._group: Any = None
        self._placements: dict[int, RayBundle] = {}
        #: rank -> its bundle, which never changes
        self._bundles: list[int] = []
        self._hosts: dict[int, RemoteHost] = {}
        self._keys = Keys.generate()
        self._agents: dict[str, str] = {}
        self._listener: Listener | None = None

    def start(self, seconds: float) -> Sequence[tuple[RemoteHost, int]]:
        """See `HostLauncher`. Ranks on one node follow one another."""
        until = time.monotonic() + seconds
        try:
            if self._is_ours:
                self._join_cluster(seconds)
            self._place_gang(seconds)
            self._listen()
            hosts = self._start_agents(range(self._workers), until)
        except BaseException:
            self.close()
            raise
        self._bundles = [bundle for _, bundles in hosts for bundle in bundles]
        return [(host, len(bundles)) for host, bundles in hosts]

    def another(self, rank: int) -> RemoteHost:
        """See `HostLauncher`: the agent on the node to which Ray has moved the bundle."""
        lost = self._hosts[self._bundles[rank]]
        if lost.lost:
            bundles = [bundle for bundle, host in self._hosts.items() if host is lost]
            self._restart_agents(bundles, time.monotonic() + ANOTHER_SECONDS)
        return self._hosts[self._bundles[rank]]

    def close(self) -> None:
        """See `HostLauncher`."""
        for host in set(self._hosts.values()):
            host.connection.close("the session has ended")
        self._hosts.clear()
        if self._listener is not None:
            self._listener.close("the session has ended")
            self._listener = None
        for placement in self._placements.values():
            self._kill(placement.actor)
        self._placements.clear()
        group, self._group = self._group, None
        if group is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(group)
        if self._is_ours and self._ray.is_initialized():
            self._ray.shutdown()

    # -- placement -------------------------------------------------------------------------

    def _join_cluster(self, seconds: float) -> None:
        """Join the cluster of RAY_ADDRESS.

        Ray itself would try for minutes if there is none.
        """
        host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
        try:
            if host and port.isdigit() and "//" not in host:
                socket.create_connection((host.strip("[]"), int(port)), seconds).close()
            self._ray.init(log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise LaunchError("RAY_ADDRESS", f"leads to no cluster of Ray: {error}") from error

    def _place_gang(self, seconds: float) -> None:
        """Create a placement group of all bundles, on as few nodes as possible."""
        bundles = [dict(self._bundle_resources)] * self._workers
        self._group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(seconds):
            raise LaunchError("", self._describe_shortage(seconds))

    def _describe_shortage(self, seconds: float) -> str:
        """Describe the requested resources, and each node's total and free ones."""
        needed = _amounts(
            {name: count * self._workers for name, count in self._bundle_resources.items()}
        )
        available = self._ray.available_resources()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        lines = [
            f"  {node['NodeManagerHostname']}: {_amounts(self._of(node['Resources'])) or 'nothing'}"
            for node in nodes
        ]
        free = _amounts(self._of(available)) or "nothing"
        return (
            f"Ray has not placed {self._workers} workers within {seconds:g} s: asked for {needed}, "
            f"free in the whole cluster: {free}. Its nodes have in all:\n"
            + "\n".join(lines)
            + "\n  Ask for fewer workers, wait for other jobs, add nodes, or give it longer: "
            "lazygt.session(workers=Workers(start_timeout=...))"
        )

    def _of(self, resources: Mapping[str, float]) -> dict[str, float]:
        """Return the amounts of the resources that bundles need."""
        return {name: resources.get(name, 0.0) for name in self._bundle_resources}

    def _start_slots(self, bundles: Sequence[int], until: float) -> list[RayBundle]:
        """Start a new actor in each of the bundles, on its current node; return the placements."""
        ray = self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {"num_cpus": 1, "num_gpus": self._bundle_resources.get("GPU", 0)}
        remote = ray.remote(max_restarts=0, max_task_retries=0, **options)(RaySlot)
        for bundle in bundles:
            if (previous := self._placements.pop(bundle, None)) is not None:
                self._kill(previous.actor)
        actors = [
            remote.options(
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in bundles
        ]
        try:
            answers = self._get([actor.where.remote("") for actor in actors], until)
        except BaseException:
            for actor in actors:
                self._kill(actor)
            raise
        placements = [
            RayBundle(bundle, actor, node, name, tuple(gpus))
            for bundle, actor, (node, name, gpus) in zip(bundles, actors, answers, strict=True)
        ]
        self._placements |= {placement.bundle: placement for placement in placements}
        return placements

    def _kill(self, actor: Any) -> None:
        """End an actor, if it still runs."""
        with suppress(self._ray.exceptions.RayError, ValueError):  # it has gone, or Ray has
            self._ray.kill(actor)

    def _get(self, references: Sequence[Any], until: float) -> list[Any]:
        """Return the actors' answers, with Ray's errors converted to LaunchError."""
        ray = self._ray
        try:
            answers: list[Any] = ray.get(references, timeout=max(until - time.monotonic(), 0.1))
        except ray.exceptions.GetTimeoutError as error:
            raise LaunchError("", "Ray's nodes have not answered in time") from error
        except ray.exceptions.RayActorError as error:
            raise _ActorGone("", f"Ray has lost a node, or lazygt on it: {error}") from error
        except ray.exceptions.RayError as error:
            raise LaunchError(
                "", f"Ray could not run lazygt on a node (is it installed there?): {error}"
            ) from error
        return answers

    # -- agents ----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Address of this host, as Ray's nodes know it."""
        return str(self._ray.util.get_node_ip_address())

    def _listen(self) -> None:
        """Open the listener for the agents."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._listener = Listener(
            context, self.address, 0, self._keys, self._agents.get, _MAX_MESSAGE
        )

    def _start_agents(
        self, bundles: Sequence[int], until: float
    ) -> list[tuple[RemoteHost, list[int]]]:
        """Start an agent on each node of these bundles; return (host, its bundles) pairs."""
        nodes: dict[str, list[RayBundle]] = {}
        for placement in self._start_slots(bundles, until):
            nodes.setdefault(placement.node, []).append(placement)
        groups = list(nodes.values())
        starts = [
            group[0].actor.start.remote([gpu for placement in group for gpu in placement.gpus])
            for group in groups
        ]
        for key, group in zip(self._get(starts, until), groups, strict=True):
            self._agents[key] = group[0].name
        return self._accept_agents(groups, until)

    def _restart_agents(self, bundles: Sequence[int], until: float) -> None:
        """Start agents for bundles of a lost node, once Ray has placed them anew."""
        while True:
            try:
                self._start_agents(bundles, until)
                return
            except _ActorGone:
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _accept_agents(
        self, groups: Sequence[Sequence[RayBundle]], until: float
    ) -> list[tuple[RemoteHost, list[int]]]:
        """Wait until the agent of each group has connected; return (host, its bundles) pairs.

        Args:
            groups: placements by node; the first one of each has the agent.
        """
        assert self._listener is not None
        waiting = [
            group[0].actor.join.remote(self._join_request(number, until))
            for number, group in enumerate(groups)
        ]
        hosts: dict[int, RemoteHost] = {}
        while len(hosts) < len(groups):
            done: list[Any] = []
            if waiting:
                done, waiting = self._ray.wait(
                    waiting, num_returns=len(waiting), timeout=_POLL_SECONDS
                )
            for error in filter(None, self._get(done, until) if done else []):
                raise LaunchError("", f"an agent could not join the session: {error}")
            while (connection := self._listener.accept()) is not None:
                number = json.loads(connection.hello)["rank"]
                hosts[number] = RemoteHost(groups[number][0].name, connection)
            if time.monotonic() > until:
                raise LaunchError("", f"{len(hosts)} of {len(groups)} agents have come in time")
        for number, group in enumerate(groups):
            self._hosts |= {placement.bundle: hosts[number] for placement in group}
        return [
            (hosts[number], [placement.bundle for placement in group])
            for number, group in enumerate(groups)
        ]

    def _join_request(self, number: int, until: float) -> str:
        """Return the line of JSON with which an agent connects; see `agent`."""
        assert self._listener is not None
        return json.dumps(
            {
                "endpoint": self._listener.address,
                "public": self._keys.public,
                "rank": number,
                "max_message": _MAX_MESSAGE,
                "seconds": max(until - time.monotonic(), 0.1),
            }
        )


def open_ray(spec: LinkSpec) -> ClusterLink:
    """Start a session's workers on nodes of Ray, as Ray has placed them.

    Raises:
        LaunchError: Ray is not installed, or has not placed all of them in time.
    """
    launcher = RayHosts(spec.world_size, spec.device)
    with ExitStack() as undo:
        hosts = launcher.start(spec.start_timeout)
        undo.callback(launcher.close)
        link = ClusterLink.at(launcher.address, spec, 0, hosts, launcher)
        undo.pop_all()
    return link


def _amounts(resources: Mapping[str, float]) -> str:
    """Format resources, such as ``2 CPU, 1 GPU``."""
    return ", ".join(f"{count:g} {name}" for name, count in resources.items())


def _ray() -> Any:
    """Import and return Ray, which is optional.

    Raises:
        LaunchError: Ray is not installed.
    """
    try:
        module: Any = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise LaunchError(
            "", "lazygt.session(launcher='ray') needs Ray: pip install 'lazygt[ray]'"
        ) from error
    return module
