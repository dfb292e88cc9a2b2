"""Known runs: where the extension loads, it takes what a worker has run before from the message to
its answer without Python, and a client's number out of that (``native/runs.cpp``).

It holds the worker's values with it, and the lists of ids that a message is an update of.
"""

from __future__ import annotations

from typing import Any

from lazygt import native
from lazygt.runtime.executors.eager import EagerExecutor
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.messages import Done, Run
from lazygt.runtime.quick_numbers import packed_metas
from lazygt.runtime.store import Store

#: (number of the run, id of its first output, plan, fetches, where its program has stopped)
Unfinished = tuple[int, int, bytes, tuple[int, ...], tuple[int, dict[int, Any]] | None]


class KnownRuns:
    """The plans whose runs are the extension's; of another message than a run it forgets them."""

    def __init__(self, store: Store) -> None:
        tags = [kind.__struct_config__.tag for kind in (Run, Done)]
        self.runs = native.extension().Runs(
            store.values, store.borrowed, packed_metas(), Run, *tags
        )
        #: Acts on a message: the frames of the answer, or what is left to do of the run. None: it
        #: is not a run that is known, and nothing has been done.
        self.run: Any = self.runs.run
        self.forget = self.runs.clear

    def keep(self, digest: bytes, known: Any, executor: EagerExecutor) -> None:
        """Take over a plan, if it is a program: ``known`` has its lists of ids and its params."""
        if type(executor.code) is NativeCode:
            outline, owned = executor.plan.outline, executor.schedule.writes.owned_inputs
            self.runs.keep(
                digest, executor.code.program, known, len(outline.inputs), len(outline.params),
                list(owned),
            )  # fmt: skip
