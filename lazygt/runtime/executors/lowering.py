"""Lowering of a schedule to a program of instructions, and the program that is Python code.

A program has slots: one for each value of the graph, and spare ones. `Lowering` determines the
copies, calls, aliases and frees of each node. A program runs them: `SourceProgram` as generated
Python code, the C++ extension's program as boxed calls without Python (see ``native``).

In the methods of both, ``number`` or ``node`` is the node that an instruction belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch

from lazygt.graph.alias import COPY, DONE, WRITE_BACK, ViewStepKey
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref, map_arg
from lazygt.graph.ops import facts, overload
from lazygt.runtime.executors.interpreter import CheckedInterpreter, ReturnSlots, Stopped
from lazygt.runtime.executors.kernels import WRAPPED, clone, restride
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Value


class Lowering:
    """Lowering of a schedule: emits the instructions of each node to a program.

    Args:
        interpreter: source of the kernels, and of results that need other strides.
        program: a `SourceProgram`, or the extension's program with the same methods; empty.
        like: schedule and program in other sizes; equal instructions are shared.
    """

    def __init__(
        self,
        schedule: Schedule,
        interpreter: CheckedInterpreter,
        program: Any,
        like: tuple[Schedule, Any] | None = None,
    ) -> None:
        self.schedule, self.interpreter, self.like = schedule, interpreter, like
        self.program = program

    def emit(self) -> None:
        """Emit all nodes; at a data-dependent last one, emit a stop for the interpreter."""
        for number, (node, results) in enumerate(self.schedule.graph.numbered()):
            if self.reuse_instructions(number, node):
                continue
            if node.dynamic:
                self.program.stop(number)
                return
            if node.op == WRITE_BACK:
                self.emit_write_back(number, node, results[0])
            else:
                self.emit_node(number, node, results)
            for expected in self.checks(number):
                self.program.check(number, *expected)
            if self.schedule.frees[number]:
                self.program.free(number, self.schedule.frees[number])
        self.program.finish(self.emit_outputs())

    def reuse_instructions(self, number: int, node: Node) -> bool:
        """Reuse a node's instructions of the other sizes if they are equal; return whether so."""
        is_last = number == len(self.schedule.graph.nodes) - 1  # outputs are copied after it
        if self.like is None or node.dynamic or is_last:
            return False
        other_schedule, other_program = self.like
        other_node = other_schedule.graph.nodes[number]
        if node is other_node:
            self.program.take_over(other_program, number, [])
        elif (node.args, node.kwargs) == (other_node.args, other_node.kwargs):
            self.program.take_over(other_program, number, self.checks(number))
        else:
            return False
        return True

    def checks(self, number: int) -> list[tuple[Any, ...]]:
        """Return the expected results of a node: value, shape, strides and dtype of each."""
        return [
            (value, meta.shape, meta.stride, meta.dtype)
            for value, meta in self.interpreter.expected_results(number)
        ]

    def emit_outputs(self) -> list[int]:
        """Emit copies and changes of strides of outputs; return the outputs' slots.

        An output that shares memory with a value that outlives the run is copied; one that has
        other strides than recorded gets the recorded ones.
        """
        slots = list(self.schedule.graph.outputs)
        last = max(len(self.schedule.graph.nodes) - 1, 0)  # these instructions belong to it
        for position in self.schedule.writes.copied_outputs:
            slots[position] = self.emit_copy(last, slots[position])
        for position, stride in self.interpreter.restrided_outputs.items():
            self.program.restride(last, slots[position], list(stride))
        return slots

    def emit_copy(self, number: int, value: int) -> int:
        """Emit a copy of a value; return its slot."""
        slot: int = self.program.spare()
        self.program.clone(number, slot, value)
        return slot

    def emit_node(self, number: int, node: Node, results: range) -> None:
        """Emit a node: copies of written operands, its call, aliases and changes of strides."""
        copies: dict[int, int] = {}
        for target, mode in zip(node.writes, self.schedule.writes.modes[number], strict=True):
            if mode == COPY and target not in copies:
                copies[target] = self.emit_copy(number, target)
        args, kwargs = node.args, node.kwargs
        if copies:
            args = tuple(_substituted(arg, copies) for arg in args)
            kwargs = tuple((name, _substituted(arg, copies)) for name, arg in kwargs)
        self.emit_call(number, node.op, args, kwargs, self.interpreter.return_slots(node, results))
        for offset, target in enumerate(node.writes):
            version = results[len(node.fresh) + offset]
            self.program.alias(number, version, copies.get(target, target))
        if copies:
            self.program.free(number, tuple(copies.values()))
        for position in self.interpreter.restrided.get(number, ()):
            meta = node.results[position]
            assert meta is not None
            self.program.restride(number, results[position], meta.stride)

    def emit_write_back(self, number: int, node: Node, result: int) -> None:
        """Emit a write-back: views of the base, and a copy into the last one."""
        base, value, (mode,) = node.args[0].index, node.args[1], self.schedule.writes.modes[number]
        if mode == DONE:
            self.program.alias(number, result, base)
            return
        written = viewed = self.emit_copy(number, base) if mode == COPY else base
        spares = [] if written == base else [written]
        for step in node.args[2]:
            viewed = self.emit_view(number, step, viewed)
            spares.append(viewed)
        self.emit_call(number, "aten.copy_.default", (Ref(viewed), value), (), [])
        self.program.alias(number, result, written)
        self.program.free(number, spares)

    def emit_view(self, number: int, step: ViewStepKey, base: int) -> int:
        """Emit one view of a view chain (see ``graph.alias.view_step``); return its slot."""
        op, position, args, kwargs, index = step
        slot: int = self.program.spare()
        kinds = facts(overload(op)).outputs
        slots: ReturnSlots = [None] * len(kinds)
        slots[index if len(kinds) > 1 else 0] = slot
        if kinds == ("vl",):  # a list of views, as split returns: only item ``index`` is kept
            slots = [[*[-1] * index, slot]]
        self.emit_call(
            number, op, (*args[:position], Ref(base), *args[position + 1 :]), kwargs, slots
        )
        return slot

    def emit_call(
        self,
        number: int,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        slots: ReturnSlots,
    ) -> None:
        """Emit the call of an op: boxed in C++ if possible, else of its Python kernel.

        Args:
            slots: targets of the op's returns.
        """
        if not op.startswith("lazygt.") and "@" not in op and op not in WRAPPED:
            namespace, name, kind = op.split(".")
            kind = "" if kind == "default" else kind
            if self.program.call(number, f"{namespace}::{name}", kind, args, kwargs, slots):
                return
        kernel = self.interpreter.kernel(number, op)
        self.program.call_python(number, kernel, args, kwargs, slots)


def _substituted(arg: Arg, slots: dict[int, int]) -> Arg:
    """Return ``arg`` with references to some values replaced by other slots."""

    def replaced(leaf: Arg) -> Arg:
        return Ref(slots[leaf.index]) if type(leaf) is Ref and leaf.index in slots else leaf

    return map_arg(arg, replaced)


# -- generated Python code -------------------------------------------------------------------------


class GeneratedCode:
    """Schedule as straight-line Python code, up to a data-dependent last node."""

    def __init__(self, schedule: Schedule, interpreter: CheckedInterpreter, name: str) -> None:
        graph = schedule.graph
        program = SourceProgram(len(graph.inputs), len(graph.values), interpreter.device)
        Lowering(schedule, interpreter, program).emit()
        self._run, self._node_of_line = program.function(name), program.node_of_line

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


class SourceProgram:
    """Program as Python source: ``vN`` is value N, ``sN`` a spare slot, ``kN`` a kernel.

    Args:
        inputs, values: number of inputs and of values of the graph.
    """

    def __init__(self, inputs: int, values: int, device: torch.device) -> None:
        self.values = self.slots = values
        self.names: dict[str, Any] = {
            "device": device,
            "restride": restride,
            "clone": clone,
            "stop": _End(),
        }
        self.kernels: dict[int, str] = {}
        self.source = ["def run(inputs, params):"]
        self.node_of_line = [0, 0]
        self.emit(0, f"{self.listed(range(inputs))}, = inputs" if inputs else "pass")
        self.emit(0, "inputs.clear()")

    def function(self, name: str) -> Callable[..., Any]:
        """Return the compiled function."""
        code = _code_of_source("\n".join(self.source)).replace(co_filename=f"<plan {name}>")
        return FunctionType(code, self.names)

    def emit(self, node: int, line: str) -> None:
        self.source.append("    " + line)
        self.node_of_line.append(node)

    # -- instructions --------------------------------------------------------------------

    def spare(self) -> int:
        """Allocate a slot beyond those of the graph's values; return its number."""
        self.slots += 1
        return self.slots - 1

    def clone(self, node: int, slot: int, source: int) -> None:
        self.emit(node, f"{self.slot(slot)} = clone({self.slot(source)})")

    def alias(self, node: int, slot: int, source: int) -> None:
        self.emit(node, f"{self.slot(slot)} = {self.slot(source)}")

    def free(self, node: int, slots: Iterable[int]) -> None:
        self.emit(node, f"del {self.listed(slots)}")

    def restride(self, node: int, slot: int, stride: Sequence[int]) -> None:
        name = self.slot(slot)
        self.emit(node, f"{name} = restride({name}, {self.constant(tuple(stride))})")

    def check(self, node: int, *expected: Any) -> None:
        """Emit nothing: generated code runs after a first run with checks."""

    def call(self, *_: Any) -> bool:
        """Return False: torch's ops are called by their Python kernels."""
        return False

    def call_python(
        self,
        node: int,
        kernel: Callable[..., Any],
        args: Sequence[Arg],
        kwargs: Sequence[tuple[str, Arg]],
        returns: ReturnSlots,
    ) -> None:
        """Emit a call of a Python kernel, and the assignment of what it returns."""
        values = [self.arg(arg) for arg in args]
        values += [f"{name}={self.arg(arg)}" for name, arg in kwargs]
        call = f"{self.kernel(kernel)}({', '.join(values)})"
        match returns:
            case []:
                self.emit(node, call)
            case [[*others, int(slot)]] if set(others) <= {-1}:  # one view of a list of views
                self.emit(node, f"{self.slot(slot)} = {call}[{len(others)}]")
            case _:
                self.emit(node, f"{', '.join(map(self.target, returns))} = {call}")

    def stop(self, node: int) -> None:
        self.emit(node, "raise stop")

    def finish(self, outputs: list[int]) -> None:
        self.emit(self.node_of_line[-1], f"return [{self.listed(outputs)}]")

    # -- expressions ---------------------------------------------------------------------

    def slot(self, slot: int) -> str:
        return f"v{slot}" if slot < self.values else f"s{slot}"

    def listed(self, slots: Iterable[int]) -> str:
        return ", ".join(map(self.slot, slots))

    def target(self, returned: int | list[int] | None) -> str:
        """Return the assignment target of one return of a call."""
        if isinstance(returned, list):
            return f"[{self.listed(returned)}]"
        return "_" if returned is None else self.slot(returned)

    def kernel(self, kernel: Callable[..., Any]) -> str:
        name = self.kernels.setdefault(id(kernel), f"k{len(self.kernels)}")
        self.names[name] = kernel
        return name

    def arg(self, arg: Arg) -> str:
        """Return the Python expression of a node's argument."""
        kind = type(arg)
        if kind is Ref:
            return self.slot(arg.index)
        if kind is Param:
            return f"params[{arg.index}]"
        if kind is tuple and all(type(item) is int for item in arg):
            return self.constant(list(arg))
        if kind is tuple:
            return "[" + ", ".join(map(self.arg, arg)) + "]"
        if arg is DEVICE:
            return "device"
        if arg is None or kind is bool or kind is str:
            return repr(arg)
        return self.constant(arg)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name
