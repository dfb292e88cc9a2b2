"""The graphed executor: on a GPU, a hot plan as CUDA graphs, with other steps between.

It begins as the executor that it wraps (``plain``), and notes the inputs and numbers that change
from run to run. Then the plan's steps are run once with torch reporting those that wait for the
GPU, the capturable ones are captured, and both ways are timed in turn. The faster one stays.

A replay computes the same as the steps, with the same kernels. The fixed parts of a graph are
checked before each: the addresses of the inputs that it uses in place, and the numbers that are
arguments of its kernels. If one differs the run is the plain executor's; if that goes on, the plan
is captured anew without the parts that have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lazygt.graph.alias import draws
from lazygt.graph.liveness import peak_bytes
from lazygt.graph.meta import intern
from lazygt.graph.node import Node
from lazygt.runtime.executors.cuda_graphs import (
    FAILURES,
    CapturedStretch,
    CudaGraphs,
    Uncapturable,
    address,
    copied,
    own_storages,
)
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Stopped
from lazygt.runtime.executors.segments import Stretch, capturable, cut, steady_after
from lazygt.runtime.messages import Captured
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Failed, Value
from lazygt.runtime.wire import bits

# -- A plan as CUDA graphs, and the steps between them that are run one by one ---------------------


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


# -- the graphed executor: on a GPU, a hot plan as CUDA graphs, with other steps between -----------

#: Number of runs that are watched before a plan is captured, if it is measured, and if not.
WATCHED, WATCHED_NOW = 6, 2
#: Number of timed runs of each way.
TRIALS = 4
#: Seconds of Python before a run here, which known runs of the plain executor save.
PYTHON = 4e-5
#: Penalty of a run that can't be a replay (one that can subtracts 1), and the largest allowed sum.
MISMATCH, TOO_MANY = 2, 6
#: Largest number of captures of a plan.
CAPTURES = 4

_WATCH, _ASK, _CAPTURE, _TRY, _REPLAY, _PLAIN = range(6)


class GraphedExecutor(EagerExecutor):
    """Executor of a plan that runs it as CUDA graphs from some run on.

    Args:
        plain: the executor that runs it otherwise.
        graphs: the CUDA graphs of the worker.

    Attributes:
        news: the decision made since the worker looked last.
        given_up: ``plain`` will do all further runs.
    """

    def __init__(self, plain: EagerExecutor, graphs: CudaGraphs) -> None:
        interpreter = plain.interpreter
        super().__init__(plain.plan, interpreter.device, plain.schedule, interpreter.compiled)
        self._plain = plain
        self.news: Captured | None = None
        self._graphs = graphs
        self._phase, self._runs, self._captures = _WATCH, 0, 0
        #: of the last watched run: the addresses of its inputs, and its numbers
        self._places: list[int] | None = None
        self._numbers: tuple[Any, ...] = ()
        #: inputs that have moved, numbers that have changed, nodes that wait for the GPU
        self._moved: set[int] = set()
        self._changed: set[int] = set()
        self._apart: set[int] = set()
        self._captured: CapturedPlan | None = None
        self._mismatches = 0
        #: seconds of the runs that were timed: plain, as graphs, plain ...
        self._times: list[float] = []

    @property
    def plain(self) -> EagerExecutor:
        """The executor that it wraps."""
        return self._plain

    def step_of(self, node: int) -> int:
        """Return the number of a node's first step in ``plan.steps``."""
        return self._plain.step_of(node)

    @property
    def given_up(self) -> bool:
        """See the class."""
        return self._phase == _PLAIN

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan. ``inputs`` is emptied, so that values can die at their last use."""
        if self._phase == _PLAIN or Failed in map(type, inputs):
            return self.plain.run(inputs, params)
        if self._mismatches >= TOO_MANY:
            self._phase, self._captured, self._mismatches = _CAPTURE, None, 0
        with torch._C._AutoDispatchBelowAutograd():
            if self._phase == _WATCH:
                return self._watch(inputs, params)
            if self._phase == _ASK:
                return self._ask(inputs, params)
            if self._phase == _CAPTURE:
                return self._capture(inputs, params)
            return self._again(inputs, params)

    # -- before a capture ----------------------------------------------------------------

    def _watch(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        self._look(inputs, params)
        self._runs += 1
        if self._runs >= (WATCHED if self._graphs.measured else WATCHED_NOW):
            self._phase = _ASK
        return self.plain.run(inputs, params)

    def _look(self, inputs: list[Value], params: tuple[Any, ...]) -> None:
        """Note the inputs and numbers that differ from the last run's."""
        places = [address(value) for value in inputs]
        if self._places is not None:
            pairs = zip(places, self._places, strict=True)
            self._moved.update(i for i, (now, then) in enumerate(pairs) if now != then)
            numbers = zip(params, self._numbers, strict=True)
            self._changed.update(i for i, pair in enumerate(numbers) if _differ(*pair))
        self._places, self._numbers = places, params

    def _ask(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run step by step, and note the steps that wait for the GPU."""
        if not cut(self.schedule, (), self._changed):
            self._phase = _PLAIN
            return self.plain.run(inputs, params)
        self._look(inputs, params)
        asking = _Asking(self.schedule, self.interpreter.device, self.interpreter.compiled)
        asking.graphs, asking.waits = self._graphs, self._apart
        values = dict(enumerate(inputs))
        inputs.clear()
        self.interpreter, ours = asking, self.interpreter
        outcome = self._finish(values, params, 0, check=True)
        self.interpreter, self._phase = ours, _CAPTURE
        return outcome

    # -- captures ------------------------------------------------------------------------

    def _capture(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, and capture it meanwhile."""
        self._look(inputs, params)
        stretches = cut(self.schedule, self._apart, self._changed)
        refusal = self._refusal(stretches)
        if refusal is not None:
            self._give_up(refusal)
            return self.plain.run(inputs, params)
        self._captures += 1
        limit = self._graphs.limit
        plan = CapturedPlan(self.interpreter, self._graphs, stretches)
        captured = plan.capture(inputs, params, self._moved)
        outcome = self._outcome(captured, params, check=True)
        if plan.error is not None:
            self._leave_out(self._graphs.stopped_at, plan.error)
        elif not plan.complete:
            self._captures -= 1  # an op has failed: that was no try
        elif not plan.captures:
            self._give_up("none of it can be captured")
        elif self._graphs.nbytes > limit:
            self._give_up(_too_large(self._graphs.nbytes, limit))
        else:
            self._captured, self._mismatches, self._times = plan, 0, []
            self._phase = _TRY if self._graphs.measured else _REPLAY
            if self._phase == _REPLAY:
                self._tell(0.0)
        return outcome

    def _leave_out(self, node: int | None, error: Exception) -> None:
        """Capture again in the next run, without the node at which this capture failed."""
        if node is None or not self._graphs.usable:
            self._give_up(f"{type(error).__name__}: {error}".rstrip(": "), failed=True)
        else:
            self._apart.add(node)

    def _refusal(self, stretches: list[Stretch]) -> str | None:
        """Return the reason against a capture, if there is one."""
        if not stretches:
            return "too few steps in a row can be captured"
        if self._captures == CAPTURES:
            return "its inputs move and its numbers change"
        if not self._graphs.usable:
            return f"{FAILURES} captures have failed in this worker"
        needed = _made_at_once(self.schedule)
        if not self._graphs.room_for(needed):
            return _too_large(needed, self._graphs.limit)
        return None

    # -- runs ----------------------------------------------------------------------------

    def _again(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the captured plan if it is valid for this run; else the plain one."""
        assert self._captured is not None
        if not self._captured.fits(inputs, params):
            self._look(inputs, params)
            self._mismatches += MISMATCH
            return self.plain.run(inputs, params)
        return self._try(inputs, params) if self._phase == _TRY else self._replay(inputs, params)

    def _replay(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        plan = self._captured
        assert plan is not None
        misfits = plan.misfits
        outcome = self._outcome(plan.run(inputs, params), params)
        self._mismatches += MISMATCH if plan.misfits > misfits else -(self._mismatches > 0)
        return outcome

    def _try(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, timed, alternately plain and as graphs."""
        run = self._replay if len(self._times) % 2 else self.plain.run
        seconds, outcome = self._graphs.seconds(lambda: run(inputs, params))
        self._times.append(seconds)
        if len(self._times) == 2 * TRIALS:
            plain, graphed = min(self._times[::2]), min(self._times[1::2])
            if graphed + PYTHON < plain:
                self._phase = _REPLAY
                self._tell(plain / max(graphed, 1e-9))
            else:
                micros = f"{plain * 1e6:.0f} us, and {graphed * 1e6:.0f} us as CUDA graphs"
                self._give_up(f"it takes {micros}")
        return outcome  # type: ignore[no-any-return]

    def _outcome(
        self, outputs: list[Value] | Stopped, params: tuple[Any, ...], check: bool = False
    ) -> Outcome:
        """Finish a run step by step if it has stopped; `check` as in ``_finish``."""
        if isinstance(outputs, Stopped):
            return self._finish(outputs.values, params, outputs.node, check)
        return Outcome(outputs, [], None, [])

    # -- decisions -----------------------------------------------------------------------

    def _give_up(self, reason: str, failed: bool = False) -> None:
        self._phase, self._captured = _PLAIN, None
        self.news = Captured(self.plan.digest, error=reason, failed=failed)

    def _tell(self, gain: float) -> None:
        assert self._captured is not None
        captures, nbytes = self._captured.captures, self._graphs.nbytes
        nodes = [n for each in captures for n in self.schedule.graph.nodes[each.first : each.end]]
        steps = sum(1 if node.body is None else len(node.body.nodes) for node in nodes)
        self.news = Captured(self.plan.digest, len(captures), steps, nbytes, gain)


class _Asking(CheckedInterpreter):
    """Interpreter that finds the nodes that wait for the GPU.

    A node is run again if it would have waited, so nodes that write or draw are not checked.
    """

    graphs: CudaGraphs
    waits: set[int]

    def _node(
        self,
        number: int,
        node: Node,
        results: range,
        values: dict[int, Any],
        params: tuple[Any, ...],
        check: bool,
    ) -> None:
        if not node.writes and capturable(node) and not draws(node):
            try:
                with self.graphs.nobody_waits():
                    return super()._node(number, node, results, values, params, check)
            except RuntimeError as error:
                if not self.graphs.waited(error):
                    raise
                self.waits.add(number)
        return super()._node(number, node, results, values, params, check)


def _too_large(nbytes: int, limit: int) -> str:
    return f"it takes {nbytes} bytes, of max_cuda_graph_bytes={limit}"


def _made_at_once(schedule: Schedule) -> int:
    """Return the peak bytes of the nodes' results; inputs are not counted."""
    graph = schedule.graph
    nothing = tuple(intern((0,), (1,), meta.dtype) for meta in graph.inputs)
    return peak_bytes(replace(graph, inputs=nothing), schedule.frees)


def _differ(now: Any, then: Any) -> bool:
    return now is not then and bits((now,)) != bits((then,))
