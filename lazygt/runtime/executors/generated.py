"""Generated code: a schedule as straight-line Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from lazygt.graph.alias import DONE, WRITE_BACK
from lazygt.graph.node import DEVICE, FUSED, Arg, Node, Param, Ref, params_in
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Places, Stopped
from lazygt.runtime.kernels import clone, restride
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Value


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
