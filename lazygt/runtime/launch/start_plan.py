"""Specification of a session's workers, and the boot configuration of each worker."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import struct
import threading
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lazygt.config import cache_setting
from lazygt.host.files import cache_directory
from lazygt.host.gpus import why_none
from lazygt.net import channel
from lazygt.net.channel import Address, Keys
from lazygt.net.mailbox import MailboxFiles
from lazygt.net.sockets import GroupSpec
from lazygt.runtime.arenas import Arena
from lazygt.runtime.collectives.backends import backend_for, why_host
from lazygt.runtime.launch.launcher import WORKER_FACTORY, Boot

# -- resource limits -------------------------------------------------------------------------------
# Before a session opens, this process opens the descriptors and starts the threads that the session
# needs, and ends them again: that checks every limit, of the process, the user, the container and
# the machine. libzmq would end the process if they are not available.

#: File descriptors of the client, an upper bound by measurement.
_DESCRIPTORS, _DESCRIPTORS_A_WORKER = 32, 15
#: Threads of the client, and of a worker besides its compute threads; a process counts as one.
_THREADS, _THREADS_A_WORKER = 2, 8


def check_limits(workers: int, threads: int) -> None:
    """Raise OSError if the limits don't allow a session of this size.

    Args:
        workers: number of workers.
        threads: compute threads of each worker.
    """
    needed = _DESCRIPTORS + _DESCRIPTORS_A_WORKER * workers
    available = _available_descriptors(needed)
    if available < needed:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            errno.EMFILE,
            f"a session of {workers} worker(s) needs {needed} file descriptors, and this process "
            f"gets {available} more; close files, or raise the limit, now {limit} (ulimit -n)",
        )
    needed = _THREADS + (_THREADS_A_WORKER + threads) * workers
    available = _available_threads(needed)
    if available < needed:
        raise OSError(
            errno.EAGAIN,
            f"a session of {workers} worker(s) needs {needed} processes and threads, and this "
            f"process gets {available} more; end some, or raise the limit of this user (ulimit -u) "
            f"or container (pids.max)",
        )


def _available_descriptors(needed: int) -> int:
    """Return the number of file descriptors available, up to ``needed``."""
    with ExitStack() as opened:
        for count in range(needed):
            try:
                fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return count
            opened.callback(os.close, fd)
    return needed


def _available_threads(needed: int) -> int:
    """Return the number of threads that can be started, up to ``needed``."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(needed):
            thread = threading.Thread(target=end.wait, name="lazygt-room", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # there are no more
        return len(started)
    finally:
        end.set()
        for thread in started:
            thread.join()
    return needed


def share_of_cores(world_size: int) -> int:
    """Return the number of threads for each of ``world_size`` workers here; at least 1."""
    return max(len(os.sched_getaffinity(0)) // world_size, 1)


def visible_gpu(number: int, count: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a worker: visible GPU ``number``, modulo ``count``.

    Raises:
        ValueError: there is no GPU.
    """
    if count < 1:
        raise ValueError(f"device='cuda', but torch sees no GPU: {why_none()}")
    listed = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = listed if listed != [""] else [str(index) for index in range(count)]
    return names[number % count]


# -- worker specification --------------------------------------------------------------------------

_NCCL_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_SIOCGIFADDR = 0x8915  # of an interface: its IPv4 address (netdevice(7))


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Specification of a session's workers."""

    world_size: int = 1  # number of worker processes
    device: str = "cpu"  # ``cpu``, or ``cuda`` for one GPU each (shared when there are fewer GPUs)
    threads: int | None = None  # torch threads a worker; None for a fair share of the cores
    transport: str = "ipc"  # ``ipc``, or ``tcp://HOST`` for encrypted TCP
    factory: str = WORKER_FACTORY  # ``module:attribute`` that makes a worker's message handler
    frozen_after: float = 5.0  # seconds without a sign of life until WorkerFrozen
    start_timeout: float = 120.0  # the same for a worker that is still starting
    max_message: int = channel.MAX_MESSAGE_BYTES  # bytes of the longest message either way
    #: size of the first segment of each arena, or 0 for no shared memory
    arena_bytes: int = 64 << 20
    #: True if the client's process is on this host: then large fetched values are left in an arena
    #: that it has mapped, and workers spin for its messages. Else values come with the answer, and
    #: workers do not spin: during a wait for the network, a spinning worker would take a core from
    #: the awaited process.
    client_here: bool = True
    group_timeout: float = 300.0  # seconds a collective waits for the other ranks
    mesh: str = ""  # the ranks as a grid with named axes, for example ``data=2,model=2``
    #: variables added to the workers' environment
    environment: Mapping[str, str] = field(default_factory=dict)
    loads_torch: bool = True  # False for handlers that need no torch
    copier: str = ""  # see `Boot`
    #: True if workers get memory for copies of their values that outlive them
    snapshots: bool = False
    #: number of processes that wait, with torch loaded, to take a dead worker's rank
    spares: int = 0
    ranks: tuple[int, ...] | None = None  # ranks that are started here; None: all
    group_number: int = 0  # number of process groups that the session had before
    #: the secret that the workers of a session on several hosts share; None: a new one
    token: bytes | None = field(default=None, repr=False)
    #: store, host, address: set if there are ranks on other hosts, too; see `GroupSpec`
    store: str = ""
    host: str = ""
    address: str = ""
    #: indices of visible GPUs for the ranks started here, in order, modulo the number of GPUs;
    #: None: from the first on
    gpus: tuple[int, ...] | None = None

    @property
    def here(self) -> tuple[int, ...]:
        """Ranks that are started here."""
        return tuple(range(self.world_size)) if self.ranks is None else self.ranks

    def gpu_of(self, rank: int) -> int:
        """Return the index of the GPU of a rank that is started here."""
        number = self.here.index(rank)
        return number if self.gpus is None else self.gpus[number]

    def gpus_here(self, count: int) -> int:
        """Return the number of GPUs in use by the ranks here, of ``count`` visible ones."""
        return count if self.gpus is None else len({gpu % count for gpu in self.gpus if count})

    @property
    def threads_a_worker(self) -> int:
        """torch threads of each worker."""
        return self.threads or share_of_cores(len(self.here))


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Start parameters that the workers of one session share."""

    spec: LinkSpec
    directory: Path
    token: bytes
    #: cache directory of compiled code, unless the spec's environment sets one
    cache: str = field(default_factory=lambda: str(cache_directory(cache_setting())))

    def boot(
        self,
        socket_number: int,
        rank: int | None,
        upload: Arena | None,
        fetch: Arena | None,
        mailboxes: MailboxFiles | None,
        copies: ExitStack,
    ) -> Boot:
        """Return a worker's boot configuration.

        Args:
            socket_number: number in the names of the worker's sockets.
            rank: the worker's rank; None: a spare process.
            copies: stack that closes this process's copies of the worker's listening sockets.
        """
        spec = self.spec
        keys = None if spec.transport == "ipc" else Keys.generate()
        addresses = []
        for name in ("data", "control"):
            address = self._listen(f"{name}{socket_number}", keys)
            copies.callback(os.close, address.fd)
            addresses.append(address)
        rendezvous = None
        if spec.world_size > 1:
            rendezvous = channel.listen_local(self._socket_path(f"rendezvous{socket_number}"))
            copies.callback(os.close, rendezvous.fd)
        return Boot(
            factory=spec.factory,
            device="cuda:0" if spec.device == "cuda" else spec.device,
            rank=-1 if rank is None else rank,
            world_size=spec.world_size,
            threads=spec.threads_a_worker,
            neighbours=len(spec.here),
            client_pid=os.getpid(),
            token=self.token.hex(),
            data=addresses[0],
            control=addresses[1],
            keys=keys,
            max_message=spec.max_message,
            upload=upload.fd if upload else None,
            fetch=fetch.fd if fetch else None,
            mailboxes=mailboxes,
            directory=str(self.directory),
            group=self._group(),
            rendezvous=rendezvous,
            loads_torch=spec.loads_torch,
            copier=spec.copier,
            spins=spec.client_here,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of one worker, its GPU among them."""
        variables = {"LAZYGT_CACHE_DIR": self.cache, **self.spec.environment}
        if self.spec.device == "cuda":
            gpu = self.spec.gpu_of(rank)
            variables["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu, torch.cuda.device_count())
            # NCCL's rendezvous listens only on the interface to other ranks. Peers there must know
            # NCCL's unique id, which the ranks share.
            interface = os.environ.get("NCCL_SOCKET_IFNAME") or nccl_interface(self.spec.address)
            if interface:
                variables.setdefault("NCCL_SOCKET_IFNAME", interface)
            # Each axis of a mesh has a communicator, and kernels of several run concurrently:
            # without an order they may deadlock (NCCL's guide on concurrent communicators).
            variables.setdefault(_NCCL_ORDER, os.environ.get(_NCCL_ORDER, "1"))
        return variables

    def _listen(self, name: str, keys: Keys | None) -> Address:
        """Open a listening socket: a UNIX socket of this name without keys, else TCP."""
        if keys is None:
            return channel.listen_local(self._socket_path(name))
        scheme, _, host = self.spec.transport.partition("://")
        if scheme != "tcp":
            raise ValueError(f"transport {self.spec.transport!r}: expected 'ipc' or 'tcp://HOST'")
        return channel.listen_tcp(host or "127.0.0.1", keys)

    def _socket_path(self, name: str) -> Path:
        """Return the path of a socket; the socket of an earlier worker is removed."""
        path = self.directory / name
        path.unlink(missing_ok=True)
        return path

    def _group(self) -> GroupSpec | None:
        """Return the rendezvous settings of the process group; None for a single worker."""
        if self.spec.world_size == 1:
            return None
        spec, worker_count = self.spec, len(self.spec.here)
        gpus = spec.gpus_here(torch.cuda.device_count()) if spec.device == "cuda" else 0
        backend = backend_for(spec.device, worker_count, gpus)
        if slow := why_host(spec.device, worker_count, gpus):
            warnings.warn(f"lazygt.session: {slow}", RuntimeWarning, stacklevel=2)
        return GroupSpec(
            backend,
            str(self.directory),
            spec.group_timeout,
            spec.mesh,
            spec.store,
            spec.host,
            spec.address,
            self.token.hex() if spec.store else "",
        )


def nccl_interface(address: str) -> str:
    """Return the NCCL_SOCKET_IFNAME of the interface on which NCCL shall listen.

    Args:
        address: the IP address at which other hosts' ranks reach this one; empty: there are no
            other hosts.

    Returns:
        Empty if it is not known: NCCL then takes the first interface that leads to other hosts.
    """
    if not address:
        return "=lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(udp, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return f"={name}"
    return ""
