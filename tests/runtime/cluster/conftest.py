"""Sessions on agents in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import lazygt
from lazygt.runtime.cluster import opening
from lazygt.settings import grouped
from tests.runtime.cluster.agents import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def on(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Callable[..., lazygt.Session]:
    """Opens a session on so many workers a host."""

    def opened(*workers: int, **settings: object) -> lazygt.Session:
        monkeypatch.setitem(opening.LAUNCHERS, "agents", hosts.open(list(workers)))
        return lazygt.session(
            **grouped({"launcher": "agents", "workers": sum(workers), **settings})
        )

    return opened
