"""Eager executor of plans: node after node, with torch's own kernels.

The first run uses the checked interpreter, which compares every result with its inferred meta.
Later runs use code: a native program if the C++ extension loads, else generated Python. If the same
template was checked in other sizes, the first run uses a native program that checks its results
itself. When a node fails in code, the interpreter continues at that node with the current values:
values that depend on the failed node are marked as failed, and all others are still computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch

from lazygt import native
from lazygt.graph.alias import DONE, WRITE_BACK
from lazygt.graph.node import DEVICE, FUSED, Arg, Node, Param, Ref, params_in
from lazygt.runtime.executors import kernels
from lazygt.runtime.executors.interpreter import CheckedInterpreter, ReturnSlots, Stopped
from lazygt.runtime.executors.kernels import clone, restride
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.messages import Failure
from lazygt.runtime.plan import Plan, PlanTemplate, Schedule
from lazygt.runtime.store import Failed, Value

# -- generated Python code -------------------------------------------------------------------------


class GeneratedCode:
    """Schedule as straight-line Python code, up to a data-dependent last node."""

    def __init__(self, schedule: Schedule, interpreter: CheckedInterpreter, name: str) -> None:
        self._run, self._node_of_line = _Generator(schedule, interpreter, name).build()

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied."""
        try:
            outputs: list[Value] = self._run(inputs, params)
        except Exception as error:  # noqa: BLE001 - the interpreter meets it again, and reports it
            return self._stopped_at(error)
        return outputs

    def _stopped_at(self, error: Exception) -> Stopped:
        """Return the node that raised, and the values at that moment, from the traceback."""
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        frame = trace.tb_next
        node = self._node_of_line[frame.tb_lineno]
        variables = frame.tb_frame.f_locals
        values = {int(name[1:]): value for name, value in variables.items() if name[0] == "v"}
        error.__traceback__ = None
        return Stopped(node, values)


@lru_cache(maxsize=256)
def _code_of_source(source: str) -> CodeType:
    """Compile the source of ``run`` (cached). Constants are names, so other sizes share it."""
    names: dict[str, Any] = {}
    exec(compile(source, "<plan>", "exec"), names)
    code: CodeType = names["run"].__code__
    return code


class _End(Exception):
    """Signal that the interpreter has to continue, at a data-dependent last node."""


class _Generator:
    """Generator of the Python source of a schedule: ``vN`` is value N, ``kN`` a kernel."""

    def __init__(self, schedule: Schedule, interpreter: CheckedInterpreter, name: str) -> None:
        self.schedule, self.interpreter, self.name = schedule, interpreter, name
        self.names: dict[str, Any] = {
            "device": interpreter.device,
            "restride": restride,
            "clone": clone,
            "stop": _End(),
        }
        self.constants: dict[int, str] = {}
        self.kernels: dict[str, str] = {}
        self.source = ["def run(inputs, params):"]
        self.node_of_line = [0, 0]

    def build(self) -> tuple[Callable[..., Any], list[int]]:
        graph = self.schedule.graph
        names = "".join(f"v{number}, " for number in range(len(graph.inputs)))
        self.emit(0, f"{names}= inputs" if names else "pass")
        self.emit(0, "inputs.clear()")
        for number, (node, results) in enumerate(graph.numbered()):
            if node.dynamic:
                self.emit(number, "raise stop")
                break
            self.node(number, node, results)
            if self.schedule.frees[number]:
                dead = ", ".join(f"v{value}" for value in self.schedule.frees[number])
                self.emit(number, f"del {dead}")
        outputs = ", ".join(map(self.output, range(len(graph.outputs))))
        self.emit(max(len(graph.nodes) - 1, 0), f"return [{outputs}]")
        code = _code_of_source("\n".join(self.source)).replace(co_filename=f"<plan {self.name}>")
        return FunctionType(code, self.names), self.node_of_line

    def output(self, position: int) -> str:
        value = f"v{self.schedule.graph.outputs[position]}"
        if position in self.schedule.writes.copied_outputs:
            value = f"clone({value})"
        stride = self.interpreter.relaid_outputs.get(position)
        return value if stride is None else f"restride({value}, {self.constant(stride)})"

    def emit(self, number: int, line: str) -> None:
        self.source.append("    " + line)
        self.node_of_line.append(number)

    def node(self, number: int, node: Node, results: range) -> None:
        modes = self.schedule.writes.modes[number]
        if node.op == WRITE_BACK:
            self.write_back(number, node, results[0], modes[0])
            return
        copies: dict[int, str] = {}
        for target, mode in zip(node.writes, modes, strict=True):
            if mode == "copy" and target not in copies:
                copies[target] = f"w{target}"
                self.emit(number, f"w{target} = clone(v{target})")
        args = [self.arg(a, copies) for a in node.args]
        args += [f"{name}={self.arg(a, copies)}" for name, a in node.kwargs]
        call = f"{self.kernel(number, node.op)}({', '.join(args)})"
        pattern = self.pattern(self.interpreter.return_slots(node, results))
        self.emit(number, f"{pattern} = {call}" if pattern else call)
        for offset, target in enumerate(node.writes):
            version = results[len(node.fresh) + offset]
            self.emit(number, f"v{version} = {copies.get(target, f'v{target}')}")
        if copies:
            self.emit(number, f"del {', '.join(copies.values())}")
        for position in self.interpreter.restrided.get(number, ()):
            meta = node.results[position]
            assert meta is not None
            name = f"v{results[position]}"
            self.emit(number, f"{name} = restride({name}, {self.constant(meta.stride)})")

    def write_back(self, number: int, node: Node, result: int, mode: str) -> None:
        base, value = node.args[0].index, node.args[1].index
        if mode == DONE:
            self.emit(number, f"v{result} = v{base}")
            return
        source = f"clone(v{base})" if mode == "copy" else f"v{base}"
        chain = node.args[2]
        chain = self.arg(chain, {}) if params_in(chain) else self.constant(chain)
        self.emit(
            number, f"v{result} = {self.kernel(number, node.op)}({source}, v{value}, {chain})"
        )

    def kernel(self, number: int, op: str) -> str:
        key = f"{op} {number}" if op == FUSED else op
        name = self.kernels.get(key)
        if name is None:
            name = self.kernels[key] = f"k{len(self.kernels)}"
            kernel = self.interpreter.kernel(number, op)
            # the builtin behind an overload saves a Python call a node
            self.names[name] = getattr(kernel, "_op", kernel)
        return name

    def arg(self, arg: Arg, copies: dict[int, str]) -> str:
        kind = type(arg)
        if kind is Ref:
            return copies.get(arg.index) or f"v{arg.index}"
        if kind is Param:
            return f"params[{arg.index}]"
        if kind is tuple and all(type(item) is int for item in arg):
            return self.constant(list(arg))
        if kind is tuple:
            return "[" + ", ".join(self.arg(item, copies) for item in arg) + "]"
        if arg is DEVICE:
            return "device"
        if arg is None or kind is bool or kind is str:
            return repr(arg)
        return self.constant(arg)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[len(self.constants)] = name
        self.names[name] = value
        return name

    @staticmethod
    def pattern(slots: ReturnSlots) -> str:
        """Return the assignment target of a call's returns; empty if no return is new."""
        targets = []
        for slot in slots:
            if isinstance(slot, list):
                targets.append("[" + ", ".join(f"v{number}" for number in slot) + "]")
            else:
                targets.append("_" if slot is None else f"v{slot}")
        return ", ".join(targets)


# -- eager executor --------------------------------------------------------------------------------


class Code(Protocol):
    """Protocol of a schedule that was prepared for repeated runs."""

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied."""


#: Factory of code.
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
        outputs: the values of ``graph.outputs``.
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
        schedule: the schedule to run, if it differs from the plan's steps.
        compiled: callables of the fused nodes in ``schedule``, by number.
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
        return node

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan. ``inputs`` is emptied, so that values can die at their last use."""
        with torch._C._AutoDispatchBelowAutograd():
            if Failed in map(type, inputs):
                return self._run_checked(inputs, params)
            if not self._checked:
                return self._run_first(inputs, params)
            if self.code is None:
                self.code = self._build_code()
            outputs = self.code.run(inputs, params)
        if isinstance(outputs, Stopped):
            return self.go_on(outputs, params)
        return Outcome(outputs, [], None, [])

    def _build_code(self) -> Code:
        """Build the code for later runs; native code shares instructions with other sizes."""
        template, name = self._template, self.plan.digest.hex()[:12]
        make = self._make_code or code_of("auto")
        if make is not NativeCode or template is None or self.interpreter.lays_out:
            return make(self.schedule, self.interpreter, name)
        code = NativeCode(self.schedule, self.interpreter, name, template.code)
        template.code = template.code or code
        return code

    def _run_first(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Do the first run, in which all results are checked."""
        template = self._template
        if template is None or not template.checked or self._make_code is not NativeCode:
            outcome = self._run_checked(inputs, params)
            if template is not None:
                template.checked |= self._checked and not self.interpreter.lays_out
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
        """Finish a first run in the interpreter, after its code has stopped."""
        failures: list[Failure] = []
        values, start = stopped.values, stopped.node
        if stopped.made:
            failures = self.interpreter.check_results(start, values)
            for dead in self.schedule.frees[start]:
                values.pop(dead, None)
            start += 1
        outcome = self._finish(values, params, start, check=True)
        outcome.failures[:0] = failures
        if not outcome.failures:
            self._checked = True
            # a program with other strides is built in the next run
            self.code = None if self.interpreter.lays_out else code
        return outcome

    def go_on(self, stopped: Stopped, params: tuple[Any, ...]) -> Outcome:
        """Finish a run in the interpreter, after its code has stopped."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._finish(stopped.values, params, stopped.node)

    def _run_checked(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        values: dict[int, Value] = dict(enumerate(inputs))
        inputs.clear()
        outcome = self._finish(values, params, 0, check=not self._checked)
        self._checked = self._checked or not outcome.failures
        return outcome

    def _finish(
        self, values: dict[int, Value], params: tuple[Any, ...], start: int, check: bool = False
    ) -> Outcome:
        """Interpret from node ``start`` on; return the outputs and failures."""
        failures = self.interpreter.run(values, params, start, check)
        for failure in failures:
            if not failure.seq:
                failure.node = self.step_of(failure.node)
        outputs = [values[number] for number in self.schedule.graph.outputs]
        for position in self.schedule.writes.copied_outputs:
            value = outputs[position]
            outputs[position] = value if type(value) is Failed else kernels.clone(value)  # type: ignore[arg-type]
        self.interpreter.lay_out(outputs, check)
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
        self._counts = [1 if n.body is None else len(n.body.nodes) for n in schedule.graph.nodes]
        self._first_steps = [0, *accumulate(self._counts)]
        self.times: list[tuple[int, int, int, int]] = []
        self.interpreter = _Timed(schedule, device, executor.interpreter.compiled)
        self.interpreter.ran = self._ran
        if mark is not None:
            self.interpreter.begins = lambda number: mark(self._first_steps[number])

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, once. ``inputs`` is emptied."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._run_checked(inputs, params)

    def step_of(self, node: int) -> int:
        """Return the number of a node's first step in ``plan.steps``."""
        return self._first_steps[node]

    def _ran(self, number: int, begin: int) -> None:
        end = time.monotonic_ns()
        self.times.append((self._first_steps[number], self._counts[number], begin, end))


class _Timed(CheckedInterpreter):
    #: called with a node's number and start time, once it has ended
    ran: Callable[[int, int], None]
    #: called with a node's number when it begins
    begins: Callable[[int], None] = staticmethod(lambda _: None)

    def _node(
        self,
        number: int,
        node: Node,
        results: range,
        values: dict[int, Any],
        params: tuple[Any, ...],
        check: bool,
    ) -> None:
        self.begins(number)
        begin = time.monotonic_ns()
        try:
            super()._node(number, node, results, values, params, check)
            kernels.finish(self.device)
        finally:
            self.ran(number, begin)
