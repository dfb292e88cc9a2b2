"""Tests of compiled code need a C++ compiler."""

import pytest

from lazygt.observe.doctor import compiler

FOUND = compiler()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") is not None and FOUND.status != "ok":
        pytest.skip(FOUND.detail)
