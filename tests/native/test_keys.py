"""A step is found by its key alone: one that differs in a bit of a word leads nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt import native
from lazygt.record.trie import TrieNode
from lazygt.settings import grouped
from tests.models import zoo
from tests.native.accounts import drawn

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        native.choice().recorder != "native", reason="the native recorder is not chosen"
    ),
]
Key = tuple[int, ...]


def steps(session: lazygt.Session) -> Iterator[TrieNode]:
    """All that the trie knows."""
    waiting = [session.recorder.trie.root]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += step.children.values()


def others(key: Key) -> Iterator[Key]:
    """Keys that differ: in a bit of a word, by a word more or less, or in the order of words."""
    for at, word in enumerate(key):
        yield from ((*key[:at], word ^ (1 << bit), *key[at + 1 :]) for bit in range(64))
        yield (*key[:at], *key[at + 1 :])
        yield (*key[:at], 0, *key[at:])
        if at and key[at - 1] != word:
            yield (*key[: at - 1], word, key[at - 1], *key[at + 1 :])
    yield (*key, 0)


def check(session: lazygt.Session) -> int:
    """Flip every bit of every word of all keys; how many keys there are."""
    extension: Any = native.extension()
    count = 0
    for step in steps(session):
        keys = {tuple(key) for key in extension.keys_below(step)}
        below = [extension.step_below(step, key) for key in keys]
        assert len({id(found) for found in below}) == len(keys), "two keys, one step"
        assert all(found.parent is step for found in below)
        count += len(keys)
        for key in keys:
            for other in others(key):
                if other not in keys:
                    assert extension.step_below(step, other) is None, (key, other)
    return count


def test_no_other_key_finds_a_step_of_drawn_programs() -> None:
    keys = 0
    for task in drawn(0, 5):
        with lazygt.session(
            **grouped({"launcher": "inline", "compile": "off", **task.settings})
        ) as session:
            for program in task.programs:
                program()
            keys += check(session)
    assert keys > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.MODELS)
def test_no_other_key_finds_a_step_of_a_model(name: str) -> None:
    with lazygt.session(launcher="inline", compile="off") as session:
        zoo.train(name, "adamw", zoo.batches(name, 2), "lazygt")
        assert check(session) > 100


def test_many_steps_below_one_are_told_apart_as_well() -> None:
    """From eight on they are found by a hash."""
    with lazygt.session(launcher="inline", compile="off") as session:
        x = torch.arange(24.0)
        for size in (1, 2, 3, 4, 6, 8, 12, 24) * 2:
            session.flush()
            x.sum().item()
            x.view(size, -1)
        assert max(len(step.children) for step in steps(session)) >= 8
        assert check(session) >= 8
