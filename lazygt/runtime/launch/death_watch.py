"""Deaths while nobody waits: a thread hears of them, so that what follows begins at once.

Whoever waits for workers hears of a death himself. But a program may compute for seconds between
two waits, and in that time a new process can load what it needs.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence


class DeathWatch(threading.Thread):
    """Calls ``look`` on its own thread, once it is started and whenever a process has ended.

    Args:
        living: the pidfds of the processes that have not ended.
        look: what is to be done about those that have; it is called once more rather than never.
    """

    def __init__(self, living: Callable[[], Sequence[int]], look: Callable[[], object]) -> None:
        super().__init__(name="lazygt-deaths", daemon=True)
        self._living, self._look = living, look
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False

    def run(self) -> None:
        try:
            while not self._ended:
                living = self._living()  # who dies from here on ends the wait
                self._look()
                self._wait(living)
        finally:
            os.close(self._alarm)

    def _wait(self, living: Sequence[int]) -> None:
        poller = select.poll()
        for descriptor in (self._alarm, *living):
            poller.register(descriptor, select.POLLIN)
        if self._alarm in [descriptor for descriptor, _ in poller.poll()]:
            os.eventfd_read(self._alarm)

    def look_again(self) -> None:
        """There are other processes now."""
        os.eventfd_write(self._alarm, 1)

    def end(self) -> None:
        """Watch no more: once this returns, ``look`` is not being called."""
        self._ended = True
        self.look_again()
        self.join()
