"""Native programs: a schedule as boxed calls, prepared once and run without Python.

Only Python can call some ops (lazygt's own, foreign and wrapped ones, compiled groups): they are
called back from within the program.
"""

from __future__ import annotations

from typing import Any

from lazygt import native
from lazygt.graph.alias import COPY, DONE, WRITE_BACK, ViewStepKey
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref, map_arg
from lazygt.graph.ops import facts, overload
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Places, Stopped
from lazygt.runtime.kernels import WRAPPED, clone
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Value


class NativeCode:
    """Runner of a schedule up to its data-dependent last node, if there is one.

    Args:
        like: the code of the same program in other sizes; equal parts are shared.
    """

    def __init__(
        self,
        schedule: Schedule,
        interpreter: CheckedInterpreter,
        name: str,
        like: NativeCode | None = None,
    ) -> None:
        self.schedule = schedule
        #: the program, which ``known_runs`` runs by itself
        self.program = _Builder(schedule, interpreter, like).build()
        self._run = self.program.run

    def run(
        self, inputs: list[Value], params: tuple[Any, ...], check: bool = False
    ) -> list[Value] | Stopped:
        """Return the outputs, or the node at which it stopped. ``inputs`` is emptied.

        Args:
            check: stop if a result is not as promised.
        """
        outcome = self._run(inputs, params, check)
        return outcome if type(outcome) is list else Stopped(*outcome)


class _Builder:
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
            if self.took_over(number, node):
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

    def took_over(self, number: int, node: Node) -> bool:
        """Take over a node's instructions if equal in the other sizes; return whether they are."""
        last = number == len(self.schedule.graph.nodes) - 1  # outputs are copied after it
        if self.like is None or node.dynamic or last:
            return False
        known = self.like.schedule.graph.nodes[number]
        if node is known:
            self.program.take_over(self.like.program, number, [])
        elif (node.args, node.kwargs) == (known.args, known.kwargs):
            self.program.take_over(self.like.program, number, self.checks(number))
        else:
            return False
        return True

    def checks(self, number: int) -> list[tuple[Any, ...]]:
        """Return the promised results of a node: value, shape, strides and dtype of each."""
        return [
            (value, meta.shape, meta.stride, meta.dtype)
            for value, meta in self.interpreter.promised(number)
        ]

    def outputs(self) -> list[int]:
        """Return the outputs: shared ones copied, in the recorded strides."""
        slots = list(self.schedule.graph.outputs)
        last = max(len(self.schedule.graph.nodes) - 1, 0)
        for position in self.schedule.writes.copied_outputs:
            slots[position] = self.copy(last, slots[position])
        for position, stride in self.interpreter.relaid_outputs.items():
            self.program.restride(last, slots[position], list(stride))
        return slots

    def copy(self, number: int, value: int) -> int:
        slot: int = self.program.spare()
        self.program.clone(number, slot, value)
        return slot

    def node(self, number: int, node: Node, results: range) -> None:
        copies: dict[int, int] = {}
        for target, mode in zip(node.writes, self.schedule.writes.modes[number], strict=True):
            if mode == COPY and target not in copies:
                copies[target] = self.copy(number, target)
        args, kwargs = node.args, node.kwargs
        if copies:
            args = tuple(_instead(arg, copies) for arg in args)
            kwargs = tuple((name, _instead(arg, copies)) for name, arg in kwargs)
        self.call(number, node.op, args, kwargs, self.interpreter.places(node, results))
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
        """Return the slot of the view that a step of a chain makes."""
        op, position, args, kwargs, which = step
        slot: int = self.program.spare()
        kinds = facts(overload(op)).outputs
        places: Places = [None] * len(kinds)
        places[which if len(kinds) > 1 else 0] = slot
        if kinds == ("vl",):
            places = [[*[-1] * which, slot]]
        self.call(number, op, (*args[:position], Ref(base), *args[position + 1 :]), kwargs, places)
        return slot

    def call(
        self,
        number: int,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        places: Places,
    ) -> None:
        if not op.startswith("lazygt.") and "@" not in op and op not in WRAPPED:
            namespace, name, kind = op.split(".")
            kind = "" if kind == "default" else kind
            if self.program.call(number, f"{namespace}::{name}", kind, args, kwargs, places):
                return
        kernel = self.interpreter.kernel(number, op)
        self.program.call_python(number, kernel, args, kwargs, places)


def _instead(arg: Arg, slots: dict[int, int]) -> Arg:
    """Return ``arg`` with some values replaced by other slots."""

    def replaced(leaf: Arg) -> Arg:
        return Ref(slots[leaf.index]) if type(leaf) is Ref and leaf.index in slots else leaf

    return map_arg(arg, replaced)
