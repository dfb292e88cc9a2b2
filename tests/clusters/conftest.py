"""Two hosts, which most tests here want."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.hosts import Hosts, hosts_or_skip


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as made:
        yield made
