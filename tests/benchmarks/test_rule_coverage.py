"""The share of the operator database's ops that can be sharded may grow, and not fall."""

from __future__ import annotations

import pytest

from benchmarks.rule_coverage import coverage

#: Entries of the database for the quick count.
FEW = 15


@pytest.mark.filterwarnings("ignore")
def test_rules_cover_selected_operators() -> None:
    found = coverage(FEW)
    assert found.count > 20
    assert found.share > 0.95, found.without


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_rules_cover_operator_database() -> None:
    found = coverage()
    assert found.count > 400
    assert found.share > 0.9, found.without
    assert len(found.derived) > 30
