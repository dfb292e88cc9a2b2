"""Recent: what was not used for longest goes first, by number and by bytes."""

from __future__ import annotations

from lazygt.graph.recent import Recent


def kept(recent: Recent[str, int]) -> list[tuple[str, int]]:
    return list(recent.items())


def test_cache_is_bounded_by_count() -> None:
    recent: Recent[str, int] = Recent(2, 1000)
    assert recent.keep("a", 1, 1) == []
    assert recent.keep("b", 2, 1) == []
    assert recent.get("a") == 1
    assert recent.keep("c", 3, 1) == [("b", 2)]
    assert kept(recent) == [("a", 1), ("c", 3)]
    assert recent.get("b") is None


def test_cache_is_bounded_by_bytes() -> None:
    recent: Recent[str, int] = Recent(1000, 10)
    for name, nbytes in ("a", 4), ("b", 4), ("c", 2):
        assert recent.keep(name, 0, nbytes) == []
    assert recent.keep("d", 0, 5) == [("a", 0), ("b", 0)]
    assert recent.nbytes == 7
    assert recent.keep("huge", 0, 50) == [("c", 0), ("d", 0)]
    assert kept(recent) == [("huge", 0)]  # what is needed now is kept, whatever it takes


def test_key_kept_again_counts_once() -> None:
    recent: Recent[str, int] = Recent(2, 10)
    recent.keep("a", 1, 8)
    assert recent.keep("a", 2, 9) == []
    assert (kept(recent), recent.nbytes) == ([("a", 2)], 9)
    recent.drop("a")
    recent.drop("a")
    assert (len(recent), recent.nbytes) == (0, 0)
    recent.keep("a", 1, 8)
    assert recent.pop_oldest() == ("a", 1)
    recent.keep("b", 1, 8)
    recent.clear()
    assert ("b" in recent, recent.nbytes) == (False, 0)
