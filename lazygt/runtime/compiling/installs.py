"""Installs: hosts that don't see the client's cache get what was compiled.

One rank of each such host is asked whether its cache has an artifact, and is sent what it lacks;
the next session finds it there. Only when all hosts have a plan's artifacts is it swapped, on all
ranks at once: compiled code may round in another way, and no two ranks are to differ in that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.compiling.kernel_group import toolchain
from lazygt.runtime.messages import Install, Installed
from lazygt.runtime.wire import Buffer


class Tell(Protocol):
    """How a rank is told something; does not wait."""

    def __call__(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None: ...


class Installs:
    """Artifacts on other hosts.

    Args:
        ranks: one on each of them.
        cache: the client's.
        device: ``cpu`` or ``cuda``.

    Attributes:
        pending: (artifact, rank) of which nothing has been heard yet -> whether it was sent.
        error: why a host can't have compiled code; empty: none has said so.
    """

    def __init__(self, ranks: Sequence[int], cache: Cache, device: str, tell: Tell) -> None:
        self._ranks, self._cache, self._device, self._tell = ranks, cache, device, tell
        self._asked: set[str] = set()
        self.pending: dict[tuple[str, int], bool] = {}
        self.error = ""

    def fits(self) -> bool:
        """Whether it is known by now if code of this host's runs there; asks, the first time."""
        return self.ready([""])

    def ready(self, keys: Iterable[str]) -> bool:
        """Whether all hosts have these artifacts; has them asked for what they were not before."""
        keys = list(keys)
        for key in keys:
            if key not in self._asked:
                self._asked.add(key)
                self.pending.update({(key, rank): False for rank in self._ranks})
                for rank in self._ranks:
                    self._ask(key, rank)
        return not any((key, rank) in self.pending for key in keys for rank in self._ranks)

    def _ask(self, key: str, rank: int) -> None:
        self._tell(rank, Install(key, toolchain(self._device)))

    def answered(self, rank: int, told: Installed) -> None:
        """A rank has answered."""
        about = told.key, rank
        if about not in self.pending or (told.lacks and self.pending[about]):
            return  # it was asked twice, before a recovery and after it
        if told.lacks and not told.error:
            self.pending[about] = True
            self._give(told.key, rank)
            return
        del self.pending[about]
        if told.error:
            self.error = self.error or f"worker {rank}: {told.error}"

    def _give(self, key: str, rank: int) -> None:
        try:
            record, code = self._cache.copy_of(key)
        except (OSError, ValueError) as error:
            self.answered(rank, Installed(key, error=f"the cache was emptied meanwhile: {error}"))
        else:
            self._tell(rank, Install(key, toolchain(self._device)), (record, code))

    def again(self) -> None:
        """Ask once more what was not answered: workers were replaced."""
        for key, rank in list(self.pending):
            self.pending[key, rank] = False
            self._ask(key, rank)
