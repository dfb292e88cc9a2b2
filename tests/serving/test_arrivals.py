"""When requests come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lazygt.serving.simulation import Bursty, Poisson, RecordedArrivals, parse_arrivals


def dispersion(times: np.ndarray, seconds: float) -> float:
    """The variance of the counts in windows of 0.1 s, as a multiple of their mean: 1 at random."""
    counts, _ = np.histogram(times, np.arange(0, seconds, 0.1))
    return float(counts.var() / counts.mean())


def test_poisson_arrivals() -> None:
    times = Poisson().times(1_000, 100, np.random.default_rng(0))
    assert len(times) == pytest.approx(100_000, rel=0.02)
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] < times[-1] < 100
    assert dispersion(times, 100) == pytest.approx(1, abs=0.15)


def test_bursts_bring_as_many_and_less_evenly() -> None:
    bursty = Bursty(peak=3, share=0.2, burst=0.5)
    times = bursty.times(1_000, 100, np.random.default_rng(0))
    assert len(times) == pytest.approx(100_000, rel=0.02)
    assert (np.diff(times) >= 0).all()
    assert times[-1] <= 100
    assert dispersion(times, 100) > 20


def test_bursts_with_all_arrivals() -> None:
    """peak x share = 1: nothing comes in between."""
    bursty = Bursty(peak=5, share=0.2, burst=1)
    times = bursty.times(1_000, 100, np.random.default_rng(1))
    counts, _ = np.histogram(times, np.arange(0, 100, 0.1))
    assert (counts == 0).mean() > 0.5
    assert counts.max() > 300


def test_the_same_seed_gives_the_same() -> None:
    for arrivals in (Poisson(), Bursty()):
        first, again, other = (
            arrivals.times(100, 10, np.random.default_rng(seed)) for seed in (1, 1, 2)
        )
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


def test_arrival_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "seen.txt"
    path.write_text("# seconds since midnight\n12.0\n10.0\n\n10500ms  # late\n14\n")
    recorded = parse_arrivals(str(path))
    assert recorded == RecordedArrivals("seen.txt", (0.0, 0.5, 2.0, 4.0))
    assert isinstance(recorded, RecordedArrivals)
    assert recorded.qps == 0.75
    faster = recorded.times(1.5, 1e9, np.random.default_rng(0))
    assert faster.tolist() == [0, 0.25, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nsoon\n", r"seen.txt:2: 'soon': expected a number"),
        ("1h\n", r"seen.txt:1: '1h': there is no unit 'h'"),
        ("1\n", "has no two times: expected an arrival a line, in seconds"),
        ("1\n1\n", "has no two times"),
        ("", "has no two times"),
    ],
)
def test_invalid_arrival_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "seen.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_arrivals(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("possion", "arrivals are poisson, bursty or a file of times, and 'possion' can't be read"),
        ("bursty:peak=6,share=0.2", "peak x share is at most 1"),
        ("bursty:peak=0.5", "expected peak >= 1"),
        ("bursty:share=0", "0 < share < 1"),
        ("bursty:height=2", "bursty has no 'height': it takes peak, share, burst"),
        ("bursty:burst=2", "expected a duration with its unit, such as 2ms"),
    ],
)
def test_malformed_arrivals_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arrivals(text)


def test_text_of_arrival_processes() -> None:
    assert parse_arrivals("bursty") == Bursty()
    assert parse_arrivals("bursty:peak=2,burst=1s") == Bursty(peak=2, burst=1)
    assert parse_arrivals("poisson") == Poisson()
