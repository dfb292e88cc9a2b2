"""The eager executor: node after node, with torch's own kernels.

The first run goes through the checked interpreter, which compares every result with the client's
inferred one; later runs go through code: a native program if the extension loads, else generated
Python. A plan with a program that was checked in other sizes is a native program from the start,
which compares its results itself. When a node fails there, the interpreter takes over at that node
with the values as they stand: values that depend on the failed node are marked, everything else is
still computed.
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
from lazygt.runtime import kernels
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Places, Stopped
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.kernels import clone, restride
from lazygt.runtime.messages import Failure
from lazygt.runtime.plan import Plan, PlanTemplate, Schedule
from lazygt.runtime.store import Failed, Value

# -- generated code: a schedule as straight-line Python --------------------------------------------


class GeneratedCode:
    """Runner of a schedule up to its data-dependent last node, if there is one."""

    def __init__(self, schedule: Schedule, interpreter: CheckedInterpreter, name: str) -> None:
        self._run, self._lines = _Generator(schedule, interpreter, name).build()

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied."""
        try:
            outputs: list[Value] = self._run(inputs, params)
        except Exception as error:  # noqa: BLE001 - the interpreter meets it again, and reports it
            return self._where(error)
        return outputs

    def _where(self, error: Exception) -> Stopped:
        """Return the node that raised, and the values at that moment."""
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        frame = trace.tb_next
        node = self._lines[frame.tb_lineno]
        named = frame.tb_frame.f_locals
        values = {int(name[1:]): value for name, value in named.items() if name[0] == "v"}
        error.__traceback__ = None
        return Stopped(node, values)


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    """Compile the code of ``run``. Plans that differ in sizes share it: numbers are names."""
    names: dict[str, Any] = {}
    exec(compile(source, "<plan>", "exec"), names)
    code: CodeType = names["run"].__code__
    return code


class _End(Exception):
    """Signal that the rest is the interpreter's: it reports a data-dependent node's results."""


class _Generator:
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
        self.lines = [0, 0]

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
        code = _compiled("\n".join(self.source)).replace(co_filename=f"<plan {self.name}>")
        return FunctionType(code, self.names), self.lines

    def output(self, position: int) -> str:
        value = f"v{self.schedule.graph.outputs[position]}"
        if position in self.schedule.writes.copied_outputs:
            value = f"clone({value})"
        stride = self.interpreter.relaid_outputs.get(position)
        return value if stride is None else f"restride({value}, {self.constant(stride)})"

    def emit(self, number: int, line: str) -> None:
        self.source.append("    " + line)
        self.lines.append(number)

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
        pattern = self.pattern(self.interpreter.places(node, results))
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
    def pattern(places: Places) -> str:
        """Return the target that the returned value is assigned to; empty if nothing is new."""
        parts = []
        for place in places:
            if isinstance(place, list):
                parts.append("[" + ", ".join(f"v{number}" for number in place) + "]")
            else:
                parts.append("_" if place is None else f"v{place}")
        return ", ".join(parts)


# -- the eager executor: node after node, with torch's own kernels ---------------------------------


class Code(Protocol):
    """Protocol of a schedule prepared to run again and again."""

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied."""


#: Factory of code.
MakeCode = Callable[[Schedule, CheckedInterpreter, str], Code]


def code_of(setting: str) -> MakeCode:
    """Return the factory of the code that ``LAZYGT_PLAN_CODE`` asks for.

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
        returned, written: of a data-dependent last node: its returns, and the tensors it wrote.
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
        schedule: the schedule to run, if it is not the plan's own steps.
        compiled: callables of the fused nodes in ``schedule``, by number.
        code: factory of the code; None: as ``code_of("auto")`` returns it.
        template: of the plan, if there may be others of it.
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
        #: code that runs it from the second time on, once it is made
        self.code: Code | None = None
        self._checked = False

    @property
    def plain(self) -> EagerExecutor:
        """The executor that runs it node after node: itself, unless it wraps another one."""
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
                self.code = self._made_code()
            outputs = self.code.run(inputs, params)
        if isinstance(outputs, Stopped):
            return self.go_on(outputs, params)
        return Outcome(outputs, [], None, [])

    def _made_code(self) -> Code:
        template, name = self._template, self.plan.digest.hex()[:12]
        make = self._make_code or code_of("auto")
        if make is not NativeCode or template is None or self.interpreter.lays_out:
            return make(self.schedule, self.interpreter, name)
        code = NativeCode(self.schedule, self.interpreter, name, template.code)
        template.code = template.code or code
        return code

    def _run_first(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Do the first run, in which everything is checked."""
        template = self._template
        if template is None or not template.checked or self._make_code is not NativeCode:
            outcome = self._run_checked(inputs, params)
            if template is not None:
                template.checked |= self._checked and not self.interpreter.lays_out
            return outcome
        code = self._made_code()
        assert isinstance(code, NativeCode)
        outputs = code.run(inputs, params, check=True)
        if isinstance(outputs, list):
            self.code, self._checked = code, True
            return Outcome(outputs, [], None, [])
        return self._go_on_checking(outputs, params, code)

    def _go_on_checking(
        self, stopped: Stopped, params: tuple[Any, ...], code: NativeCode
    ) -> Outcome:
        """Do the rest of a first run."""
        failures: list[Failure] = []
        values, start = stopped.values, stopped.node
        if stopped.made:
            failures = self.interpreter.look_at(start, values)
            for dead in self.schedule.frees[start]:
                values.pop(dead, None)
            start += 1
        outcome = self._finish(values, params, start, check=True)
        outcome.failures[:0] = failures
        if not outcome.failures:
            self._checked = True
            # a program with other strides is made anew
            self.code = None if self.interpreter.lays_out else code
        return outcome

    def go_on(self, stopped: Stopped, params: tuple[Any, ...]) -> Outcome:
        """Do the rest of a run after its code has stopped."""
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
    """Executor that runs another one's schedule node by node, and times each node.

    A node's time contains its copies and the interpreter's own work around its kernel, some
    microseconds; on a GPU each node waits for its kernels to end.

    Args:
        mark: called with the step of each node that begins.

    Attributes:
        times: (step, count, begin, end) of the run, as ``messages.Timings`` has them.
    """

    def __init__(self, executor: EagerExecutor, mark: Callable[[int], None] | None = None) -> None:
        schedule, device = executor.schedule, executor.interpreter.device
        super().__init__(executor.plan, device, schedule)
        self._counts = [1 if n.body is None else len(n.body.nodes) for n in schedule.graph.nodes]
        self._firsts = [0, *accumulate(self._counts)]
        self.times: list[tuple[int, int, int, int]] = []
        self.interpreter = _Timed(schedule, device, executor.interpreter.compiled)
        self.interpreter.ran = self._ran
        if mark is not None:
            self.interpreter.begins = lambda number: mark(self._firsts[number])

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, once. ``inputs`` is emptied."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._run_checked(inputs, params)

    def step_of(self, node: int) -> int:
        """Return the number of a node's first step in ``plan.steps``."""
        return self._firsts[node]

    def _ran(self, number: int, begin: int) -> None:
        end = time.monotonic_ns()
        self.times.append((self._firsts[number], self._counts[number], begin, end))


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
