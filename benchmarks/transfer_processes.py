"""The other processes of the transfer benchmark, the model they share, and what they hold."""

import multiprocessing
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from lazygt.transfer import (
    BroadcastTransferReceiver,
    CudaIpcTransferReceiver,
    SharedMemoryTransferReceiver,
)

SECONDS = 120.0
PROCESSES = multiprocessing.get_context("spawn")
RECEIVERS = {
    "shared-memory": SharedMemoryTransferReceiver,
    "broadcast": BroadcastTransferReceiver,
    "cuda-ipc": CudaIpcTransferReceiver,
}


def model(megabytes: float) -> dict[str, Tensor]:
    """300 tensors as in a language model: an embedding, then layers of 12; from KBs to 100 MB."""
    shapes = [(25_000, 1_024)]
    for _ in range(24):
        shapes += [(1_024,)] * 7 + [(1_024, 1_024)] * 3 + [(3_072, 1_024), (1_024, 3_072)]
    shapes += [(1_024,)] * 11
    scale = megabytes * 1e6 / (4 * sum(torch.Size(shape).numel() for shape in shapes))
    tensors = {}
    for number, (first, *rest) in enumerate(shapes):
        rows = max(int(first * scale), 1)
        tensors[f"layer.{(number - 1) // 12}.p{number}"] = torch.rand(rows, *rest)
    return tensors


class Other:
    """Another process, and a pipe to it."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=main, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        return self.answer()

    def answer(self) -> Any:
        if not self.pipe.poll(SECONDS):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self._process.join(SECONDS)


def requests(pipe: Connection) -> Iterator[str]:
    """What is asked, until the other end closes."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def receive(
    pipe: Connection,
    strategy: str,
    address: str,
    name: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A process with a lazygt receiver; ``options`` are its arguments besides."""
    with RECEIVERS[strategy](address, name=name, **options):
        for what in requests(pipe):
            if what == "footprint":
                pipe.send(footprint())
            elif what == "reset peak":
                pipe.send(reset_peak())
            elif what == "peak":
                pipe.send(status("VmHWM"))


def receive_gloo(pipe: Connection, port: int, megabytes: float) -> None:
    """A process that takes part in plain broadcasts."""
    params = list(model(megabytes).values())
    group = gloo(port, 1)
    for _ in requests(pipe):
        broadcast(group, params)
        pipe.send("done")


def receive_pickled(pipe: Connection, path: str, megabytes: float) -> None:
    """A process that unpickles tensors into its parameters."""
    params = list(model(megabytes).values())
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.connect(path)
        for _ in requests(pipe):
            for param in params:
                param.copy_(pickle.loads(pull.recv()))  # noqa: S301 - that is what is measured
            pipe.send("done")


def gloo(port: int, rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=SECONDS))


def broadcast(group: Any, params: list[Tensor]) -> None:
    for work in [group.broadcast([param], dist.BroadcastOptions()) for param in params]:
        work.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- what a process holds ------------------------------------------------------------------


def status(key: str) -> float:
    """A line of /proc/self/status in MB (1e6 bytes)."""
    match = re.search(rf"(?m)^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / 1e6


def reset_peak() -> float:
    """Begin a new VmHWM; what is resident now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def footprint() -> tuple[int, int, float]:
    """Descriptors, mappings, and resident MB."""
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), maps, status("VmRSS")
