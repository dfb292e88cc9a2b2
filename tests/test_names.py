"""Public names: each is there and says what it is; one of before torch's words says the new one."""

from __future__ import annotations

import importlib

import pytest
import torch

import lazygt
from lazygt.record.annotate import current_sharding


@pytest.mark.parametrize("name", lazygt.__all__)
def test_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(lazygt, name)
    assert value is not None
    if getattr(value, "__module__", "lazygt").startswith("lazygt"):
        assert (value.__doc__ or "").strip()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("parallelize", "parallelize_module"),
        ("column_parallel", "ColwiseParallel"),
        ("row_parallel", "RowwiseParallel"),
        ("sequence_parallel", "SequenceParallel"),
        ("prepare_module_input", "PrepareModuleInput"),
        ("vocab_parallel", "VocabParallel"),
    ],
)
def test_a_name_of_before_says_the_new_one(before: str, now: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{before}': use lazygt.{now}$"):
        getattr(lazygt, before)
    assert now in lazygt.__all__


def test_unknown_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'lazygt' has no attribute 'nothing'$"):
        _ = lazygt.nothing


def test_argument_that_is_no_session_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^lazygt.why: expected a session, not NoneType$"):
        lazygt.why(None)  # type: ignore[arg-type]
    with (
        pytest.raises(TypeError, match=r"^lazygt.profile: expected a session, not int$"),
        lazygt.profile(3),  # type: ignore[arg-type]
    ):
        pass


def test_former_keyword_of_fixed_placements_warns() -> None:
    with lazygt.session(launcher="inline", mesh={"data": 1}):
        t = torch.ones(4)
        with pytest.warns(
            DeprecationWarning, match=r"^distribute\(pinned=...\) is deprecated: use"
        ):
            former = lazygt.distribute(t, {"data": lazygt.Shard(0)}, pinned=True)
        now = lazygt.distribute(t, {"data": lazygt.Shard(0)}, fixed=True)
        assert current_sharding(former) == current_sharding(now)
        with pytest.raises(TypeError, match=r"^distribute\(\) got fixed, and pinned, which is its"):
            lazygt.distribute(t, {"data": lazygt.Shard(0)}, fixed=True, pinned=False)


@pytest.mark.parametrize(
    ("module", "former", "now"),
    [
        ("serving", "Recorded", "RecordedArrivals"),
        ("machine", "Link", "LinkFigures"),
        ("simulation", "Check", "PredictionCheck"),
        ("simulation", "Living", "LiveValue"),
    ],
)
def test_former_class_name_warns(module: str, former: str, now: str) -> None:
    package = importlib.import_module(f"lazygt.{module}")
    with pytest.warns(DeprecationWarning, match=f"^lazygt.{module}.{former} is deprecated: use"):
        assert getattr(package, former) is getattr(package, now)
    with pytest.raises(AttributeError, match=f"^module 'lazygt.{module}' has no attribute 'Odd'$"):
        _ = package.Odd
