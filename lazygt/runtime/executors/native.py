"""Native programs: a schedule as boxed calls, prepared once and run in C++ without Python.

Some ops (lazygt's own, custom and wrapped ones, compiled groups) are Python functions: the program
calls back into Python for them. A *known* plan has run here before. `KnownRuns` decodes its run
message, runs its program and encodes the answer, all in C++; it shares the worker's store and delta
codecs.
"""

from __future__ import annotations

from typing import Any

import torch

from lazygt import native
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Param, Ref
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Stopped
from lazygt.runtime.executors.kernels import clone
from lazygt.runtime.executors.lowering import Lowering
from lazygt.runtime.messages import Done, Run
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.store import Store, Value
from lazygt.runtime.wire import NUMBERS, pack


class NativeCode:
    """Schedule as a native program, up to a data-dependent last node.

    Args:
        schedule: steps of the plan.
        interpreter: runs the steps that C++ does not.
        name: unused; all kinds of code are created with the same arguments.
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
        #: the C++ program, which `KnownRuns` also runs directly
        self.program: Any
        if like is None:
            values, device = len(schedule.graph.values), interpreter.device
            self.program = native.extension().Program(values, Ref, Param, DEVICE, device, clone)
        else:
            self.program = like.program.resized()
        shared = None if like is None else (like.schedule, like.program)
        Lowering(schedule, interpreter, self.program, shared).emit()
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


# -- single numbers in answers ---------------------------------------------------------------------


def packed_metas() -> dict[torch.dtype, bytes]:
    """Return the encoded meta of a single number, by dtype."""
    return {dtype: pack(TensorMeta((), (), dtype)) for dtype in NUMBERS}


def number_reader() -> Any:
    """Return the extension's reader of single numbers; None without the extension.

    Its ``number(frames, run)`` returns a run's number, or None if the frames hold anything else.
    """
    module = native.load().module
    if module is None:
        return None
    return module.Answers(packed_metas(), Done.__struct_config__.tag)


# -- known runs ------------------------------------------------------------------------------------

#: (number of the run, id of its first output, plan, fetches, point at which its program stopped)
Unfinished = tuple[int, int, bytes, tuple[int, ...], tuple[int, dict[int, Any]] | None]


class KnownRuns:
    """Plans that the extension runs; cleared by any message other than a run."""

    def __init__(self, store: Store) -> None:
        tags = [kind.__struct_config__.tag for kind in (Run, Done)]
        self.runs = native.extension().Runs(
            store.values, store.borrowed, packed_metas(), Run, *tags
        )
        #: Handles a message; returns the frames of the answer, or the unfinished run. None: the
        #: run is not known, and nothing was done.
        self.run: Any = self.runs.run
        self.forget = self.runs.clear

    def keep(self, digest: bytes, known: Any, plan: Plan, code: object) -> None:
        """Register a plan if it has a native program.

        Args:
            known: the plan's `KnownPlan`: its codecs and run-time numbers.
            code: the code that the plan's executor runs.
        """
        if type(code) is NativeCode:
            outline, overwritten_inputs = plan.outline, code.schedule.writes.overwritten_inputs
            self.runs.keep(
                digest, code.program, known, len(outline.inputs), len(outline.params),
                list(overwritten_inputs),
            )  # fmt: skip
