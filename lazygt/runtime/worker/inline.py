"""Sessions without processes: the link to a worker in the client's own process, and a dry worker.

A dry worker propagates the metas of values, computes nothing and answers with zeros. Uploaded
values are fetched unchanged; every other number is 0 and every other flag is False. A script that
branches on values sees these.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

from lazygt.config import Config
from lazygt.errors import LazyGTError, WorkerDied
from lazygt.graph.alias import op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.ops import title, undispatched
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.exchange import Exchange
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.messages import Failure, Fetched
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.store import Failed, Value
from lazygt.runtime.wire import Buffer, hand_over
from lazygt.runtime.worker.worker import Worker

if TYPE_CHECKING:
    from lazygt.net.status_file import StatusFile
    from lazygt.runtime.arenas import Arena

# -- link ------------------------------------------------------------------------------------------


class InlineLink:
    """Link to a worker in the client's own process: nothing is encoded."""

    world_size = 1
    upload: Arena | None = None
    hosts: tuple[int, ...] = (1,)
    elsewhere: Mapping[int, int] = MappingProxyType({})
    mirrors = False
    status: StatusFile | None = None
    name = "inline"
    encode = staticmethod(hand_over)

    def __init__(self, worker: Worker) -> None:
        self.pids: tuple[int, ...] = (os.getpid(),)
        self._worker = worker
        self._replies: deque[list[Buffer]] = deque()

    #: an inline worker is no process, so it does not die
    healthy = True
    lost: Mapping[int, WorkerDied] = {}

    def replace(self, rank: int, group_number: int) -> None:
        """Raise LazyGTError: an inline worker does not die.

        Raises:
            LazyGTError: always.
        """
        raise LazyGTError("an inline worker can't be replaced; please report this")

    def refill(self) -> None:
        """Do nothing: there are no spare processes."""

    def update_status(self) -> None:
        """Do nothing: there are no status pages."""

    def last_step(self, rank: int) -> tuple[int, int]:
        """Raise LazyGTError, as ``replace`` does."""
        raise LazyGTError("an inline worker has not died; please report this")

    def snapshot_arena(self, rank: int) -> Arena:
        """Raise LazyGTError, as ``replace`` does."""
        raise LazyGTError("an inline worker takes no snapshots; please report this")

    def native_fetcher(self, make: Any, *arguments: Any) -> Any:
        """Return a fetcher in C++ that calls the worker's known runs; None without native code.

        Args:
            make: the extension's class of fetchers.
            arguments: the fetcher's other arguments.
        """
        known = self._worker.known_runs
        return (
            None if known is None else make.inline(*arguments, known.runs, self._known_run_replies)
        )

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Raise LazyGTError, as ``replace`` does."""
        raise LazyGTError("an inline worker reads no copies of uploads; please report this")

    def _known_run_replies(self, answer: tuple[Any, ...]) -> list[Buffer]:
        """Return the encoded replies to a run that the extension executed."""
        with undispatched():
            return self._worker.finished(answer)

    def fetch_arena(self, rank: int) -> Arena | None:
        """Return None: values travel as buffers."""
        return None

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Handle the message synchronously, outside the dispatch of the client's op."""
        with undispatched():
            self._replies.extend(self._worker.handle(list(frames)))

    def receive(
        self, timeout: float | None, wake_fd: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """Return the next reply, or None if there is none."""
        if not self._replies:
            if timeout is None:
                raise LazyGTError("the inline worker owes no answer; please report this")
            if wake_fd is not None:
                poller = select.poll()
                poller.register(wake_fd, select.POLLIN)
                DEFER_INTERRUPT.wait(poller, timeout * 1000)
            return None
        return 0, cast(list[memoryview], self._replies.popleft())

    def close(self) -> None:
        """Drop the worker's values."""
        self._worker.close()


# -- dry worker ------------------------------------------------------------------------------------

#: Largest fetch that is answered with zeros, in bytes.
MAX_ZEROS = 1 << 30


class DryWorker(Worker):
    """Worker that handles plans and runs like any other, but calls no kernel.

    Its values are meta tensors. Ops with a result of data-dependent shape fail with a RuntimeError.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config=config)
        self.plans.ops_device = None
        self.exchange = _ZeroExchange(self.store, None, None, None, 0)

    def _plan_inputs(self, schedule: Schedule, ids: list[int], frees: list[int]) -> list[Value]:
        return self.store.get_all(ids)

    def _run_plan(
        self, executor: EagerExecutor, inputs: list[Value], params: tuple[Any, ...]
    ) -> Outcome:
        """Return placeholders of the outputs: meta tensors, without running anything."""
        plan = executor.plan
        values = list(inputs)
        for node in plan.graph.nodes:
            values.extend(_placeholder(node, meta) for meta in node.results)
        outputs = [values[number] for number in plan.graph.outputs]
        returned = _dynamic_results(plan) if plan.returns_dynamic else None
        return Outcome(outputs, [], returned, [])


class _ZeroExchange(Exchange):
    """Exchange that sends zeros for all computed values."""

    def send(self, value: Value, buffers: list[Buffer]) -> Fetched | Failure:
        if isinstance(value, torch.Tensor) and value.is_meta:
            if value.nbytes > MAX_ZEROS:
                raise MemoryError(
                    f"the script fetches a tensor of {value.nbytes} bytes; nothing is computed "
                    f"here, and so many zeros are not made up"
                )
            value = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        return super().send(value, buffers)


def _placeholder(node: Node, meta: TensorMeta | None) -> Value:
    """Return the meta tensor of a result; a generator state is a real one."""
    if meta is None:
        return Failed(Failure(-1, "RuntimeError", f"{node.op}: its result was not computed"))
    if node.op == "lazygt.get_rng_state":  # nothing was drawn, and zeros are no state
        state = torch.default_generator.get_state()
        if state.numel() == meta.numel:
            return state
    return meta.empty("meta")


def _dynamic_results(plan: Plan) -> Any:
    """Return the results of a plan's data-dependent last node: zeros if all are numbers."""
    node = plan.steps.graph.nodes[-1]
    known = op_facts(node)
    if known is not None and not node.writes and set(known.outputs) == {"p"}:
        kinds = [str(argument.type) for argument in known.func._schema.returns]
        return tuple(False if kind == "bool" else 0 for kind in kinds)
    detail = (
        f"{title(node.op)}: the shape of its result depends on values, and nothing is computed "
        f"here, so what comes after this line can't be known before the script really runs"
    )
    return Failed(Failure(len(plan.steps.graph.nodes) - 1, "RuntimeError", detail))
