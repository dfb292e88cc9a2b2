"""The benchmark of `lazygt top` counts what it says."""

import pytest

from benchmarks.top import in_a_pool, measured, noted


@pytest.mark.timeout(120)
def test_benchmark_measures_steps_threads_and_first_frame() -> None:
    figures = measured(rounds=1, seconds=0.6)
    assert set(figures) >= {"unwatched", "watched", "paint", "watched, client", "watched, worker"}
    assert all(
        value > 0 for name in ("unwatched", "watched", "paint") for value in figures[name].rounds
    )
    assert all(0 < figures[f"watched, {who}"].median < 100 for who in ("client", "worker"))
    assert noted(1_000) > 0


@pytest.mark.timeout(120)
def test_benchmark_measures_session_in_pool() -> None:
    figures = in_a_pool(rounds=1, seconds=0.6)
    assert all(figures[f"{case}, {who}"].median > 0
               for case in ("unwatched", "watched") for who in ("client", "pool"))  # fmt: skip
    assert all(figures[case].median > 0 for case in ("unwatched", "watched"))
