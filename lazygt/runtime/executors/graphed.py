"""Executor of hot plans on a GPU as CUDA graphs, with single steps between.

The executor begins as the one that it wraps (``plain``), and records the inputs and numbers that
change from run to run. Then the plan's steps are run once in torch's sync debug mode, to find the
steps that wait for the GPU; capturable segments are captured; and plain runs and replays are timed
alternately. The faster way stays.

A replay computes the same bits as the steps, with the same kernels. Before each replay, the fixed
inputs of a graph are checked: the addresses of inputs used in place, and the numbers that are
arguments of its kernels. After a mismatch the plain executor does the run; after many, the plan is
captured again without the changing nodes.
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
    CapturedSegment,
    CudaGraphs,
    Uncapturable,
    address,
    copied,
    copy_storages,
)
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Stopped
from lazygt.runtime.executors.segments import (
    GraphSegment,
    capturable,
    split_into_segments,
    steady_writes,
)
from lazygt.runtime.messages import Captured
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Failed, Value
from lazygt.runtime.wire import bits

# -- captured plan ---------------------------------------------------------------------------------


class CapturedPlan:
    """Runner of a plan segment by segment, some of them as CUDA graphs.

    The first run, ``capture``, gives results like any other: each segment is captured and replayed
    before the next one.

    Args:
        segments: the segments of the plan, in order.

    Attributes:
        error: the error of a failed capture.
        misfits: number of replays refused since a value had another layout than at the capture.
    """

    def __init__(
        self, interpreter: CheckedInterpreter, graphs: CudaGraphs, segments: Sequence[GraphSegment]
    ) -> None:
        self.error: Exception | None = None
        self.misfits = 0
        self._schedule, self._interpreter = interpreter.schedule, interpreter
        self._graphs = graphs
        self._planned_segments = segments
        self._segments: list[GraphSegment | CapturedSegment] = []
        #: (input, address) of the inputs that graphs use in place
        self._in_place: list[tuple[int, int]] = []
        #: indices of the run-time numbers that graphs contain, and these numbers' bits
        self._captured_params: list[int] = []
        self._captured_bits = b""
        #: positions of outputs to copy, since a replay overwrites their memory
        self._copied_outputs: list[int] | None = None

    @property
    def captures(self) -> list[GraphSegment]:
        """The segments that are graphs."""
        return [segment.segment for segment in self._captured_segments()]

    @property
    def complete(self) -> bool:
        """True if every segment was captured or run."""
        return len(self._segments) == len(self._planned_segments)

    def capture(
        self, inputs: list[Value], params: tuple[Any, ...], moved: set[int]
    ) -> list[Value] | Stopped:
        """Run the plan, and capture it meanwhile; arguments and result as for ``run``.

        Args:
            moved: inputs whose address changes from run to run.
        """
        storages = [address(value) for value in inputs]
        pointers = [value.data_ptr() for value in inputs]  # type: ignore[union-attr]
        steady = set(range(len(inputs))) - moved
        inputs_alive = list(inputs)  # so that no new value gets their addresses
        values: dict[int, Any] = dict(enumerate(inputs))
        inputs.clear()
        stopped = self._capture(values, params, steady)
        del inputs_alive
        in_place = {
            storage for captured in self._captured_segments() for storage in captured.in_place
        }
        self._in_place = [(i, pointers[i]) for i, p in enumerate(storages) if p in in_place]
        self._captured_params = sorted(
            {index for segment in self.captures for index in segment.params}
        )
        self._captured_bits = self._captured_param_bits(params)
        return self._outputs(values) if stopped is None else self._stopped(stopped, values)

    def fits(self, inputs: list[Value], params: tuple[Any, ...]) -> bool:
        """Return whether the graphs are valid for these inputs and numbers."""
        if any(inputs[i].data_ptr() != pointer for i, pointer in self._in_place):  # type: ignore[union-attr]
            return False
        return self._captured_param_bits(params) == self._captured_bits

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied."""
        values: dict[int, Any] = dict(enumerate(inputs))
        inputs.clear()
        for segment in self._segments:
            stopped = self._run_segment(segment, values, params)
            if stopped is not None:
                return self._stopped(stopped, values)
        return self._outputs(values)

    # -- segments ------------------------------------------------------------------------

    def _capture(
        self, values: dict[int, Any], params: tuple[Any, ...], steady: set[int]
    ) -> int | None:
        """Capture, if possible, and run each segment; return the node of a failure, or None.

        Args:
            values: the live values; changed to those after the last segment.
            steady: numbers of the values with the same address in each run; added to.
        """
        for segment in self._planned_segments:
            captured = self._captured(segment, values, params, steady)
            if captured is None:
                return segment.first
            self._segments.append(captured)
            stopped = self._run_segment(captured, values, params)
            if stopped is not None:
                return stopped
            if isinstance(captured, CapturedSegment):
                steady.update(segment.outputs)
            else:
                steady |= steady_writes(self._schedule, segment, steady)
        return None

    def _captured(
        self,
        segment: GraphSegment,
        values: dict[int, Any],
        params: tuple[Any, ...],
        steady: set[int],
    ) -> GraphSegment | CapturedSegment | None:
        """Return the segment as a graph, or unchanged to run it step by step; None: failure."""
        if not segment.captured:
            return segment
        try:
            return self._graphs.captured(segment, self._interpreter, values, params, steady)
        except Uncapturable:
            return replace(segment, captured=False)
        except Exception as error:  # noqa: BLE001 - reported to the client; nothing has been run
            self.error = error.with_traceback(None)
            return None

    def _run_segment(
        self,
        segment: GraphSegment | CapturedSegment,
        values: dict[int, Any],
        params: tuple[Any, ...],
    ) -> int | None:
        """Run a segment; return the node at which the interpreter has to continue, if any."""
        if isinstance(segment, CapturedSegment):
            if segment.replay(values):
                return None
            self.misfits += 1
            return segment.segment.first
        for number in range(segment.first, segment.end):
            if self._schedule.graph.nodes[number].dynamic:
                return number
            try:
                self._interpreter.step(number, values, params, check=self._copied_outputs is None)
            except Exception:  # noqa: BLE001 - the interpreter meets it again, and reports it
                return number
        return None

    # -- memory --------------------------------------------------------------------------

    def _captured_segments(self) -> list[CapturedSegment]:
        return [segment for segment in self._segments if isinstance(segment, CapturedSegment)]

    def _storages(self) -> set[int]:
        """Return the addresses of the storages that replays overwrite."""
        return {storage for segment in self._captured_segments() for storage in segment.storages}

    def _outputs(self, values: dict[int, Any]) -> list[Value]:
        """Return the outputs, with copies of those that a replay overwrites."""
        outputs = [values[number] for number in self._schedule.graph.outputs]
        is_first_run = self._copied_outputs is None
        if self._copied_outputs is None:
            storages = self._storages()
            overwritten = {i for i, value in enumerate(outputs) if address(value) in storages}
            self._copied_outputs = sorted(overwritten.union(self._schedule.writes.copied_outputs))
        copies = copied([outputs[position] for position in self._copied_outputs])
        for position, copy in zip(self._copied_outputs, copies, strict=True):
            outputs[position] = copy
        self._interpreter.restride_outputs(outputs, check=is_first_run)
        return outputs

    def _stopped(self, number: int, values: dict[int, Any]) -> Stopped:
        return Stopped(number, copy_storages(values, self._storages()))

    def _captured_param_bits(self, params: tuple[Any, ...]) -> bytes:
        return bits(tuple([params[index] for index in self._captured_params]))


# -- graphed executor ------------------------------------------------------------------------------

#: Number of observed runs before a capture: if graphs are measured, and if not.
WATCHED, WATCHED_NOW = 6, 2
#: Number of timed runs of each way, plain and as graphs.
TRIALS = 4
#: Seconds of Python overhead per replay, which the plain executor's known runs save.
PYTHON_SECONDS = 4e-5
#: Penalty of a run that can't be a replay (a replay subtracts 1), and the sum that ends replays.
MISMATCH, TOO_MANY = 2, 6
#: Largest number of captures of a plan.
CAPTURES = 4

#: Phases of a graphed executor, in their order; _TRY is left out if graphs are not measured.
_WATCH, _FIND_SYNCHRONIZING, _CAPTURE, _TRY, _REPLAY, _PLAIN = range(6)


class GraphedExecutor(EagerExecutor):
    """Executor of a plan that runs it as CUDA graphs from some run on.

    Args:
        plain: the executor that runs it otherwise.
        graphs: the CUDA graphs of the worker.

    Attributes:
        pending_report: the decision since the worker read this attribute last.
        given_up: ``plain`` will do all further runs.
    """

    def __init__(self, plain: EagerExecutor, graphs: CudaGraphs) -> None:
        interpreter = plain.interpreter
        super().__init__(plain.plan, interpreter.device, plain.schedule, interpreter.compiled)
        self._plain = plain
        self.pending_report: Captured | None = None
        self._graphs = graphs
        self._phase, self._runs, self._captures = _WATCH, 0, 0
        #: addresses of the inputs, and the numbers, of the last observed run
        self._addresses: list[int] | None = None
        self._numbers: tuple[Any, ...] = ()
        #: inputs whose address changed, numbers that changed, nodes that synchronize
        self._moved_inputs: set[int] = set()
        self._changed_params: set[int] = set()
        self._excluded_nodes: set[int] = set()
        self._captured: CapturedPlan | None = None
        self._mismatch_score = 0
        #: seconds of the timed runs, alternately plain and as graphs
        self._run_seconds: list[float] = []

    @property
    def plain(self) -> EagerExecutor:
        """The wrapped executor, which runs the plan node by node."""
        return self._plain

    @property
    def given_up(self) -> bool:
        """True if ``plain`` does all further runs."""
        return self._phase == _PLAIN

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan. ``inputs`` is emptied, so that values can die at their last use."""
        if self._phase == _PLAIN or Failed in map(type, inputs):
            return self.plain.run(inputs, params)
        if self._mismatch_score >= TOO_MANY:
            self._phase, self._captured, self._mismatch_score = _CAPTURE, None, 0
        with torch._C._AutoDispatchBelowAutograd():
            if self._phase == _WATCH:
                return self._watch(inputs, params)
            if self._phase == _FIND_SYNCHRONIZING:
                return self._find_synchronizing(inputs, params)
            if self._phase == _CAPTURE:
                return self._capture(inputs, params)
            return self._run_captured(inputs, params)

    # -- before a capture ----------------------------------------------------------------

    def _watch(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plain executor, and record changes; start the capture after enough runs."""
        self._note_changes(inputs, params)
        self._runs += 1
        if self._runs >= (WATCHED if self._graphs.measured else WATCHED_NOW):
            self._phase = _FIND_SYNCHRONIZING
        return self.plain.run(inputs, params)

    def _note_changes(self, inputs: list[Value], params: tuple[Any, ...]) -> None:
        """Record the inputs and numbers that differ from the last run's."""
        addresses = [address(value) for value in inputs]
        if self._addresses is not None:
            pairs = zip(addresses, self._addresses, strict=True)
            self._moved_inputs.update(i for i, (now, then) in enumerate(pairs) if now != then)
            numbers = zip(params, self._numbers, strict=True)
            self._changed_params.update(i for i, pair in enumerate(numbers) if _differ(*pair))
        self._addresses, self._numbers = addresses, params

    def _find_synchronizing(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run step by step, and record the steps that synchronize with the GPU."""
        if not split_into_segments(self.schedule, (), self._changed_params):
            self._phase = _PLAIN
            return self.plain.run(inputs, params)
        self._note_changes(inputs, params)
        finder = _SyncFinder(self.schedule, self.interpreter.device, self.interpreter.compiled)
        finder.graphs, finder.synchronizing = self._graphs, self._excluded_nodes
        values = dict(enumerate(inputs))
        inputs.clear()
        self.interpreter, interpreter = finder, self.interpreter
        outcome = self._finish(values, params, 0, check=True)
        self.interpreter, self._phase = interpreter, _CAPTURE
        return outcome

    # -- captures ------------------------------------------------------------------------

    def _capture(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, and capture it meanwhile."""
        self._note_changes(inputs, params)
        segments = split_into_segments(self.schedule, self._excluded_nodes, self._changed_params)
        refusal = self._refusal(segments)
        if refusal is not None:
            self._give_up(refusal)
            return self.plain.run(inputs, params)
        self._captures += 1
        limit = self._graphs.limit
        plan = CapturedPlan(self.interpreter, self._graphs, segments)
        captured = plan.capture(inputs, params, self._moved_inputs)
        outcome = self._outcome(captured, params, check=True)
        if plan.error is not None:
            self._exclude_node(self._graphs.stopped_at, plan.error)
        elif not plan.complete:
            self._captures -= 1  # an op has failed, which does not count as a capture
        elif not plan.captures:
            self._give_up("none of it can be captured")
        elif self._graphs.nbytes > limit:
            self._give_up(_too_large(self._graphs.nbytes, limit))
        else:
            self._captured, self._mismatch_score, self._run_seconds = plan, 0, []
            self._phase = _TRY if self._graphs.measured else _REPLAY
            if self._phase == _REPLAY:
                self._report(0.0)
        return outcome

    def _exclude_node(self, node: int | None, error: Exception) -> None:
        """Have the next run capture without the node at which this capture failed, or give up."""
        if node is None or not self._graphs.usable:
            self._give_up(f"{type(error).__name__}: {error}".rstrip(": "), failed=True)
        else:
            self._excluded_nodes.add(node)

    def _refusal(self, segments: list[GraphSegment]) -> str | None:
        """Return the reason against a capture, if there is one."""
        if not segments:
            return "too few steps in a row can be captured"
        if self._captures == CAPTURES:
            return "its inputs move and its numbers change"
        if not self._graphs.usable:
            return f"{FAILURES} captures have failed in this worker"
        needed = _peak_result_bytes(self.schedule)
        if not self._graphs.room_for(needed):
            return _too_large(needed, self._graphs.limit)
        return None

    # -- runs ----------------------------------------------------------------------------

    def _run_captured(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the captured plan if its graphs are valid for this run; else the plain executor."""
        assert self._captured is not None
        if not self._captured.fits(inputs, params):
            self._note_changes(inputs, params)
            self._mismatch_score += MISMATCH
            return self.plain.run(inputs, params)
        return self._try(inputs, params) if self._phase == _TRY else self._replay(inputs, params)

    def _replay(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the captured plan, and score whether all its graphs could be replayed."""
        plan = self._captured
        assert plan is not None
        misfits = plan.misfits
        outcome = self._outcome(plan.run(inputs, params), params)
        self._mismatch_score += MISMATCH if plan.misfits > misfits else -(self._mismatch_score > 0)
        return outcome

    def _try(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, timed, alternately plain and as graphs; then decide for the faster way."""
        run = self._replay if len(self._run_seconds) % 2 else self.plain.run
        seconds, outcome = self._graphs.seconds(lambda: run(inputs, params))
        self._run_seconds.append(seconds)
        if len(self._run_seconds) == 2 * TRIALS:
            plain, graphed = min(self._run_seconds[::2]), min(self._run_seconds[1::2])
            if graphed + PYTHON_SECONDS < plain:
                self._phase = _REPLAY
                self._report(plain / max(graphed, 1e-9))
            else:
                micros = f"{plain * 1e6:.0f} us, and {graphed * 1e6:.0f} us as CUDA graphs"
                self._give_up(f"it takes {micros}")
        return outcome  # type: ignore[no-any-return]

    # -- decisions -----------------------------------------------------------------------

    def _give_up(self, reason: str, failed: bool = False) -> None:
        """Do all further runs with the plain executor, and report why.

        Args:
            failed: a capture has raised an error.
        """
        self._phase, self._captured = _PLAIN, None
        self.pending_report = Captured(self.plan.digest, error=reason, failed=failed)

    def _report(self, gain: float) -> None:
        """Report that the plan runs as CUDA graphs.

        Args:
            gain: measured speedup; 0: not measured.
        """
        assert self._captured is not None
        captures, nbytes = self._captured.captures, self._graphs.nbytes
        nodes = [
            n
            for segment in captures
            for n in self.schedule.graph.nodes[segment.first : segment.end]
        ]
        steps = sum(1 if node.body is None else len(node.body.nodes) for node in nodes)
        self.pending_report = Captured(self.plan.digest, len(captures), steps, nbytes, gain)


class _SyncFinder(CheckedInterpreter):
    """Interpreter that finds the nodes that synchronize with the GPU.

    Such a node raises and is run again, so nodes that write or draw are not checked.
    """

    graphs: CudaGraphs
    synchronizing: set[int]  # numbers of the nodes, added to

    def _node(self, number: int, node: Node, /, *rest: Any) -> None:
        """Run a node, first with synchronization forbidden; if that fails, run it as usual."""
        if not node.writes and capturable(node) and not draws(node):
            try:
                with self.graphs.forbid_synchronization():
                    return super()._node(number, node, *rest)
            except RuntimeError as error:
                if not self.graphs.is_synchronization_error(error):
                    raise
                self.synchronizing.add(number)
        return super()._node(number, node, *rest)


def _too_large(nbytes: int, limit: int) -> str:
    return f"it takes {nbytes} bytes, of max_cuda_graph_bytes={limit}"


def _peak_result_bytes(schedule: Schedule) -> int:
    """Return the peak of the live bytes of the nodes' results, without inputs."""
    graph = schedule.graph
    empty_inputs = tuple(intern((0,), (1,), meta.dtype) for meta in graph.inputs)
    return peak_bytes(replace(graph, inputs=empty_inputs), schedule.frees)


def _differ(now: Any, then: Any) -> bool:
    """Return whether two numbers differ in type or bits."""
    return now is not then and bits((now,)) != bits((then,))
