"""Native programs: a schedule as boxed calls, prepared once and run in C++ without Python.

Some ops (lazygt's own, custom and wrapped ones, compiled groups) are Python functions: the program
calls back into Python for them.
"""

from __future__ import annotations

from typing import Any

from lazygt import native
from lazygt.graph.alias import COPY, DONE, WRITE_BACK, ViewStepKey
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref, map_arg
from lazygt.graph.ops import facts, overload
from lazygt.runtime.executors.interpreter import CheckedInterpreter, ReturnSlots, Stopped
from lazygt.runtime.executors.kernels import WRAPPED, clone
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Value


class NativeCode:
    """Schedule as a native program, up to a data-dependent last node.

    Args:
        schedule: steps of the plan.
        interpreter: runs the steps that C++ does not.
        name: unused; all kinds of code are made with the same arguments.
        like: code of the same program in other sizes; equal instructions are shared.
    """

    def __init__(
        self,
        schedule: Schedule,
        interpreter: CheckedInterpreter,
        name: str,
        like: NativeCode | None = None,
    ) -> None:
        self.schedule = schedule
        #: the C++ program, which ``known_runs`` also runs directly
        self.program = _Builder(schedule, interpreter, like).build()
        self._run = self.program.run

    def run(
        self, inputs: list[Value], params: tuple[Any, ...], check: bool = False
    ) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied.

        Args:
            check: stop if a result differs from its inferred meta.
        """
        outcome = self._run(inputs, params, check)
        return outcome if type(outcome) is list else Stopped(*outcome)


class _Builder:
    """Builder of a native program: emits the instructions of each node."""

    def __init__(
        self, schedule: Schedule, interpreter: CheckedInterpreter, like: NativeCode | None
    ) -> None:
        self.schedule, self.interpreter, self.like = schedule, interpreter, like
        if like is not None:
            self.program = like.program.resized()
        else:
            count = len(schedule.graph.values)
            self.program = native.extension().Program(
                count, Ref, Param, DEVICE, interpreter.device, clone
            )

    def build(self) -> Any:
        graph = self.schedule.graph
        for number, (node, results) in enumerate(graph.numbered()):
            if self.reuse_instructions(number, node):
                continue
            if node.dynamic:
                self.program.stop(number)
                return self.program
            if node.op == WRITE_BACK:
                self.write_back(number, node, results[0])
            else:
                self.node(number, node, results)
            for expected in self.checks(number):
                self.program.check(number, *expected)
            if self.schedule.frees[number]:
                self.program.free(number, self.schedule.frees[number])
        self.program.finish(self.outputs())
        return self.program

    def reuse_instructions(self, number: int, node: Node) -> bool:
        """Reuse a node's instructions of the other sizes if they are equal; return whether so."""
        is_last = number == len(self.schedule.graph.nodes) - 1  # outputs are copied after it
        if self.like is None or node.dynamic or is_last:
            return False
        other_node = self.like.schedule.graph.nodes[number]
        if node is other_node:
            self.program.take_over(self.like.program, number, [])
        elif (node.args, node.kwargs) == (other_node.args, other_node.kwargs):
            self.program.take_over(self.like.program, number, self.checks(number))
        else:
            return False
        return True

    def checks(self, number: int) -> list[tuple[Any, ...]]:
        """Return the expected results of a node: value, shape, strides and dtype of each."""
        return [
            (value, meta.shape, meta.stride, meta.dtype)
            for value, meta in self.interpreter.expected_results(number)
        ]

    def outputs(self) -> list[int]:
        """Return the slots of the outputs, after emitting copies and changes of strides."""
        slots = list(self.schedule.graph.outputs)
        last = max(len(self.schedule.graph.nodes) - 1, 0)
        for position in self.schedule.writes.copied_outputs:
            slots[position] = self.copy(last, slots[position])
        for position, stride in self.interpreter.relaid_outputs.items():
            self.program.restride(last, slots[position], list(stride))
        return slots

    def copy(self, number: int, value: int) -> int:
        """Emit a copy of a value; return its slot."""
        slot: int = self.program.spare()
        self.program.clone(number, slot, value)
        return slot

    def node(self, number: int, node: Node, results: range) -> None:
        """Emit a node: copies of written operands, its call, aliases and changes of strides."""
        copies: dict[int, int] = {}
        for target, mode in zip(node.writes, self.schedule.writes.modes[number], strict=True):
            if mode == COPY and target not in copies:
                copies[target] = self.copy(number, target)
        args, kwargs = node.args, node.kwargs
        if copies:
            args = tuple(_substituted(arg, copies) for arg in args)
            kwargs = tuple((name, _substituted(arg, copies)) for name, arg in kwargs)
        self.call(number, node.op, args, kwargs, self.interpreter.return_slots(node, results))
        for offset, target in enumerate(node.writes):
            version = results[len(node.fresh) + offset]
            self.program.alias(number, version, copies.get(target, target))
        if copies:
            self.program.free(number, tuple(copies.values()))
        for position in self.interpreter.restrided.get(number, ()):
            meta = node.results[position]
            assert meta is not None
            self.program.restride(number, results[position], meta.stride)

    def write_back(self, number: int, node: Node, result: int) -> None:
        """Emit a write-back: views of the base, and a copy into the last one."""
        base, value, (mode,) = node.args[0].index, node.args[1], self.schedule.writes.modes[number]
        if mode == DONE:
            self.program.alias(number, result, base)
            return
        written = viewed = self.copy(number, base) if mode == COPY else base
        spares = [] if written == base else [written]
        for step in node.args[2]:
            viewed = self.view(number, step, viewed)
            spares.append(viewed)
        self.call(number, "aten.copy_.default", (Ref(viewed), value), (), [])
        self.program.alias(number, result, written)
        self.program.free(number, spares)

    def view(self, number: int, step: ViewStepKey, base: int) -> int:
        """Emit one view of a view chain; return its slot."""
        op, position, args, kwargs, index = step
        slot: int = self.program.spare()
        kinds = facts(overload(op)).outputs
        slots: ReturnSlots = [None] * len(kinds)
        slots[index if len(kinds) > 1 else 0] = slot
        if kinds == ("vl",):
            slots = [[*[-1] * index, slot]]
        self.call(number, op, (*args[:position], Ref(base), *args[position + 1 :]), kwargs, slots)
        return slot

    def call(
        self,
        number: int,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        slots: ReturnSlots,
    ) -> None:
        """Emit the call of an op: boxed in C++ if possible, else of its Python kernel."""
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
