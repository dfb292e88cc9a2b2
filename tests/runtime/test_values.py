"""Values that workers hold, as the client speaks of them: in Python and in C++."""

from __future__ import annotations

import gc
import threading
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazygt import native
from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import Replicate, Shard
from lazygt.graph.source import user_call_site
from lazygt.runtime import values, wire
from lazygt.runtime.wire import DeltaCodec

pytestmark = pytest.mark.timeout(60)

EXTENSION: Any = native.load().module
needs_native = pytest.mark.skipif(EXTENSION is None, reason="the native extension is not built")


class Kind(NamedTuple):
    """Who holds ids."""

    freed: Any
    value: Any
    values: Any


CHOSEN = Kind(values.Freed, values.RemoteValue, values.new_values)
NATIVE = Kind(EXTENSION and EXTENSION.Freed, EXTENSION and EXTENSION.RemoteValue,
              EXTENSION and EXTENSION.Values)  # fmt: skip


@pytest.fixture(params=[CHOSEN, pytest.param(NATIVE, marks=needs_native)], ids=["chosen", "native"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """The one of this process, and C++'s."""
    made: Kind = request.param
    return made


def test_an_id_is_freed_once_when_nobody_speaks_of_it(kind: Kind) -> None:
    freed = kind.freed()
    value = again = kind.value(7, freed)
    assert value.id == 7
    assert value.ids == (7,)
    assert not freed
    del value
    assert not freed
    del again
    assert freed
    assert list(freed.take()) == [7]
    assert not freed
    assert list(freed.take()) == []


def test_freed_ids_come_in_order(kind: Kind) -> None:
    freed = kind.freed()
    held = [kind.value(key, freed) for key in (5, 2, 9)]
    held.pop()
    held.clear()
    assert list(freed.take()) == [2, 5, 9]


def test_blocks_are_freed_with_their_value(kind: Kind) -> None:
    freed = kind.freed()
    value = kind.value(1, freed)
    assert value.rest == ()
    value.rest = [kind.value(2, freed), kind.value(3, freed)]
    assert value.ids == (1, 2, 3)
    assert [block.id for block in value.rest] == [2, 3]
    del value
    gc.collect()
    assert list(freed.take()) == [1, 2, 3]


def test_value_stores_its_sharding(kind: Kind) -> None:
    value = kind.value(1, kind.freed())
    assert value.sharding is None
    value.sharding = Sharding((Shard(0), Replicate()))
    assert value.sharding == Sharding((Shard(0), Replicate()))
    value.sharding = None
    assert value.sharding is None


def test_value_stores_its_call_site() -> None:
    value = CHOSEN.value(1, CHOSEN.freed())
    value.call_site = here = user_call_site(0)
    assert value.call_site == here
    value.call_site = None
    assert value.call_site is None


def test_unclaimed_outputs_of_run_are_freed(kind: Kind) -> None:
    freed = kind.freed()
    taken = [value.id for value in kind.values(10, 3, freed)]
    assert taken == [10, 11, 12]
    assert list(freed.take()) == [10, 11, 12]
    made = kind.values(20, 2, freed)
    del made
    assert list(freed.take()) == [20, 21]


def test_many_threads_let_go_at_once(kind: Kind) -> None:
    freed = kind.freed()
    seen: list[int] = []
    go = threading.Barrier(5)

    def let_go(first: int) -> None:
        go.wait()
        for key in range(first, first + 500):
            kind.value(key, freed)

    threads = [threading.Thread(target=let_go, args=(500 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    go.wait()
    while any(thread.is_alive() for thread in threads):
        seen += freed.take()
    seen += freed.take()
    assert sorted(seen) == list(range(2000))


@needs_native
@given(st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 9)), max_size=8))
def test_both_codecs_say_ids_alike(runs: list[tuple[list[int], int]]) -> None:
    ours, reference, theirs, base = EXTENSION.DeltaCodec(), DeltaCodec(), DeltaCodec(), 0
    for ids, step in runs:
        base += step
        update = ours.encode(ids, base)
        assert update == reference.encode(ids, base)
        assert theirs.decode(wire.unpack(wire.pack(update), Any), base) == ids
