"""What a launcher is given and what it gives back, and the boot configuration of a worker.

The boot configuration holds the session's secrets, so it travels through an inherited pipe and
never through the command line or the environment, which other users can read. The same pipe is
the worker's liveness pipe: its end is the client's end.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lazygt.errors import ProtocolError
from lazygt.runtime.launch.channel import Address, Keys
from lazygt.runtime.launch.mailbox import MailboxFiles
from lazygt.runtime.launch.procfs import Usage

WORKER_FACTORY = "lazygt.runtime.worker:Worker"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How the ranks find each other.

    Attributes:
        backend: what they talk through, see ``runtime.collectives.group``.
        directory: where they meet; only their user can enter it.
        timeout: seconds that one waits for others.
        mesh: the ranks as a grid, as ``graph.mesh`` reads it; empty: no axes.
        store: the endpoint of the session's ``StoreServer`` where ranks are on several hosts; empty
            where all are on this one.
        host: the id of this worker's host: the same for ranks that can open ``directory``.
        address: the IP address of the interface at which ranks of other hosts reach this one.
        token: the secret, as hex, of those who may meet in the store.
    """

    backend: str
    directory: str
    timeout: float
    mesh: str = ""
    store: str = ""
    host: str = ""
    address: str = ""
    token: str = field(default="", repr=False)

    def rendezvous(self, rank: int) -> str:
        """Where the socket lies at which other ranks find this one."""
        return f"{self.directory}/rendezvous{rank}"


@dataclass(frozen=True, slots=True)
class Boot:
    """All that a worker process is told at its start.

    Attributes:
        factory: ``module:attribute``; called with device, rank, world_size, upload and fetch, it
            makes the object whose ``handle`` gets every message.
        device: ``cpu`` or ``cuda:0``, in the worker's own numbering.
        threads: torch threads of this worker.
        neighbours: how many workers there are on this host, with this one.
        client_pid: the process whose end is the worker's end.
        token: the session's secret, as hex.
        keys: CURVE keys of this worker, or None for a local channel.
        upload, fetch: descriptors of the arenas' memfds, or None.
        snapshots: of the memory in which copies of its values outlive it, or None.
        mailboxes: what client and worker leave small messages in, or None.
        directory: the session's directory, removed when the client was killed.
        group: how to join the group of workers, or None; group_number: which one it is.
        spare: the memory of every rank's snapshots, for a process that has no rank yet, and is told
            one when a worker has died; else None.
        status: of the session's status pages, or None.
        rendezvous: where the other ranks find this one, or None.
        loads_torch: False for handlers that do without (tests), which start much faster.
        copier: ``module:attribute`` of what makes a `weight_copies.Copier`, or "".
        spins: whether it looks for the next message a moment before it sleeps, if cores are free.
    """

    factory: str
    device: str
    rank: int
    world_size: int
    threads: int
    neighbours: int
    client_pid: int
    token: str
    data: Address
    control: Address
    keys: Keys | None
    max_message: int
    upload: int | None
    fetch: int | None
    mailboxes: MailboxFiles | None
    directory: str
    group: GroupSpec | None
    rendezvous: Address | None
    loads_torch: bool
    copier: str = ""
    spins: bool = True
    snapshots: int | None = None
    group_number: int = 0
    spare: tuple[int, ...] | None = None
    status: int | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Boot:
        """Read what `to_bytes` wrote.

        Raises:
            ProtocolError: the text was cut short or made by another version.
        """
        try:
            given = json.loads(text)
            given["data"], given["control"] = Address(**given["data"]), Address(**given["control"])
            given["keys"] = Keys(**given["keys"]) if given["keys"] else None
            boxes = given["mailboxes"]
            given["mailboxes"] = MailboxFiles(**boxes) if boxes else None
            given["group"] = GroupSpec(**given["group"]) if given["group"] else None
            given["rendezvous"] = Address(**given["rendezvous"]) if given["rendezvous"] else None
            return cls(**given)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"the boot configuration cannot be read: {error}") from error

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the process must inherit."""
        rendezvous = None if self.rendezvous is None else self.rendezvous.fd
        memory = self.upload, self.fetch, self.snapshots, self.status
        others = tuple(fd for fd in (*memory, rendezvous) if fd is not None)
        boxes = () if self.mailboxes is None else self.mailboxes.all
        return (self.data.fd, self.control.fd, *others, *boxes, *(self.spare or ()))


def load_named(name: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Process(ABC):
    """A started worker process, seen from the client."""

    pid: int
    pidfd: int
    """Readable when the process has ended."""

    @abstractmethod
    def status(self) -> str | None:
        """How it ended (``signal SIGKILL``, ``exit code 1``), or None while it runs."""

    @abstractmethod
    def usage(self) -> Usage:
        """Its use of the processor until now; always the same where nobody can tell."""

    @abstractmethod
    def stderr_tail(self) -> str:
        """The end of what it wrote to standard output and error; a few KiB."""

    @abstractmethod
    def close_pipe(self) -> None:
        """Close the liveness pipe: a worker whose interpreter still runs exits at once."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""

    @abstractmethod
    def kill(self) -> None:
        """End it (SIGKILL), also when it is stopped."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for its end for at most so long; True if it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Give back the descriptors. Idempotent; the process must have ended."""


class Launcher(ABC):
    """Starts worker processes. `start` does not wait for them to be ready."""

    @abstractmethod
    def start(self, boot: Boot, environment: Mapping[str, str]) -> Process:
        """Start one worker with these variables added to the environment.

        Raises:
            OSError: the process could not be started.
        """
