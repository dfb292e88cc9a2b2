"""Thread that notices deaths of workers while the main thread is not waiting.

A wait for workers notices a death itself. But a program may compute for seconds between two waits,
and in that time a replacement process can already start and load its modules.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence


class DeathWatch(threading.Thread):
    """Thread that calls ``look`` at its start and after each end of a process.

    Args:
        living: returns the pidfds of the processes that have not ended.
        look: handler of the ends; called once too often rather than once too seldom.
    """

    def __init__(self, living: Callable[[], Sequence[int]], look: Callable[[], object]) -> None:
        super().__init__(name="lazygt-deaths", daemon=True)
        self._living, self._look = living, look
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False

    def run(self) -> None:
        try:
            while not self._ended:
                living = self._living()  # a death from here on ends the wait
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
        """Watch the current set of processes, which has changed."""
        os.eventfd_write(self._alarm, 1)

    def end(self) -> None:
        """Stop watching: once this returns, ``look`` is not running."""
        self._ended = True
        self.look_again()
        self.join()
