"""Knobs, their values and combinations."""

from __future__ import annotations

from typing import Any

import pytest

from lazygt.sweeps import combinations, is_knob, matching, parsed


def test_every_combination_the_last_knob_turned_fastest() -> None:
    combos = combinations({"wrap": ["auto", "one"], "reshard": [True, False]})
    assert [str(combo) for combo in combos] == [
        "wrap=auto reshard=1", "wrap=auto reshard=0", "wrap=one reshard=1", "wrap=one reshard=0",
    ]  # fmt: skip


def test_forced_knobs_are_separated_from_script_arguments() -> None:
    (combo,) = combinations(parsed([
        "wrap=block2", "bucket-cap-mb=12.5", "reshard_after_forward=0", "limit_all_gathers=1",
        "seq-len=2048",
    ]))  # fmt: skip
    assert combo.forced == {
        "wrap": "block2", "bucket_cap_mb": 12.5, "reshard_after_forward": False,
        "limit_all_gathers": True,
    }  # fmt: skip
    assert combo.passed == {"seq-len": "2048"}


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({}, "nothing is to be swept: name knobs with their values, such as wrap=auto,block"),
        ({"wrap": ""}, "wrap= has no value"),
        ({"wrap": "auto,"}, "wrap= has no value"),
        ({"wrap": "outer"}, "wrap=outer: expected auto, block or one"),
        ({"bucket_cap_mb": "-1"}, "bucket_cap_mb=-1: expected MiB, such as 25"),
        ({"bucket_cap_mb": "many"}, "bucket_cap_mb=many: expected MiB"),
        ({"bucket_cap_mb": "nan"}, "bucket_cap_mb=nan: expected MiB"),
        ({"reshard": [2]}, "reshard=2: expected 1 or 0"),
        ({"wrap": "auto,auto"}, "auto stands there twice"),
        ({"warp": "auto"}, "there is no knob warp: did you mean wrap"),
        ({"bucket_cap": "25"}, "did you mean bucket_cap_mb"),
        ({"reshard": "1", "reshard_after_forward": "0"}, "reshard is named twice"),
        ({"--wrap": "one"}, "'--wrap' is no name of a knob"),
    ],
)
def test_invalid_knobs_are_refused(knobs: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        combinations(knobs)


def test_a_knob_that_is_named_twice() -> None:
    with pytest.raises(ValueError, match="wrap is named twice: give all its values at once"):
        parsed(["wrap=auto", "wrap=one"])


def test_knob_arguments_are_recognized() -> None:
    arguments = ["wrap=auto", "seq-len=1", "--mesh=data=2", "data", "=1", "2x=1"]
    assert [is_knob(argument) for argument in arguments] == [True, True, *4 * [False]]


def test_a_baseline_may_name_some_of_the_knobs() -> None:
    combos = combinations({"wrap": "auto,one", "reshard": "1,0", "bucket_cap_mb": "25"})
    assert matching(combos, "reshard=0") == 1
    assert matching(combos, "wrap=one, reshard_after_forward=0") == 3
    for wrong in ("wrap=block", "depth=1", ""):
        with pytest.raises(ValueError, match="is no combination of this sweep; the first is wrap="):
            matching(combos, wrong)
