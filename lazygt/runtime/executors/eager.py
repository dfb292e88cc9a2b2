"""The eager executor: straight-line Python, generated once a plan.

The first run goes through the checked interpreter, which compares every result with what the
client inferred; later runs go through generated code. When a node fails there, the interpreter
takes over at that node with the values as they stand: what depends on the failed node is marked,
everything else is still computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from types import CodeType, FunctionType
from typing import Any

import torch

from lazygt.graph.alias import DONE, WRITE_BACK
from lazygt.graph.node import DEVICE, FUSED, Arg, Node, Param, Ref, params_in
from lazygt.runtime.executors.interpreter import CheckedInterpreter
from lazygt.runtime.kernels import clone, restride
from lazygt.runtime.messages import Failure
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.store import Failed, Value


class Outcome:
    """What a run made.

    Attributes:
        outputs: the values of ``graph.outputs``.
        failures: what failed.
        returned, written: of a data-dependent last node: what it returned, what it wrote.
    """

    __slots__ = ("failures", "outputs", "returned", "written")

    def __init__(
        self, outputs: list[Value], failures: list[Failure], returned: Any, written: list[Any]
    ) -> None:
        self.outputs, self.failures = outputs, failures
        self.returned, self.written = returned, written


class EagerExecutor:
    """Runs one plan, node after node, with torch's own kernels.

    Args:
        schedule: what to run, if it is not the plan's own steps.
        compiled: callables of the fused nodes in ``schedule``, by number.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        schedule: Schedule | None = None,
        compiled: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:
        self.plan = plan
        self.schedule = schedule or plan.steps
        self.interpreter = CheckedInterpreter(self.schedule, device, compiled)
        self._code: Callable[..., Any] | None = None
        self._lines: list[int] = []
        self._checked = False

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan. ``inputs`` is emptied, so that values can die at their last use."""
        with torch._C._AutoDispatchBelowAutograd():
            if not self._checked or self.plan.asks or any(type(v) is Failed for v in inputs):
                return self._run_checked(inputs, params)
            if self._code is None:
                self._code, self._lines = generate(
                    self.schedule, self.interpreter, self.plan.digest.hex()[:12]
                )
            try:
                return Outcome(self._code(inputs, params), [], None, [])
            except Exception as error:  # noqa: BLE001 - run again, and reported, by `_finish`
                start, values = self._where(error)
            return self._finish(values, params, start)

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
        outputs = [values[number] for number in self.schedule.graph.outputs]
        for position in self.schedule.writes.copied_outputs:
            value = outputs[position]
            outputs[position] = value if type(value) is Failed else clone(value)  # type: ignore[arg-type]
        return Outcome(outputs, failures, self.interpreter.returned, self.interpreter.written)

    def _where(self, error: Exception) -> tuple[int, dict[int, Value]]:
        """The node that raised in the generated code, and the values at that moment."""
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        frame = trace.tb_next
        start = self._lines[frame.tb_lineno]
        named = frame.tb_frame.f_locals
        values: dict[int, Value] = {
            int(name[1:]): value
            for name, value in named.items()
            if name[0] == "v" and isinstance(value, torch.Tensor)
        }
        error.__traceback__ = None
        return start, values


def generate(
    schedule: Schedule, interpreter: CheckedInterpreter, name: str
) -> tuple[Callable[..., Any], list[int]]:
    """Straight-line code for a schedule, and the number of the node behind each line."""
    return _Generator(schedule, interpreter, name).build()


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    """The code of ``run``. Numbers stand in names, so plans that differ in sizes share it."""
    names: dict[str, Any] = {}
    exec(compile(source, "<plan>", "exec"), names)
    code: CodeType = names["run"].__code__
    return code


class _Generator:
    def __init__(self, schedule: Schedule, interpreter: CheckedInterpreter, name: str) -> None:
        self.schedule, self.interpreter, self.name = schedule, interpreter, name
        self.names: dict[str, Any] = {
            "device": interpreter.device,
            "restride": restride,
            "clone": clone,
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
            self.node(number, node, results)
            if self.schedule.frees[number]:
                dead = ", ".join(f"v{value}" for value in self.schedule.frees[number])
                self.emit(number, f"del {dead}")
        copied = set(self.schedule.writes.copied_outputs)
        outputs = ", ".join(
            f"clone(v{value})" if position in copied else f"v{value}"
            for position, value in enumerate(graph.outputs)
        )
        self.emit(max(len(graph.nodes) - 1, 0), f"return [{outputs}]")
        code = _compiled("\n".join(self.source)).replace(co_filename=f"<plan {self.name}>")
        return FunctionType(code, self.names), self.lines

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
        pattern = self.pattern(number, node, results)
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

    def pattern(self, number: int, node: Node, results: range) -> str:
        """What the returned value is assigned to; empty when nothing new is returned."""
        kinds = self.interpreter.output_kinds(node)
        fresh = list(results[: len(node.fresh)])
        if not fresh:
            return ""
        singles = sum(1 for kind in kinds if kind in ("f", "v"))
        parts = []
        for kind in kinds:
            if kind[0] in "wi":
                parts.append("_")
            elif kind in ("f", "v"):
                parts.append(f"v{fresh.pop(0)}")
                singles -= 1
            else:
                taken = len(fresh) - singles
                parts.append("[" + ", ".join(f"v{n}" for n in fresh[:taken]) + "]")
                del fresh[:taken]
        return parts[0] if len(parts) == 1 else ", ".join(parts)


class TimedExecutor(EagerExecutor):
    """Runs what another executor runs, node after node, and notes when each began and ended.

    A node's time contains its copies and what the interpreter does around its kernel, some
    microseconds; on a GPU each node waits for its kernels to end.

    Attributes:
        times: (step, count, begin, end) of the run, as ``messages.Timings`` has them.
    """

    def __init__(self, executor: EagerExecutor) -> None:
        schedule, device = executor.schedule, executor.interpreter.device
        super().__init__(executor.plan, device, schedule)
        self._counts = [1 if n.body is None else len(n.body.nodes) for n in schedule.graph.nodes]
        self._firsts = [0, *accumulate(self._counts)]
        self.times: list[tuple[int, int, int, int]] = []
        self.interpreter = _Timed(schedule, device, executor.interpreter._compiled)
        self.interpreter.ran = self._ran

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        """Run the plan, once. ``inputs`` is emptied; failures name the steps of ``plan.steps``."""
        with torch._C._AutoDispatchBelowAutograd():
            outcome = self._run_checked(inputs, params)
        for failure in outcome.failures:
            if not failure.seq:
                failure.node = self._firsts[failure.node]
        return outcome

    def _ran(self, number: int, begin: int) -> None:
        end = time.monotonic_ns()
        self.times.append((self._firsts[number], self._counts[number], begin, end))


class _Timed(CheckedInterpreter):
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
