"""The benchmark of `lazygt top` counts what it says."""

import pytest

from benchmarks.top import measured, noted


@pytest.mark.timeout(120)
def test_it_measures_steps_threads_and_the_first_picture() -> None:
    figures = measured(rounds=1, seconds=0.6)
    assert set(figures) >= {"unwatched", "watched", "paint", "watched, client", "watched, worker"}
    assert all(
        value > 0 for name in ("unwatched", "watched", "paint") for value in figures[name].rounds
    )
    assert all(0 < figures[f"watched, {who}"].median < 100 for who in ("client", "worker"))
    assert noted(1_000) > 0
