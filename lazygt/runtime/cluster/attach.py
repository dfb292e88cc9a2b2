"""Sessions on the hosts of a job that an engine (torchrun, srun, mpirun ...) has started.

The engine starts this program once per worker. Rank 0's process is the client, and starts the
workers of its own host. On each other host the process of local rank 0 becomes the agent, which
starts as many workers as the engine has started processes there; the other processes keep their
slots and do nothing. All of them end with the client.
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import zmq

from lazygt.config import Config
from lazygt.errors import LaunchError
from lazygt.net.channel import MAX_MESSAGE_BYTES
from lazygt.net.connection import Connection, dial
from lazygt.net.keys import derived, token_from
from lazygt.net.listening import Listener
from lazygt.runtime.cluster.agent import serve_client
from lazygt.runtime.cluster.cluster_link import ClusterLink
from lazygt.runtime.cluster.environment import Job, be_alone, job_here
from lazygt.runtime.cluster.job_rendezvous import find, hold, port_to_bind, publish, refusals
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec

# -- refused hosts ---------------------------------------------------------------------------------
# The client reports them while it waits for all hosts of a job. A host that has proved the token
# and runs other versions ends the wait at once, and so does a host that reports in torchrun's store
# that the client has another token. Without that store a host with another token can't be
# distinguished from a stranger: strangers end the wait only if no host with the token has connected
# within `SHARE_FOR_TRUE_HOSTS` of the time limit, and there are at least as many as awaited hosts.

_log = logging.getLogger("lazygt")

#: Share of the time limit in which a host with the token must connect, after the first stranger.
SHARE_FOR_TRUE_HOSTS = 0.1
_ADVICE = (
    "Give LAZYGT_TOKEN, or the file that LAZYGT_TOKEN_FILE names, the same value on all hosts, and "
    "start the job anew"
)


class Refusals:
    """Refused hosts during one wait.

    Args:
        job: job of the client.
        listener: listener of the client, to which hosts connect.
        rejected_by: returns the process that has reported another token in the job's store; "":
            none.
        seconds: time limit of the wait.
    """

    def __init__(
        self, job: Job, listener: Listener, rejected_by: Callable[[], str], seconds: float
    ) -> None:
        self._job, self._listener, self._rejected_by = job, listener, rejected_by
        self._share = SHARE_FOR_TRUE_HOSTS * seconds
        #: time from which strangers may end the wait; None: none has connected
        self._until: float | None = None

    def check(self, has_come: bool) -> None:
        """Check for hosts that will not join.

        Args:
            has_come: True if any host has joined.

        Raises:
            LaunchError: awaited hosts were refused.
        """
        if process := self._rejected_by():
            raise LaunchError(
                "LAZYGT_TOKEN", f"is another one for {process!r} of this job than here. {_ADVICE}"
            )
        if other_versions := dict(self._listener.other_versions):
            self._listener.other_versions.clear()  # a host may start again with the same versions
            differences = "; ".join(
                f"at {address}: {difference}" for address, difference in other_versions.items()
            )
            raise LaunchError(
                self._job.rank_variable,
                f"is of a job on several hosts, one with other versions of lazygt, torch or "
                f"Python, {differences}. Install the same ones on all hosts",
            )
        self._check_strangers(has_come)

    def _check_strangers(self, has_come: bool) -> None:
        """Warn of the first stranger, and raise LaunchError if strangers end the wait."""
        strangers = self._listener.strangers.addresses
        if not any(strangers.values()):
            return
        addresses_with_key = [
            address for address, other_key in strangers.items() if address and other_key
        ]
        addresses = addresses_with_key or ["an unknown address"]
        if self._until is None:
            self._until = time.monotonic() + self._share
            _log.warning(
                "refused %s: no proof of this host's LAZYGT_TOKEN; still waiting for all hosts",
                ", ".join(addresses),
            )
        if has_come or len(addresses) < self._expected_hosts or time.monotonic() < self._until:
            return
        strangers.clear()  # for the next start
        raise LaunchError(
            "LAZYGT_TOKEN",
            f"is another one on the hosts of this job than here: {', '.join(addresses)} came with "
            f"another, and nobody with this one within {self._share:g} s. {_ADVICE}",
        )

    @property
    def _expected_hosts(self) -> int:
        """Number of other hosts; if the engine does not set it, the largest possible."""
        job = self._job
        return job.world_size - job.local_world_size if job.hosts is None else job.hosts - 1

    def __str__(self) -> str:
        """Return the number and the addresses of connections that failed the token's handshake."""
        failed_handshakes = self._listener.counts["handshake"]
        addresses = ", ".join(filter(None, self._listener.strangers.addresses))
        origin = f", from {addresses}" if addresses else ""
        return f"Connections that proved no such token: {failed_handshakes}{origin}"


# -- cluster of a job ------------------------------------------------------------------------------

_ENDED = "the program has ended"
#: Bytes of the longest message of a worker, with its envelope.
_MAX_MESSAGE = MAX_MESSAGE_BYTES + (1 << 16)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Agent that has connected."""

    rank: int  # rank of its process in the job
    name: str  # name of its host, for people
    workers: int  # number of workers that it starts
    connection: Connection


class Cluster:
    """Other hosts of a job, seen from its client; it lives until the process ends.

    Args:
        job: job of this process, which has rank 0.
        token: the secret that all processes of the job know.
        seconds: time limit for publishing this process's endpoint.
    """

    def __init__(self, job: Job, token: bytes, seconds: float) -> None:
        self._job, self._arrived = job, dict[int, Arrived]()
        agent_key = derived(token, "agent").public
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._listener = Listener(
            context,
            _address(job),
            port_to_bind(job),
            derived(token, "client"),
            lambda public: "agent" if public == agent_key else None,
            _MAX_MESSAGE,
        )
        try:
            publish(job, self._listener.address, token, seconds)
            self._refusal = refusals(job, seconds)
        except BaseException:  # the next session tries again, perhaps on the same port
            self._listener.close()
            raise
        atexit.register(self._listener.close, _ENDED)

    def link(self, spec: LinkSpec) -> ClusterLink:
        """Return the link to a session's workers, on all hosts.

        Raises:
            LaunchError: not all hosts have come in time, or others than expected.
        """
        self._wait(spec.start_timeout)
        agents = sorted(self._live_agents(), key=lambda agent: agent.rank)
        hosts = [(RemoteHost(agent.name, agent.connection), agent.workers) for agent in agents]
        return ClusterLink.at(_address(self._job), spec, self._job.local_world_size, hosts)

    def _wait(self, seconds: float) -> None:
        """Wait until an agent has connected from each host."""
        job, until = self._job, time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._listener.fd, select.POLLIN)
        refused = Refusals(job, self._listener, self._refusal, seconds)
        while (count := self._count()) != job.world_size:
            if (remaining := until - time.monotonic()) <= 0 or count > job.world_size:
                raise self._incomplete(count, seconds, refused)
            refused.check(bool(self._arrived))
            poller.poll(1_000 * min(remaining, 0.25))
            while (connection := self._listener.accept()) is not None:
                agent = _agent_of(connection)
                self._arrived[agent.rank] = agent

    def _incomplete(self, count: int, seconds: float, refused: Refusals) -> LaunchError:
        """Return the error for a job with missing hosts, or with too many processes."""
        job = self._job
        names = ", ".join(f"{agent.workers} on {agent.name}" for agent in self._live_agents())
        return LaunchError(
            job.rank_variable,
            f"is of a job of {job.world_size} processes, and after {seconds:g} s there are "
            f"{count}: {job.local_world_size} on this host{names and ', '}{names}. Does the "
            f"program open a lazygt.session() on all hosts, and do all know the same "
            f"LAZYGT_TOKEN? {refused}",
        )

    def _count(self) -> int:
        """Return the number of workers on all hosts that have connected."""
        return self._job.local_world_size + sum(agent.workers for agent in self._live_agents())

    def _live_agents(self) -> list[Arrived]:
        return [agent for agent in self._arrived.values() if agent.connection.closed is None]


def _address(job: Job) -> str:
    """Return this host's address for other hosts.

    Raises:
        LaunchError: this host's name has no address, or one that only this host can reach.
    """
    try:
        address = socket.gethostbyname(job.address)
    except OSError as error:
        raise LaunchError("MASTER_ADDR", f"is {job.address!r}, which has no address") from error
    if ipaddress.ip_address(address).is_loopback:
        raise LaunchError(
            "MASTER_ADDR",
            f"is {job.address!r}, which is {address} on this host: no other host reaches that. Set "
            f"it to the address of this host's network interface",
        )
    return address


def _agent_of(connection: Connection) -> Arrived:
    """Decode the hello of a connected agent."""
    hello: dict[str, Any] = json.loads(connection.hello)
    return Arrived(hello["rank"], hello["name"], hello["workers"], connection)


@cache
def _cluster(job: Job) -> Cluster:
    """Return this process's cluster, which serves all its sessions one after the other."""
    return Cluster(job, secret(), Config().start_timeout)


def secret() -> bytes:
    """Return the secret shared by all processes of a job on several hosts.

    Raises:
        LaunchError: there is no secret.
    """
    token = token_from(os.environ)
    if token is None:
        raise LaunchError(
            "LAZYGT_TOKEN",
            "is not set, and the job has several hosts, which must prove a secret to each other: "
            "`export LAZYGT_TOKEN=$(lazygt keys token)` before the job is started, the same on all "
            "hosts, or name a file of mode 0600 that has it, LAZYGT_TOKEN_FILE=FILE",
        )
    return token


def asked(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a session's settings, with one worker per process of the job.

    Raises:
        LaunchError: the settings ask for another number.
    """
    named = [name for name in ("workers", "mesh") if settings.get(name)]
    named += [name for name in ("LAZYGT_WORKERS", "LAZYGT_MESH") if os.environ.get(name)]
    if not named:
        return settings | {"workers": job.world_size}
    config = Config.load(**settings)
    if config.workers != job.world_size:
        raise LaunchError(
            job.rank_variable,
            f"is of a job of {job.world_size} processes, one a worker, and {named[0]} asks for "
            f"{config.workers}: leave {named[0]} out, or have {job.engine} start as many",
        )
    return settings


def open_attached(spec: LinkSpec) -> ProcessLink | ClusterLink:
    """Return the link of the client, rank 0, to the workers of its job.

    Raises:
        LaunchError: not all hosts have come in time; or several have no secret in common.
    """
    job = job_here()
    if job is None:
        raise LaunchError("RANK", "and the like have gone since this session was asked for")
    link = ProcessLink(spec) if job.is_on_one_host else _cluster(job).link(spec)
    be_alone(job)
    return link


def serve(job: Job, seconds: float) -> NoReturn:
    """Run a process other than rank 0, as an agent or idle, until the client has ended; then exit.

    Args:
        seconds: time to wait for the client.

    Raises:
        SystemExit: at the end.
        LaunchError: the client did not come in time; or several hosts have no secret in common.
    """
    if job.is_on_one_host or not job.leads_host:
        hold(job)
        raise SystemExit(0)
    token = secret()
    join(find(job, token, seconds), token, job.local_world_size, job.rank, seconds)


def join(endpoint: str, token: bytes, workers: int, rank: int, seconds: float) -> NoReturn:
    """Run this host's agent for the client at ``endpoint`` until the client has ended; then exit.

    Args:
        workers: number of workers for this host.
        rank: decides the order of hosts; the client's own host is the first.
        seconds: time to wait for the client.

    Raises:
        SystemExit: at the end.
        ConnectionLost: the client did not answer in time.
        AccessDenied, VersionMismatch: the client refuses this host.
    """
    hello = {"rank": rank, "name": socket.gethostname(), "workers": workers}
    connection = dial(
        zmq.Context.instance(),
        endpoint,
        derived(token, "agent"),
        derived(token, "client").public,
        json.dumps(hello).encode(),
        _MAX_MESSAGE,
        seconds,
    )
    reason = serve_client(connection, endpoint)
    if _ENDED not in reason:
        raise SystemExit(f"lazygt: this host's workers have ended: {reason}")
    raise SystemExit(0)
