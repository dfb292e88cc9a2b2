"""``lazygt.why(s)``, ``stages`` and ``plans``: what was flushed, missed and compiled, and why."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt.observe.why import Why
from lazygt.runtime.compiling.tiers import CompileRecord
from lazygt.submit.history import Flush

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


def _here(offset: int = 0) -> str:
    """The line that calls this, ``offset`` lines on."""
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def _rows(why: Why, title: str) -> list[str]:
    """The rows under a title."""
    text = re.search(rf"^{title}.*\n((?:  .*\n?)+)", str(why), re.MULTILINE)
    assert text is not None, why
    return [row[2:] for row in text[1].splitlines()]


# -- flushes -------------------------------------------------------------------------------------


def test_flush_names_forcing_line(s: lazygt.Session) -> None:
    w = torch.ones(3, requires_grad=True)
    (w * 2).sum().backward()
    backward = _here(-1)
    w.grad.sum().item()
    item = _here(-1)
    s.synchronize()
    rows = _rows(lazygt.why(s), "flushes")
    assert rows[0].startswith(f"1x backward  {backward}  ")
    assert rows[1].startswith(f"1x item  {item}  1 ops, plan ")
    assert rows[-1].startswith(f"1x synchronize()  {_here(-4)}")


def test_flushes_that_are_alike_share_a_row(s: lazygt.Session) -> None:
    x = torch.ones(3)
    s.flush()
    for _ in range(5):
        (x * 2).tolist()
    rows = _rows(lazygt.why(s), "flushes")
    assert len(rows) == 2
    assert re.fullmatch(r"5x to cpu  \S+  1 ops, plan [0-9a-f]{12}, 4 hits", rows[1])


def test_only_the_latest_flushes_are_kept(s: lazygt.Session, monkeypatch: Any) -> None:
    x = torch.ones(1)
    for _ in range(1_100):
        x += 1
        s.flush()
    why = lazygt.why(s)
    assert (len(why.flushes), why.flushed) == (1_000, 1_100)
    assert "flushes (the latest 1000 of 1100)" in str(why)


# -- misses --------------------------------------------------------------------------------------


def test_other_sizes_are_shown_against_those_before(s: lazygt.Session) -> None:
    w = torch.ones(3, 2)
    s.flush()
    for size in (4, 5, 6):
        torch.ones(size, 3, device="cpu").to("lazygt").mm(w).tolist()
        line = _here(-1)
    assert len(lazygt.why(s).misses) == 2
    assert _rows(lazygt.why(s), "other sizes") == [
        f"2x input f32[6, 3] where input f32[5, 3] was before  {line}, flush 'to cpu'"
    ]


def test_a_miss_shows_old_numbers_and_lines_against_new(s: lazygt.Session) -> None:
    x = torch.ones(4, 6)
    s.flush()
    x.sum(0).tolist()
    old = _here(-1)
    x.sum(1).tolist()
    new = _here(-1)
    rows = _rows(lazygt.why(s), "plan misses")[-3:]
    assert rows[0].endswith("aten.sum.dim_IntList with other arguments or shapes than before")
    assert rows[1] == f"  before  aten.sum.dim_IntList(f32[4, 6], [0])  {old}"
    assert rows[2] == f"  now     aten.sum.dim_IntList(f32[4, 6], [1])  {new}"


def test_miss_names_lines_of_stages_beyond_rank_0() -> None:
    with lazygt.session(mesh={"pipe": 2}, launcher="dry") as s:
        held = lazygt.stage(torch.ones(4, 6), 1)
        s.flush()
        for dim in range(2):
            total = held.exp().sum(dim)
            line = _here(-1)
            s.flush()
            del total
        rows = _rows(lazygt.why(s), "plan misses")
    assert rows[-2] == f"  before  aten.sum.dim_IntList(f32[4, 6], [0])  {line}"


def test_a_miss_shows_the_kinds_of_run_time_numbers(s: lazygt.Session) -> None:
    x = torch.ones(4)
    s.flush()
    for number in (2, 3, 2.5, 3.5):
        (x * number).tolist()
    rows = _rows(lazygt.why(s), "plan misses")
    assert len(lazygt.why(s).misses) == 3  # the first, an int's and a float's
    assert rows[-2].startswith("  before  aten.mul.Tensor(f32[4], int)  ")
    assert rows[-1].startswith("  now     aten.mul.Tensor(f32[4], float)  ")


def test_a_miss_shows_the_kinds_of_named_numbers(s: lazygt.Session) -> None:
    x = torch.ones(4)
    s.flush()
    for number in (2, 2.5):
        torch.add(x, x, alpha=number).tolist()
    assert "aten.add.Tensor(f32[4], f32[4], alpha=int)" in str(lazygt.why(s))
    assert "aten.add.Tensor(f32[4], f32[4], alpha=float)" in str(lazygt.why(s))


def test_a_miss_is_shown_against_the_step_most_like_it(s: lazygt.Session) -> None:
    x = torch.ones(4, 6)
    s.flush()
    for op in (lambda: x.sum(0), lambda: x.exp(), lambda: x.log(), lambda: x.sum(1)):
        op().tolist()
    assert (
        "  before  aten.sum.dim_IntList(f32[4, 6], [0])  "
        in _rows(lazygt.why(s), "plan misses")[-2]
    )


def test_miss_shows_other_live_values(s: lazygt.Session) -> None:
    x = torch.ones(3)
    s.flush()

    def step(keep: bool) -> Any:
        middle = x.exp()
        line = _here(-1)
        end = middle.log()
        kept = middle if keep else None
        del middle
        s.flush()
        return end, kept, line

    step(False)
    *_, line = step(True)
    rows = _rows(lazygt.why(s), "plan misses")
    assert rows[-2].endswith("another set of values is alive")
    assert rows[-1] == f"  alive   aten.exp.default f32[3]  {line}"


def test_a_miss_of_a_shorter_stretch(s: lazygt.Session) -> None:
    x = torch.ones(3).exp()
    y = x.log()
    s.flush()
    x = torch.ones(3).exp()
    s.flush()
    assert lazygt.why(s).misses[-1].reason == "the trace ends where no kept plan ends"
    del x, y


# -- fallbacks and compiles ----------------------------------------------------------------------


def test_a_data_dependent_op_is_a_fallback(s: lazygt.Session) -> None:
    assert _rows(lazygt.why(s), "fallbacks") == ["none"]
    x = torch.ones(3)
    for _ in range(2):
        torch.nonzero(x)
    assert _rows(lazygt.why(s), "fallbacks") == [
        f"2x aten.nonzero.default  {_here(-2)}  "
        f"its result's shape depends on values: shipped and asked"
    ]


def test_compiles_are_listed_and_unprofitable_ones_are_fallbacks() -> None:
    compiles = [
        CompileRecord("k1", 3, "a.py:1", "compiled", seconds=1.5, gain=2.0, took=2.0),
        CompileRecord("k2", 4, "a.py:2", "compiled", seconds=0.5, gain=0.9, took=2.0),
        CompileRecord(
            "k3", 5, "a.py:3", "failed", error="OSError: no compiler", names="mul x4, add"
        ),
        CompileRecord("k4", 6, "a.py:4", "compiling"),
    ]
    why = Why((Flush("item", None, 0, None, False, 1),), 1, (), compiles)
    assert _rows(why, "compiles") == [
        "a.py:1  3 ops compiled, 1.50 s, 2.00x as fast",
        "a.py:2  4 ops compiled, 0.50 s, 0.90x as fast",
        "a.py:3  5 ops failed, 0.00 s",
        "a.py:4  6 ops compiling, 0.00 s",
    ]
    assert _rows(why, "fallbacks") == [
        "a.py:2  4 ops stay eager: compiled they would be 0.90x as fast",
        "a.py:3  5 ops stay eager: OSError: no compiler (mul x4, add)",
    ]


def test_a_session_says_nothing_before_it_does_something(s: lazygt.Session) -> None:
    assert str(lazygt.why(s)) == (
        "flushes (0)\n  none\nplan misses (0)\n  none\nfallbacks\n  none\ncompiles\n  none"
    )


# -- stages --------------------------------------------------------------------------------------


def test_stages_of_a_plan() -> None:
    with lazygt.session(launcher="inline", planning=lazygt.Planning(keep_stages=True)) as s:
        (torch.ones(3).exp() + 1).tolist()
        assert s.plans() == [s.last_plan]
        names = [name for name, _ in s.stages(s.last_plan)]
        assert names[0] == "recorded"
        assert len(names) == len(set(names)) > 1
        assert s.stages(s.last_plan)[-1][1] == s.last_plan.graph


def test_stages_that_are_not_kept(s: lazygt.Session) -> None:
    torch.ones(3).tolist()
    plan = s.last_plan
    with pytest.raises(
        ValueError, match=r"lazygt.session\(planning=Planning\(keep_stages=True\)\)"
    ):
        s.stages(plan)
    with (
        lazygt.session(launcher="inline", planning=lazygt.Planning(keep_stages=True)) as other,
        pytest.raises(ValueError, match=rf"keeps no plan {plan.digest.hex()[:12]}; see plans\(\)"),
    ):
        other.stages(plan)


def test_stages_go_with_their_plans() -> None:
    with lazygt.session(
        launcher="inline", planning=lazygt.Planning(keep_stages=True, max_plans=4)
    ) as s:
        for width in range(1, 20):
            torch.ones(width).sum().item()
            if width == 1:
                first = s.last_plan
                assert s.stages(first)
        assert len(s.plans()) <= 4
        assert all(s.stages(plan) for plan in s.plans())
        with pytest.raises(ValueError, match="keeps no plan"):
            s.stages(first)


def test_generator_state_is_named_in_report() -> None:
    with lazygt.session(launcher="inline") as s:
        torch.rand(3).sum().item()
        text = str(lazygt.why(s))
    assert "input generator state" in text
    assert "u8[" not in text
