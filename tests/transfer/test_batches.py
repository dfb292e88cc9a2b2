"""When requests close, where pieces lie: the threshold rules, to the byte."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazygt.transfer.batches import Batcher, Piece, Request, extent, joined
from lazygt.transfer.spec import ALIGNMENT, Manifest, ParamSpec

A = ALIGNMENT


def manifest(*sizes: int) -> Manifest:
    return Manifest(tuple(ParamSpec(f"p{k}", "U8", (size,)) for k, size in enumerate(sizes)))


def requests(
    chunks: list[list[int]], threshold: int, piece_bytes: int = 64 * A
) -> list[list[tuple[int, int, int]]]:
    """Sizes of parameters by chunk -> (parameter, begin, bytes) by request."""
    sizes = [size for chunk in chunks for size in chunk]
    batcher = Batcher(manifest(*sizes), threshold, piece_bytes)
    made: list[Request] = []
    number = 0
    for chunk in chunks:
        made += batcher.add(range(number, number + len(chunk)))
        number += len(chunk)
    made += batcher.flush()
    return [[(piece.param, piece.begin, piece.nbytes) for piece in request] for request in made]


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


def test_joined_pieces_are_whole_again() -> None:
    pieces = [Piece(0, 0, 4, 0), Piece(1, 0, A, A), Piece(1, A, A, 2 * A), Piece(2, 0, 1, 3 * A)]
    assert joined(pieces) == [Piece(0, 0, 4, 0), Piece(1, 0, 2 * A, A), Piece(2, 0, 1, 3 * A)]


def test_a_tiny_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="below 256; use 0"):
        Batcher(manifest(1), 255)


CHUNKS = st.lists(st.lists(st.integers(0, 20 * A), max_size=4), max_size=8)


@given(CHUNKS, st.integers(A, 9 * A), st.integers(1, 5))
def test_every_byte_travels_once_within_the_threshold(
    chunks: list[list[int]], threshold: int, pages: int
) -> None:
    sizes = [size for chunk in chunks for size in chunk]
    described = manifest(*sizes)
    batcher = Batcher(described, threshold, pages * A)
    made: list[Request] = []
    number = 0
    for chunk in chunks:
        made += batcher.add(range(number, number + len(chunk)))
        number += len(chunk)
    made += batcher.flush()
    arrived: dict[int, int] = defaultdict(int)
    for request in made:
        assert request
        assert extent(request) <= threshold
        end = 0
        for piece in request:
            assert piece.place == end
            assert piece.place % A == 0
            assert 0 < piece.nbytes <= pages * A
            assert piece.begin == arrived[piece.param]
            arrived[piece.param] += piece.nbytes
            end = piece.place + -(-piece.nbytes // A) * A
    assert dict(arrived) == {k: size for k, size in enumerate(sizes) if size}
    assert [piece.param for request in made for piece in request] == sorted(
        piece.param for request in made for piece in request
    )
