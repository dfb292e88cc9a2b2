"""Fast path of repeated runs in the C++ extension (``native/runs.cpp``), without Python.

The extension decodes a run message of a known plan, runs its program and encodes the answer; on the
client's side it reads a number from an answer. It shares the worker's store and delta codecs.
"""

from __future__ import annotations

from typing import Any

import torch

from lazygt import native
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.executors.eager import EagerExecutor
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.messages import Done, Run
from lazygt.runtime.store import Store
from lazygt.runtime.wire import NUMBERS, pack

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

    def keep(self, digest: bytes, known: Any, executor: EagerExecutor) -> None:
        """Register a plan if it has a native program; ``known`` has its codecs and params."""
        if type(executor.code) is NativeCode:
            outline, owned_inputs = executor.plan.outline, executor.schedule.writes.owned_inputs
            self.runs.keep(
                digest, executor.code.program, known, len(outline.inputs), len(outline.params),
                list(owned_inputs),
            )  # fmt: skip
