"""Arguments that are forced upon calls of fully_shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import lazygt
from lazygt.graph.mesh import FSDPUnit
from lazygt.parallel.fsdp_overrides import forced_knobs
from lazygt.record.annotate import current_sharding


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with lazygt.session(mesh={"data": 2}, launcher="dry"):
        yield


def units(model: nn.Module) -> list[FSDPUnit]:
    """Of all parameters, without doubles."""
    stored = [current_sharding(parameter).unit for parameter in model.parameters()]  # type: ignore[arg-type]
    return list(dict.fromkeys(unit for unit in stored if unit is not None))


def test_forced_knobs_apply_only_inside_block() -> None:
    with forced_knobs(
        wrap="one", bucket_cap_mb=2.0, reshard_after_forward=False, limit_all_gathers=False
    ) as forced:
        (unit,) = units(lazygt.fully_shard(Model(), wrap="auto", bucket_cap_mb=25))
    assert unit[1:] == ("data", 2 << 20, False, False)
    assert forced.calls == 1
    *_, last = units(lazygt.fully_shard(Model()))
    assert last[2:] == (None, True, True)


def by_blocks(model: Model) -> Model:
    """As scripts for FSDP2 are written."""
    for block in model.blocks:
        lazygt.fully_shard(block, wrap="one")
    lazygt.fully_shard(model)
    return model


@pytest.mark.parametrize(("wrap", "count"), [("one", 1), ("block", 3), ("auto", 3)])
def test_the_wrap_is_that_of_the_whole_model(wrap: str, count: int) -> None:
    assert len(units(by_blocks(Model()))) == 3
    with forced_knobs(wrap=wrap) as forced:
        model = by_blocks(Model())
    forced.check()
    assert len(units(model)) == count
    assert all(current_sharding(p).fixed for p in model.parameters())  # type: ignore[arg-type]


def test_other_knobs_leave_units_as_the_script_has_them() -> None:
    with forced_knobs(bucket_cap_mb=1.0):
        assert [unit.cap_bytes for unit in units(by_blocks(Model()))] == 3 * [1 << 20]


def test_a_script_that_changes_its_mind_about_resharding_is_not_heard() -> None:
    with forced_knobs(reshard_after_forward=True):
        model: Any = lazygt.fully_shard(Model())
        model.set_reshard_after_forward(False)
        assert all(unit.reshard_after_forward for unit in units(model))
    model.set_reshard_after_forward(False)
    assert not any(unit.reshard_after_forward for unit in units(model))


def test_forced_knobs_without_effect_raise() -> None:
    with forced_knobs(wrap="one") as forced:
        pass
    with pytest.raises(ValueError, match="wrap: the script never calls lazygt"):
        forced.check()
    with forced_knobs(wrap="block") as forced:
        lazygt.fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no module that fully_shard is called on has repeated"):
        forced.check()
    with forced_knobs() as forced:
        pass
    forced.check()


def test_unknown_knob_is_refused() -> None:
    with pytest.raises(TypeError, match=r"forced_knobs\(warp=...\): expected wrap, bucket_cap_mb"):
        forced_knobs(warp="one").__enter__()
