"""Metas of the C++ recorder live as long as somebody owns them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt import native

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        native.choice().recorder != "native", reason="the native recorder is not chosen"
    ),
]
#: Metas that stay, owned or not: ``FEW`` of meta.cpp.
FEW = 4096
#: Shapes of one trace.
WIDTH = 12


def there() -> int:
    """Count the metas that are there."""
    extension: Any = native.extension()
    count: int = extension.metas()
    return count


def owned() -> int:
    """Count the metas that somebody owns."""
    gc.collect()
    extension: Any = native.extension()
    count: int = extension.owned_metas()
    return count


def blanks(count: int, width: int = 101) -> Iterator[torch.Tensor]:
    """Make so many tensors without memory, each in a shape of its own."""
    return (torch.empty(1 + n // width, n % width, width) for n in range(count))


def trace(number: int) -> float:
    """Compute with an input, results, views and writes in shapes that no other number has."""
    x = torch.full((number, 2), 1.0, device="cpu").to("lazygt")
    total = x.sum()
    for k in range(2, 2 + WIDTH):
        y = torch.ones(number, k)
        y[:, 1:].add_(1.0)
        total = total + y.sum()
    value: float = total.item()
    return value


def expected(number: int) -> float:
    return float(2 * number + sum(number * (2 * k - 1) for k in range(2, 2 + WIDTH)))


def test_metas_of_dropped_tensors_are_freed_by_and_by() -> None:
    with lazygt.session(launcher="inline", compile="off"):
        most = max(FEW, 2 * there())
        for _ in blanks(4 * most):
            assert there() <= most + 1


def test_metas_of_living_tensors_stay() -> None:
    with lazygt.session(launcher="inline", compile="off"):
        before = owned()
        kept = list(blanks(FEW))
        shapes = [tuple(t.shape) for t in kept]
        for _ in blanks(4 * FEW, width=107):
            pass
        assert owned() >= before + FEW
        assert [tuple((t * 2).shape) for t in kept[:: FEW // 10]] == shapes[:: FEW // 10]
        del kept
        assert owned() < before + FEW


def test_a_bounded_trie_owns_the_metas_of_the_plans_that_it_keeps() -> None:
    counts = []
    with lazygt.session(launcher="inline", compile="off", planning=lazygt.Planning(max_plans=4)):
        for first in (1, 21, 41):
            for number in range(first, first + 20):
                assert trace(number) == expected(number)
            counts.append(owned())
    assert counts[1] == counts[2]


def test_a_closed_session_owns_no_metas() -> None:
    before = owned()
    with lazygt.session(launcher="inline", compile="off"):
        for number in range(100, 120):
            trace(number)
        assert owned() > before + 20 * WIDTH
    assert owned() <= before + WIDTH


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.ones(2, n, device="cpu").to("lazygt"),
        lambda n: torch.empty(n, 2)[0].fill_(1.0),
    ],
    ids=["input", "blank"],
)
def test_a_key_owns_the_meta_that_it_names(make: Callable[[int], torch.Tensor]) -> None:
    """A new one at the address of a freed one would lead to a step of another shape."""
    with lazygt.session(launcher="inline", compile="off"):
        assert make(3)[0].sum().item() > 0
        before = owned()
        for number in range(4, 4 + 40):
            make(number)[0].sum().item()
        assert owned() >= before + 40


def test_threads_that_make_new_shapes_get_their_own_values() -> None:
    found: dict[int, list[float]] = {}

    def work(seed: int) -> None:
        found[seed] = []
        for number in range(40):
            x = torch.full((1 + seed, 2 + number), 2.0)
            for _ in blanks(200, width=1000 + 100 * seed + number):
                pass
            found[seed].append((x * number).sum().item())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with lazygt.session(launcher="inline", compile="off"):
            most = max(FEW, 2 * there())
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert there() < 2 * most
    finally:
        sys.setswitchinterval(before)
    for seed in range(4):
        assert found[seed] == [2.0 * n * (1 + seed) * (2 + n) for n in range(40)]
