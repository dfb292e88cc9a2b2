"""When requests close, where pieces lie: the threshold rules, to the byte."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazygt.transfer.layout import Batcher, Request, Route, packed, split_route
from lazygt.transfer.manifest import ALIGNMENT

A = ALIGNMENT


def routes(chunks: list[list[int]]) -> list[list[Route]]:
    """Sizes of parameters by chunk -> their routes; an empty parameter has none."""
    numbers = itertools.count()
    numbered = [[(next(numbers), size) for size in chunk] for chunk in chunks]
    return [
        [Route(0, k, 0, ((0, size),), ((0, size),), size) for k, size in chunk if size]
        for chunk in numbered
    ]


def gathered(chunks: list[list[int]], threshold: int, piece_bytes: int) -> list[Request]:
    batcher, limit = Batcher(threshold, A), min(piece_bytes, threshold // A * A or piece_bytes)
    cut = (
        [piece for one in chunk for piece in split_route(one, limit)] for chunk in routes(chunks)
    )
    requests = [request for chunk in cut for request in batcher.add(chunk)]
    return [*requests, *batcher.flush()]


def requests(
    chunks: list[list[int]], threshold: int, piece_bytes: int = 64 * A
) -> list[list[tuple[int, int, int]]]:
    """Sizes of parameters by chunk -> (parameter, begin, bytes) by request."""
    return [
        [(piece.param, piece.target[0][0], piece.nbytes) for piece in request]
        for request in gathered(chunks, threshold, piece_bytes)
    ]


@pytest.mark.parametrize(
    ("chunks", "threshold", "expected"),
    [
        # gathers up to the threshold, and exactly the threshold still fits
        ([[A], [A], [A]], 2 * A, [[(0, 0, A), (1, 0, A)], [(2, 0, A)]]),
        ([[A], [A]], 2 * A, [[(0, 0, A), (1, 0, A)]]),
        ([[A], [A + 1]], 2 * A, [[(0, 0, A)], [(1, 0, A + 1)]]),
        ([[A, A]], 2 * A, [[(0, 0, A), (1, 0, A)]]),
        # what counts is the aligned size
        ([[1], [1], [1]], 2 * A, [[(0, 0, 1), (1, 0, 1)], [(2, 0, 1)]]),
        # a bigger chunk goes alone: first, in the middle, last
        ([[A, 2 * A], [A]], 2 * A, [[(0, 0, A)], [(1, 0, 2 * A)], [(2, 0, A)]]),
        (
            [[A], [A, 2 * A], [A]],
            2 * A,
            [[(0, 0, A)], [(1, 0, A)], [(2, 0, 2 * A)], [(3, 0, A)]],
        ),
        ([[A], [A, A, A]], 2 * A, [[(0, 0, A)], [(1, 0, A), (2, 0, A)], [(3, 0, A)]]),
        # a bigger parameter is cut by bytes: first, in the middle, last
        ([[3 * A], [A]], 2 * A, [[(0, 0, 2 * A)], [(0, 2 * A, A)], [(1, 0, A)]]),
        (
            [[A], [5 * A - 7], [A]],
            2 * A,
            [[(0, 0, A)], [(1, 0, 2 * A)], [(1, 2 * A, 2 * A)], [(1, 4 * A, A - 7)], [(2, 0, A)]],
        ),
        ([[A], [4 * A]], 2 * A, [[(0, 0, A)], [(1, 0, 2 * A)], [(1, 2 * A, 2 * A)]]),
        ([[3 * A, A]], 2 * A, [[(0, 0, 2 * A)], [(0, 2 * A, A), (1, 0, A)]]),
        # 0: a request a chunk, whatever its size
        ([[A], [100 * A, A], [3]], 0, [[(0, 0, A)], [(1, 0, 100 * A), (2, 0, A)], [(3, 0, 3)]]),
        # nothing is no request
        ([[0], [0, 0]], 2 * A, []),
        ([[0], [A], []], 0, [[(1, 0, A)]]),
        ([], 2 * A, []),
    ],
)
def test_where_requests_end(
    chunks: list[list[int]], threshold: int, expected: list[list[tuple[int, int, int]]]
) -> None:
    assert requests(chunks, threshold, piece_bytes=200 * A) == expected


def test_long_parameters_are_cut_into_pieces_for_threads() -> None:
    assert requests([[5 * A]], 0, 2 * A) == [[(0, 0, 2 * A), (0, 2 * A, 2 * A), (0, 4 * A, A)]]


def test_a_tiny_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="below 256; use 0"):
        Batcher(255, A)


CHUNKS = st.lists(st.lists(st.integers(0, 20 * A), max_size=4), max_size=8)


@given(CHUNKS, st.integers(A, 9 * A), st.integers(1, 5))
def test_every_byte_travels_once_within_the_threshold(
    chunks: list[list[int]], threshold: int, pages: int
) -> None:
    sizes = [size for chunk in chunks for size in chunk]
    made = gathered(chunks, threshold, pages * A)
    arrived: dict[int, int] = defaultdict(int)
    for request in made:
        assert request
        offsets, extent = packed(request)
        assert extent <= threshold
        end = 0
        for piece, place in zip(request, offsets, strict=True):
            assert place == end
            assert place % A == 0
            assert 0 < piece.nbytes <= pages * A
            assert piece.source == piece.target
            assert piece.target[0] == (arrived[piece.param], arrived[piece.param] + piece.nbytes)
            arrived[piece.param] += piece.nbytes
            end = place + -(-piece.nbytes // A) * A
    assert dict(arrived) == {k: size for k, size in enumerate(sizes) if size}
    assert [piece.param for request in made for piece in request] == sorted(
        piece.param for request in made for piece in request
    )
