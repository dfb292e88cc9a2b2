"""History: what a session did, for those who ask."""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lazygt.runtime.plan import Plan
from lazygt.timeline import Probe
from lazygt.why import Flush, Miss

if TYPE_CHECKING:
    from lazygt.passes.sharding.gathers import Gather

_KEPT_MISSES = 256
_KEPT_FLUSHES = 1_000


class History:
    """Flushes, plan misses and gathers; while a profile is taken, they are drawn as well.

    Attributes:
        flushes: reason -> how many there were.
        recent, misses: the last ones, oldest first.
        gathers: op -> the first time that it had to run on whole values.
        plans_built, plan_hits: how often a flush's plan was new, and how often it was there.
        last_plan: of the last flush that had one.
        probe: draws; None: no profile is being taken.
    """

    def __init__(self) -> None:
        self.flushes: Counter[str] = Counter()
        self.recent: deque[Flush] = deque(maxlen=_KEPT_FLUSHES)
        self.misses: deque[Miss] = deque(maxlen=_KEPT_MISSES)
        self.gathers: dict[str, Gather] = {}
        self.plans_built = self.plan_hits = 0
        self.last_plan: Plan | None = None
        self.probe: Probe | None = None

    def flushing(self) -> AbstractContextManager[None]:
        """What a flush runs in: it is drawn when one ends up in ``recent``."""
        return nullcontext() if self.probe is None else self.probe.flush(self.recent)

    def missed(self, miss: Miss, plan: Plan, begin: int) -> None:
        """Note a miss whose plan has been built since ``begin``."""
        miss.digest, miss.seconds = plan.digest, (time.monotonic_ns() - begin) / 1e9
        self.misses.append(miss)
        if self.probe is not None:
            self.probe.did("build plan", begin, miss.summary())
