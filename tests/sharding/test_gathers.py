"""Ops without a sharding rule run on whole values, and that is said once with its bytes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.passes.sharding import rules

pytestmark = pytest.mark.timeout(60)

WITHOUT_RULE = "aten.histc.default"


def _session() -> lazygt.Session:
    return lazygt.session(launcher="dry", mesh={"data": 4})


def _stored(s: lazygt.Session, *shape: int) -> torch.Tensor:
    x = lazygt.distribute(torch.randn(*shape), [Shard(0)])
    s.flush()
    return x


def test_it_is_said_once_for_each_op() -> None:
    assert not rules.has_rule(WITHOUT_RULE)
    with _session() as s:
        x = _stored(s, 8, 16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here = sys._getframe().f_lineno + 1
            torch.histc(x).sum().item()
            torch.histc(x + 1).sum().item()
        text = lazygt.why(s)
    assert [each.category for each in caught] == [lazygt.GatherWarning]
    (said,) = [str(each.message) for each in caught]
    assert said.startswith(
        f"{WITHOUT_RULE} has no sharding rule for blocks along 'data': f32[8, 16] in S(0) (512 B) "
        f"is gathered on every worker that runs it, at {__file__}:{here}. The numbers are right."
    )
    assert "lazygt.redistribute" in said
    (row,) = [row for row in str(text).splitlines() if WITHOUT_RULE in row and "512 B" in row]
    assert row.strip().endswith(f"{Path(__file__).name}:{here}")


def test_it_is_said_again_in_another_session() -> None:
    for _ in range(2):
        with _session() as s:
            x = _stored(s, 8, 16)
            with pytest.warns(lazygt.GatherWarning, match=WITHOUT_RULE):
                torch.histc(x).sum().item()


def test_nothing_is_said_where_nothing_is_gathered_or_a_rule_decides() -> None:
    with _session() as s, warnings.catch_warnings():
        warnings.simplefilter("error")
        x = _stored(s, 8, 16)
        whole = lazygt.redistribute(x, [Replicate()])
        s.flush()
        torch.histc(whole).sum().item()
        x.sort(0).values.sum().item()  # along the cut dim: its rule has rows for the other one
        assert s.last_plan is not None
        assert [each.kind for each in s.last_plan.collectives] == ["all_gather"]
        assert not lazygt.why(s).fallbacks
