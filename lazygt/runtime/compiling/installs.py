"""Installs: compiled artifacts on hosts that don't see the client's cache.

A rank of each such host is asked whether its cache has an artifact, and is sent the missing ones;
the next session finds them there. Only when all hosts have a plan's artifacts is it swapped, on all
ranks at once: compiled code may round in another way, and no two ranks may differ in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.compiling.kernel_group import toolchain
from lazygt.runtime.messages import Install, Installed
from lazygt.runtime.wire import Buffer


class Tell(Protocol):
    """Function that sends a rank a message; does not wait."""

    def __call__(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None: ...


class Installs:
    """Artifacts on other hosts.

    Args:
        elsewhere: returns the current hosts, each with one of its ranks.
        cache: the client's.

    Attributes:
        pending: (artifact, host) without an answer yet.
        error: the reason against compiled code on a host; empty: none has been reported.
    """

    def __init__(
        self, elsewhere: Callable[[], Mapping[int, int]], cache: Cache, device: str, tell: Tell
    ) -> None:
        self._elsewhere, self._cache, self._device, self._tell = elsewhere, cache, device, tell
        self.pending: set[tuple[str, int]] = set()
        #: those of them with code that was sent
        self._given: set[tuple[str, int]] = set()
        self._there: set[tuple[str, int]] = set()
        self.error = ""

    def ready(self, keys: Iterable[str]) -> bool:
        """Return whether all hosts have these artifacts; request those not requested before.

        Args:
            keys: of artifacts; an empty one asks whether code that is compiled here runs there.
        """
        if self.error:
            return False
        hosts = self._elsewhere()
        wanted = [(key, host) for key in keys for host in hosts]
        for key, host in wanted:
            if (key, host) not in self._there | self.pending:
                self.pending.add((key, host))
                self._ask(key, hosts[host])
        return self._there.issuperset(wanted)

    def _ask(self, key: str, rank: int) -> None:
        self._tell(rank, Install(key, toolchain(self._device)))

    def answered(self, rank: int, told: Installed) -> None:
        """Take a rank's answer."""
        hosts = self._elsewhere()
        for about in [(told.key, host) for host, asked in hosts.items() if asked == rank]:
            if about not in self.pending:
                continue  # it was asked twice, before a recovery and after it
            if told.lacks and not told.error and about not in self._given:
                self._given.add(about)
                self._give(told.key, rank)
                continue
            self.pending.discard(about)
            self._given.discard(about)
            error = told.error or ("its cache does not keep what it is given" if told.lacks else "")
            if error:
                self.error = self.error or f"worker {rank}: {error}"
            else:
                self._there.add(about)

    def _give(self, key: str, rank: int) -> None:
        try:
            artifact = self._cache.copy_of(key)
            self._tell(rank, Install(key, toolchain(self._device)), artifact)
        except (OSError, ValueError) as error:  # no longer there, or longer than a message may be
            self.answered(rank, Installed(key, error=f"it could not be sent: {error}"))

    def again(self) -> None:
        """Repeat requests after workers were replaced, before they get any other message.

        They may be on new hosts. Unanswered requests are repeated. Artifacts of plans are given,
        without asking, to all hosts that may lack them: an artifact is there before its plan is.
        """
        hosts = self._elsewhere()
        self._given.clear()
        known = {key for key, _ in self._there}
        self.pending &= {(key, host) for key, _ in self.pending for host in hosts}
        for key, host in sorted(self.pending):
            self._ask(key, hosts[host])
        for key in sorted(known):
            for host, rank in hosts.items():
                if (key, host) not in self._there | self.pending:
                    self.pending.add((key, host))
                    self._given.add((key, host))
                    if key:
                        self._give(key, rank)
                    else:
                        self._ask(key, rank)
