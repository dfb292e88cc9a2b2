"""Eager executor of plans: node after node, with torch's own kernels.

The first run uses the checked interpreter, which compares every result with its inferred meta.
Later runs use code: a native program if the C++ extension loads, else generated Python. If the same
template was checked in other sizes, the first run uses a native program that checks its results
itself. When a node fails in code, the interpreter continues at that node with the current values:
values that depend on the failed node are marked as failed, and all others are still computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, islice
from typing import Any, Protocol

import torch

from lazygt import native
from lazygt.graph.node import Node
from lazygt.runtime.executors import kernels
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Stopped
from lazygt.runtime.executors.lowering import GeneratedCode
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.messages import Failure
from lazygt.runtime.plan import Plan, PlanTemplate, Schedule
from lazygt.runtime.store import Failed, Value


class Code(Protocol):
    """Protocol of a schedule that was prepared for repeated runs.

    Code stops at a node that fails or is data-dependent; the interpreter then finishes the run.
    """

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied.

        Args:
            params: run-time numbers of the plan.
        """


#: Factory of code: (schedule, interpreter, name) -> code.
MakeCode = Callable[[Schedule, CheckedInterpreter, str], Code]


def code_of(setting: str) -> MakeCode:
    """Return the factory of code for a value of ``LAZYGT_PLAN_CODE``.

    Raises:
        LazyGTError: native code, and there is no extension.
    """
    if setting == "native":
        native.extension()
        return NativeCode
    return NativeCode if setting == "auto" and native.load().module else GeneratedCode


class Outcome:
    """Results of a run.

    Attributes:
        outputs: the values of the graph's outputs.
        failures: the failures of nodes.
        returned, written: returns of a data-dependent last node, and the tensors that it wrote.
    """

    __slots__ = ("failures", "outputs", "returned", "written")

    def __init__(
        self, outputs: list[Value], failures: list[Failure], returned: Any, written: list[Any]
    ) -> None:
        self.outputs, self.failures = outputs, failures
        self.returned, self.written = returned, written


class EagerExecutor:
    """Executor of a plan, node after node, with torch's own kernels.

    Args:
        schedule: the schedule to run, if it differs from the plan's steps: some of its nodes are
            fused ones.
        compiled: callables of these nodes, by number in ``schedule``.
        code: factory of the code; None: ``code_of("auto")``.
        template: the plan's template, if code is shared with plans of other sizes.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        schedule: Schedule | None = None,
        compiled: Mapping[int, Callable[..., Any]] | None = None,
        code: MakeCode | None = None,
        template: PlanTemplate | None = None,
    ) -> None:
        self.plan, self._template = plan, template
        self.schedule = schedule or plan.steps
        self.interpreter = CheckedInterpreter(self.schedule, device, compiled)
        self._make_code = code
        #: code for all runs after the first; None until it is built
        self.code: Code | None = None
        self._checked = False

    @property
    def plain(self) -> EagerExecutor:
        """The executor that runs the plan node by node: itself, unless it wraps another one."""
        return self

    def step_of(self, node: int) -> int:
        """Return the number of a node's first step in ``plan.steps``."""
        return next(islice(_first_steps(self.schedule), node, None))

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan. ``inputs`` is emptied, so that values can die at their last use."""
        with torch._C._AutoDispatchBelowAutograd():
            if Failed in map(type, inputs):
                return self._run_checked(inputs, params)
            if not self._checked:
                return self._run_first(inputs, params)
            if self.code is None:
                self.code = self._build_code()
            return self._outcome(self.code.run(inputs, params), params)

    def _build_code(self) -> Code:
        """Build the code for later runs.

        Native code shares instructions with plans of the same template in other sizes, unless it
        changes strides: these depend on the sizes.
        """
        template, name = self._template, self.plan.digest.hex()[:12]
        make = self._make_code or code_of("auto")
        if make is not NativeCode or template is None or self.interpreter.changes_strides:
            return make(self.schedule, self.interpreter, name)
        code = NativeCode(self.schedule, self.interpreter, name, template.code)
        template.code = template.code or code
        return code

    def _run_first(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Do the first run, in which all results are checked against their inferred metas.

        The interpreter checks them, or native code, if the template was checked in other sizes.
        """
        template = self._template
        if template is None or not template.checked or self._make_code is not NativeCode:
            outcome = self._run_checked(inputs, params)
            if template is not None:
                template.checked |= self._checked and not self.interpreter.changes_strides
            return outcome
        code = self._build_code()
        assert isinstance(code, NativeCode)
        outputs = code.run(inputs, params, check=True)
        if isinstance(outputs, list):
            self.code, self._checked = code, True
            return Outcome(outputs, [], None, [])
        return self._finish_first_run(outputs, params, code)

    def _finish_first_run(
        self, stopped: Stopped, params: tuple[Any, ...], code: NativeCode
    ) -> Outcome:
        """Finish a first run in the interpreter, from the node at which ``code`` stopped.

        If no node fails, later runs use ``code``.
        """
        failures: list[Failure] = []
        values, start = stopped.values, stopped.node
        if stopped.has_results:
            # the node ran, and returned an unexpected result: do here what the code omitted
            failures = self.interpreter.check_results(start, values)
            for dead in self.schedule.frees[start]:
                values.pop(dead, None)
            start += 1
        outcome = self._finish(values, params, start, check=True)
        outcome.failures[:0] = failures
        if not outcome.failures:
            self._checked = True
            # ``code`` changes no strides: if that is needed, the next run builds code that does
            self.code = None if self.interpreter.changes_strides else code
        return outcome

    def finish_run(self, stopped: Stopped, params: tuple[Any, ...]) -> Outcome:
        """Finish a run in the interpreter, from the node at which its code stopped."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._outcome(stopped, params)

    def _outcome(
        self, outputs: list[Value] | Stopped, params: tuple[Any, ...], check: bool = False
    ) -> Outcome:
        """Return the outcome of code; if it has stopped, the interpreter finishes the run."""
        if isinstance(outputs, Stopped):
            return self._finish(outputs.values, params, outputs.node, check)
        return Outcome(outputs, [], None, [])

    def _run_checked(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Interpret all nodes; results are checked until one run has had no failure."""
        values: dict[int, Value] = dict(enumerate(inputs))
        inputs.clear()
        outcome = self._finish(values, params, 0, check=not self._checked)
        self._checked = self._checked or not outcome.failures
        return outcome

    def _finish(
        self, values: dict[int, Value], params: tuple[Any, ...], start: int, check: bool = False
    ) -> Outcome:
        """Interpret from node ``start`` on; return the outputs and failures.

        Args:
            values: the live values before ``start``; results are added, dead ones removed.
            check: compare the results with their inferred metas.
        """
        failures = self.interpreter.run(values, params, start, check)
        for failure in failures:
            if not failure.seq:  # a failure of this run, not of an earlier one
                failure.node = self.step_of(failure.node)
        outputs = [values[number] for number in self.schedule.graph.outputs]
        for position in self.schedule.writes.copied_outputs:
            value = outputs[position]
            outputs[position] = value if type(value) is Failed else kernels.clone(value)  # type: ignore[arg-type]
        self.interpreter.restride_outputs(outputs, check)
        return Outcome(outputs, failures, self.interpreter.returned, self.interpreter.written)


class TimedExecutor(EagerExecutor):
    """Executor that runs the schedule of another one node by node, and times each node.

    A node's time includes its copies and some microseconds of interpreter overhead; on a GPU, each
    node is synchronized.

    Args:
        mark: callback with the step of each node that begins.

    Attributes:
        times: (step, count, begin, end) of the run, as ``messages.Timings`` has them.
    """

    def __init__(self, executor: EagerExecutor, mark: Callable[[int], None] | None = None) -> None:
        schedule, device = executor.schedule, executor.interpreter.device
        super().__init__(executor.plan, device, schedule)
        self.interpreter = timed = _Timed(schedule, device, executor.interpreter.compiled)
        timed.mark, self.times = mark, timed.times

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, once. ``inputs`` is emptied."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._run_checked(inputs, params)


class _Timed(CheckedInterpreter):
    """Interpreter that times each node; see `TimedExecutor`."""

    mark: Callable[[int], None] | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: list[tuple[int, int, int, int]] = []
        self._steps = list(_first_steps(self.schedule))

    def _node(self, number: int, node: Node, /, *rest: Any) -> None:
        """Run a node; append (first step, number of steps, begin, end in ns) to ``times``."""
        first, after = self._steps[number : number + 2]
        if self.mark is not None:
            self.mark(first)
        begin = time.monotonic_ns()
        try:
            super()._node(number, node, *rest)
            kernels.synchronize(self.device)
        finally:
            self.times.append((first, after - first, begin, time.monotonic_ns()))


def _first_steps(schedule: Schedule) -> Iterable[int]:
    """Yield the number of each node's first step in ``plan.steps``, then the number of steps."""
    nodes = schedule.graph.nodes
    return accumulate((1 if n.body is None else len(n.body.nodes) for n in nodes), initial=0)
