"""Who takes part in the benchmark of sharded sessions: lazygt, and crews of torch processes.

Each process sits at the other end of a pipe and answers requests (see ``Racer``). lazygt is one
process, which starts its workers; a crew of torch is one process a rank, and all are asked at once.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lazygt
from benchmarks.sharded_workloads import QUICK, WORKLOADS, Workload, train_step
from benchmarks.transfer_processes import Other, free_port, requests
from lazygt.settings import grouped

LAZYGT = "lazygt"
#: The same session with ``invariant=True``.
INVARIANT = "lazygt, invariant"
#: The same, op by op: what a step keeps is not told by when its groups are compiled, nor by the
#: snapshots of recovery, which lie in the host's memory.
UNCOMPILED = "lazygt, op by op"
_SETTINGS: dict[str, dict[str, Any]] = {
    LAZYGT: {}, INVARIANT: {"invariant": True}, UNCOMPILED: {"compile": "off", "recovery": "off"},
}  # fmt: skip
DATA, FULL, TENSOR = "data parallel", "fully sharded", "tensor parallel"
CONTEXT = "context parallel"
#: What plain torch has for each. Its ``context_parallel`` has no rule for the attention of CPUs, so
#: there the model itself exchanges heads, in DDP.
PEERS = {DATA: "DDP", FULL: "FSDP2", TENSOR: "DTensor", CONTEXT: "DDP, heads by hand"}

_WARM = 3


class Racer:
    """One process's part: a step, to be run in bursts.

    Args:
        step: returns what a burst reads at its end.
        steps: in a burst.
        settled: called between the bursts of ``settle``, to wait for what goes on beside them.
        counts: what ``counts`` answers.
        pids: the processes that hold tensors.
    """

    def __init__(
        self,
        step: Callable[[], Tensor],
        steps: int,
        settled: Callable[[], object] = bool,
        counts: Callable[[], object] = dict,
        pids: Sequence[int] = (),
    ) -> None:
        self._step, self._steps, self._settled, self._counts = step, steps, settled, counts
        self._pids = pids or (os.getpid(),)
        self._before: list[int] = []
        self._last = torch.zeros(())

    def burst(self) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(self._steps):
            result = self._step()
        self._last = torch.tensor(result.item(), device="cpu")
        return (time.perf_counter() - start) / self._steps

    def settle(self) -> None:
        """Run until nothing new happens any more."""
        for _ in range(_WARM):
            self.burst()
            self._settled()

    def result(self) -> float:
        """What the last burst read: of a crew, the mean over its ranks."""
        if dist.is_initialized():
            dist.all_reduce(self._last)
            self._last /= dist.get_world_size()
        return self._last.item()

    def counts(self) -> object:
        return self._counts()

    def forget(self) -> None:
        """Count memory from here on."""
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5)
        self._before = [resident(pid, "VmRSS") for pid in self._pids]

    def peak(self) -> float:
        """MB by which a process exceeded what it had at ``forget``; of several the most."""
        peaks = [resident(pid, "VmHWM") for pid in self._pids]
        return max(a - b for a, b in zip(peaks, self._before, strict=True)) * 1024 / 1e6

    def serve(self, pipe: Connection) -> None:
        for what in requests(pipe):
            pipe.send(getattr(self, what)())


def resident(pid: int, what: str) -> int:
    """KiB of a process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


class Crew:
    """The processes of one contestant; a context manager.

    Args:
        main: what each runs; takes its pipe and then its arguments.
        processes: the arguments of each.
    """

    def __init__(self, main: Callable[..., None], processes: Sequence[tuple[Any, ...]]) -> None:
        self._main, self._processes = main, processes
        self._stack = ExitStack()

    def __enter__(self) -> "Crew":
        self._others = [
            self._stack.enter_context(Other(self._main, *each)) for each in self._processes
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for other in self._others:
            other.pipe.close()  # all leave at once: one alone might wait for the others
        self._stack.close()

    def ask(self, what: str) -> Any:
        """The answer of the first process, once all have answered.

        Raises:
            RuntimeError: a process ended; what it said is on stderr.
        """
        try:
            for other in self._others:
                other.pipe.send(what)
            answers = [other.answer() for other in self._others]
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"a process ended at {what!r}; see its error above") from error
        return answers[0]


def crew(kind: str, main: str, workers: int, *args: Any) -> Crew:
    """lazygt (``kind`` is one of its settings), or torch, with so many workers."""
    if kind in _SETTINGS:
        return Crew(_lazygt, [(main, workers, kind, *args)])
    port = free_port()
    return Crew(_torch, [(main, rank, workers, port, *args) for rank in range(workers)])


# -- lazygt --------------------------------------------------------------------------------


def _lazygt(pipe: Connection, main: str, workers: int, kind: str, *args: Any) -> None:
    axis = "model" if args[0] == TENSOR else "data"
    with lazygt.session(
        **grouped({"mesh": {axis: workers}, "threads": 1, **_SETTINGS[kind]})
    ) as session:
        {"train": _train_lazygt, "sum": _sum_lazygt}[main](session, *args).serve(pipe)


def _train_lazygt(session: lazygt.Session, way: str, name: str, quick: bool) -> Racer:
    workload = (QUICK if quick else WORKLOADS)[name]
    torch.manual_seed(0)
    model, batches = workload.model(), workload.batches()
    if way == TENSOR:
        columns = dict.fromkeys(workload.columns, lazygt.ColwiseParallel())
        rows = dict.fromkeys(workload.rows, lazygt.RowwiseParallel())
        lazygt.parallelize_module(model, "model", columns | rows)
    else:
        batches = [
            tuple(lazygt.distribute(one.clone(), {"data": Shard(workload.cut)}) for one in batch)
            for batch in batches
        ]
    if way == FULL:
        lazygt.fully_shard(model)
    step = train_step(workload, model, batches)

    def counts() -> str:
        assert session.last_plan is not None
        step()
        session.flush()  # the last burst's ended with the plan that reads the loss
        found = session.last_plan.collectives
        kinds = Counter(one.kind for one in found)
        sent = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"{sent or 'none'}; {sum(one.nbytes for one in found) / 1e6:.2f} MB"

    session.synchronize()
    return Racer(step, workload.steps, session.compiled, counts, session.worker_pids)


def _sum_lazygt(session: lazygt.Session, way: str, elements: int) -> Racer:
    torch.manual_seed(0)
    x = lazygt.distribute(torch.randn(elements), {"data": Shard(0)})
    session.synchronize()

    def counts() -> dict[str, int]:
        stats = session.stats()
        return {key: stats[key] for key in ("bytes_fetched", "bytes_uploaded", "bytes_received")}

    return Racer(x.sum, 1, session.compiled, counts)


# -- torch ---------------------------------------------------------------------------------


def _torch(pipe: Connection, main: str, rank: int, workers: int, port: int, *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers
    )
    try:
        {"train": _train_torch, "sum": _sum_torch}[main](rank, workers, *args).serve(pipe)
    finally:
        dist.destroy_process_group()


def _train_torch(rank: int, workers: int, way: str, name: str, quick: bool) -> Racer:
    workload = (QUICK if quick else WORKLOADS)[name]
    torch.manual_seed(0)
    model, batches = workload.model(), workload.batches()
    if way != TENSOR:
        batches = [
            tuple(one.chunk(workers, workload.cut)[rank].clone() for one in batch)
            for batch in batches
        ]
    step = train_step(workload, _parallel(workload, model, way, workers), batches)
    return Racer(step, workload.steps)


def _parallel(workload: Workload, model: nn.Module, way: str, workers: int) -> nn.Module:
    if way == CONTEXT:
        for block in model.children():
            block.to_heads = partial(_exchanged, split=1, concat=2)
            block.to_places = partial(_exchanged, split=2, concat=1)
    if way in (DATA, CONTEXT):
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (workers,))
    if way == FULL:
        for unit in workload.units(model):
            fully_shard(unit, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    columns: dict[str, Any] = dict.fromkeys(workload.columns, ColwiseParallel())
    rows: dict[str, Any] = dict.fromkeys(workload.rows, RowwiseParallel())
    return parallelize_module(model, mesh, columns | rows)


def _exchanged(value: Tensor, split: int, concat: int) -> Tensor:
    """Blocks along ``concat`` for blocks along ``split``, with a gradient."""
    pieces = [piece.contiguous() for piece in value.chunk(dist.get_world_size(), split)]
    received = dist_nn.all_to_all([torch.empty_like(piece) for piece in pieces], pieces)
    return torch.cat(received, concat)


def _sum_torch(rank: int, workers: int, way: str, elements: int) -> Racer:
    torch.manual_seed(0)
    block = torch.randn(elements).chunk(workers)[rank].clone()

    def step() -> Tensor:
        total = block.sum()
        dist.all_reduce(total)
        return total

    return Racer(step, 1)
