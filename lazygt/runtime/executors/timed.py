"""The timed executor: the careful interpreter with a clock beside it, for profiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from lazygt.graph.node import Node
from lazygt.runtime.executors.careful import Careful
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.store import Value


class TimedExecutor(EagerExecutor):
    """Runs what another executor runs, node after node, and notes when each began and ended.

    A node's time contains its copies and what the interpreter does around its kernel, some
    microseconds; on a GPU each node waits for its kernels to end.

    Attributes:
        times: (step, count, begin, end) of the run, as ``messages.Timings`` has them.
    """

    def __init__(self, executor: EagerExecutor) -> None:
        schedule, device = executor.schedule, executor.careful.device
        super().__init__(executor.plan, device, schedule)
        self._counts = [1 if n.body is None else len(n.body.nodes) for n in schedule.graph.nodes]
        self._firsts = [0, *accumulate(self._counts)]
        self.times: list[tuple[int, int, int, int]] = []
        self.careful = _Timed(schedule, device, executor.careful._compiled)
        self.careful.ran = self._ran

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, once. ``inputs`` is emptied; failures name the steps of ``plan.steps``."""
        with torch._C._AutoDispatchBelowAutograd():
            outcome = self._run_careful(inputs, params)
        for failure in outcome.failures:
            if not failure.seq:
                failure.node = self._firsts[failure.node]
        return outcome

    def _ran(self, number: int, begin: int) -> None:
        end = time.monotonic_ns()
        self.times.append((self._firsts[number], self._counts[number], begin, end))


class _Timed(Careful):
    #: told a node's number and when it began, once it has ended
    ran: Callable[[int, int], None]

    def _node(
        self,
        number: int,
        node: Node,
        results: range,
        values: dict[int, Any],
        params: tuple[Any, ...],
        check: bool,
    ) -> None:
        begin = time.monotonic_ns()
        try:
            super()._node(number, node, results, values, params, check)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self.ran(number, begin)
