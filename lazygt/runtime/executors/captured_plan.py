"""A plan as CUDA graphs, and the steps between them that are run one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lazygt.runtime.executors.cuda_graphs import (
    CapturedStretch,
    CudaGraphs,
    Uncapturable,
    address,
    copied,
    own_storages,
)
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Stopped
from lazygt.runtime.executors.stretches import Stretch, steady_after
from lazygt.runtime.store import Value
from lazygt.runtime.wire import bits


class CapturedPlan:
    """Runner of a plan stretch by stretch, some of them as CUDA graphs.

    Its first run, ``capture``, is a run like any other: each stretch is captured in its turn, and
    replayed at once.

    Args:
        stretches: the stretches of the plan.

    Attributes:
        error: the error of a failed capture.
        misfits: number of times that a value had another layout than at the capture.
    """

    def __init__(
        self, interpreter: CheckedInterpreter, graphs: CudaGraphs, stretches: Sequence[Stretch]
    ) -> None:
        self.error: Exception | None = None
        self.misfits = 0
        self._schedule, self._interpreter = interpreter.schedule, interpreter
        self._graphs = graphs
        self._stretches = stretches
        self._parts: list[Stretch | CapturedStretch] = []
        #: (input, address) of the inputs that graphs use in place
        self._in_place: list[tuple[int, int]] = []
        #: numbers that are in graphs, and their bits
        self._baked: list[int] = []
        self._held = b""
        #: outputs that are copied before they are handed out
        self._copied: list[int] | None = None

    @property
    def captures(self) -> list[Stretch]:
        """The stretches that are graphs."""
        return [part.stretch for part in self._graphs_of()]

    @property
    def complete(self) -> bool:
        """True if each stretch has had its turn."""
        return len(self._parts) == len(self._stretches)

    def capture(
        self, inputs: list[Value], params: tuple[Any, ...], moved: set[int]
    ) -> list[Value] | Stopped:
        """Run, and capture; as ``run`` otherwise.

        Args:
            moved: inputs that are not at the same address in each run.
        """
        places = [address(value) for value in inputs]
        pointers = [value.data_ptr() for value in inputs]  # type: ignore[union-attr]
        steady = set(range(len(inputs))) - moved
        kept = list(inputs)  # so that nothing else comes to lie where they do
        values: dict[int, Any] = dict(enumerate(inputs))
        inputs.clear()
        stopped = self._capture(values, params, steady)
        del kept
        in_place = {place for part in self._graphs_of() for place in part.in_place}
        self._in_place = [(i, pointers[i]) for i, p in enumerate(places) if p in in_place]
        self._baked = sorted({index for each in self.captures for index in each.params})
        self._held = self._of_baked(params)
        return self._outputs(values) if stopped is None else self._stopped(stopped, values)

    def fits(self, inputs: list[Value], params: tuple[Any, ...]) -> bool:
        """Return whether the graphs are valid for these inputs and numbers."""
        if any(inputs[i].data_ptr() != place for i, place in self._in_place):  # type: ignore[union-attr]
            return False
        return self._of_baked(params) == self._held

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied."""
        values: dict[int, Any] = dict(enumerate(inputs))
        inputs.clear()
        for part in self._parts:
            stopped = self._run_part(part, values, params)
            if stopped is not None:
                return self._stopped(stopped, values)
        return self._outputs(values)

    # -- stretches -----------------------------------------------------------------------

    def _capture(
        self, values: dict[int, Any], params: tuple[Any, ...], steady: set[int]
    ) -> int | None:
        """Run and, if possible, capture each stretch; return the node at which that stopped."""
        for stretch in self._stretches:
            part = self._captured(stretch, values, params, steady)
            if part is None:
                return stretch.first
            self._parts.append(part)
            stopped = self._run_part(part, values, params)
            if stopped is not None:
                return stopped
            if isinstance(part, CapturedStretch):
                steady.update(stretch.gives)
            else:
                steady |= steady_after(self._schedule, stretch, steady)
        return None

    def _captured(
        self, stretch: Stretch, values: dict[int, Any], params: tuple[Any, ...], steady: set[int]
    ) -> Stretch | CapturedStretch | None:
        """Return the stretch as a graph, or to be run step by step; None: the capture failed."""
        if not stretch.captured:
            return stretch
        try:
            return self._graphs.captured(stretch, self._interpreter, values, params, steady)
        except Uncapturable:
            return replace(stretch, captured=False)
        except Exception as error:  # noqa: BLE001 - reported to the client; nothing has been run
            self.error = error.with_traceback(None)
            return None

    def _run_part(
        self, part: Stretch | CapturedStretch, values: dict[int, Any], params: tuple[Any, ...]
    ) -> int | None:
        """Run a part; return the node at which the interpreter has to take over, if any."""
        if isinstance(part, CapturedStretch):
            if part.replay(values):
                return None
            self.misfits += 1
            return part.stretch.first
        for number in range(part.first, part.end):
            if self._schedule.graph.nodes[number].dynamic:
                return number
            try:
                self._interpreter.step(number, values, params, check=self._copied is None)
            except Exception:  # noqa: BLE001 - the interpreter meets it again, and reports it
                return number
        return None

    # -- memory --------------------------------------------------------------------------

    def _graphs_of(self) -> list[CapturedStretch]:
        return [part for part in self._parts if isinstance(part, CapturedStretch)]

    def _storages(self) -> set[int]:
        """Return the addresses of the storages that replays overwrite."""
        return {place for part in self._graphs_of() for place in part.storages}

    def _outputs(self, values: dict[int, Any]) -> list[Value]:
        """Return the outputs, with copies of those that a replay overwrites."""
        outputs = [values[number] for number in self._schedule.graph.outputs]
        first = self._copied is None
        if self._copied is None:
            storages = self._storages()
            lent = {i for i, value in enumerate(outputs) if address(value) in storages}
            self._copied = sorted(lent.union(self._schedule.writes.copied_outputs))
        copies = copied([outputs[position] for position in self._copied])
        for position, copy in zip(self._copied, copies, strict=True):
            outputs[position] = copy
        self._interpreter.lay_out(outputs, check=first)  # replays lay them out alike
        return outputs

    def _stopped(self, number: int, values: dict[int, Any]) -> Stopped:
        return Stopped(number, own_storages(values, self._storages()))

    def _of_baked(self, params: tuple[Any, ...]) -> bytes:
        return bits(tuple([params[index] for index in self._baked]))
