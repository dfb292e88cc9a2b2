"""Readers in processes of their own, closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from lazygt.transfer import Sender
from tests.transfer.child import PROCESSES, SENDERS, Reader, footprint


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Start the server that readers are forked from; it ends with this process."""
    process = PROCESSES.Process(target=footprint)
    process.start()
    process.join()


@pytest.fixture(params=list(SENDERS))
def strategy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Stage:
    """A sender and its readers."""

    def __init__(self, strategy: str, stack: ExitStack) -> None:
        self.strategy = strategy
        self._stack = stack

    def sender(self, **options: Any) -> Sender:
        return self._stack.enter_context(SENDERS[self.strategy](**options))

    def readers(self, sender: Sender, count: int = 1, **options: Any) -> list[Reader]:
        """So many more readers; ``options`` are their receivers'."""
        there = len(sender.receivers)
        names = [f"reader {there + number}" for number in range(count)]
        made = [
            self._stack.enter_context(
                closing(Reader(self.strategy, sender.address, name, **options))
            )
            for name in names
        ]
        sender.wait_for_receivers(there + count, 20.0)
        return made


@pytest.fixture
def stage() -> Iterator[Callable[[str], Stage]]:
    """``stage(strategy)`` makes senders and readers of a strategy."""
    with ExitStack() as stack:
        yield lambda strategy: Stage(strategy, stack)
