"""Known runs: repeated runs that the extension does without Python (``native/runs.cpp``).

It takes a run that a worker has run before from the message to its answer, and reads the client's
number out of that. It holds the worker's values with it, and the lists of ids that messages update.
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

# -- numbers on their way to the client, as the extension writes and reads them --------------------


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


# -- known runs: repeated runs that the extension does without Python (``native/runs.cpp``) --------

#: (number of the run, id of its first output, plan, fetches, point at which its program stopped)
Unfinished = tuple[int, int, bytes, tuple[int, ...], tuple[int, dict[int, Any]] | None]


class KnownRuns:
    """The plans with runs of the extension; forgotten at any other message than a run."""

    def __init__(self, store: Store) -> None:
        tags = [kind.__struct_config__.tag for kind in (Run, Done)]
        self.runs = native.extension().Runs(
            store.values, store.borrowed, packed_metas(), Run, *tags
        )
        #: Acts on a message; returns the frames of the answer, or the unfinished run. None: it is
        #: not a known run, and nothing has been done.
        self.run: Any = self.runs.run
        self.forget = self.runs.clear

    def keep(self, digest: bytes, known: Any, executor: EagerExecutor) -> None:
        """Take over a plan if it is a program; ``known`` has its lists of ids and its params."""
        if type(executor.code) is NativeCode:
            outline, owned = executor.plan.outline, executor.schedule.writes.owned_inputs
            self.runs.keep(
                digest, executor.code.program, known, len(outline.inputs), len(outline.params),
                list(owned),
            )  # fmt: skip
