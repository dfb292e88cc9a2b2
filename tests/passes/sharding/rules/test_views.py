"""What a placement becomes behind a reshape."""

from __future__ import annotations

import itertools

import pytest
import torch

from lazygt.graph.placement import Cut, StridedShard, local_shape, side_by_side
from lazygt.passes.sharding.rules.strategy import S, shardable_dims
from lazygt.passes.sharding.rules.views import viewed
from tests.passes.sharding.rules.blocks import blocks

Shape = tuple[int, ...]
I = StridedShard  # noqa: E741


@pytest.mark.parametrize(
    ("placement", "have", "made", "wanted"),
    [
        (S(0), (8, 6), (48,), S(0)),
        (S(1), (8, 6), (48,), I(0, 8)),
        (I(0, 8), (48,), (8, 6), S(1)),
        (I(0, 8), (48,), (2, 4, 6), S(2)),
        (I(0, 8), (48,), (2, 24), I(1, 4)),
        (I(0, 4), (24, 3), (4, 6, 3), S(1)),
        (S(1), (8, 6, 5), (8, 30), S(1)),
        (S(1), (8, 6, 5), (240,), I(0, 8)),
        (S(0), (8,), (4, 2), S(0)),
        (S(0), (6,), (3, 2), None),
        (I(0, 4), (48,), (6, 8), None),
        # on four ranks three rows are not as many for each
        (S(0), (3, 5), (15,), I(0, 1, 5)),
        (I(0, 1, 5), (15,), (3, 5), S(0)),
        (S(1), (2, 3, 5), (30,), I(0, 2, 5)),
        (S(1), (0, 4), (0, 4), S(1)),
    ],
)
def test_a_label_behind_a_reshape(
    placement: Cut, have: Shape, made: Shape, wanted: Cut | None
) -> None:
    ranks = 4 if 3 in have else 2
    assert viewed(placement, have, made, ranks) == wanted


SHAPES: list[Shape] = [(24,), (4, 6), (2, 3, 4), (6, 2, 2), (3, 8), (2, 12), (1, 24), (4, 1, 6)]


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_blocks_seen_so_are_those_of_the_whole_seen_so(parts: int) -> None:
    kinds = set()
    for have, between, made in itertools.product(SHAPES, repeat=3):
        for dim in shardable_dims(have):
            placement = viewed(S(dim), have, between, parts)
            wanted = None if placement is None else viewed(placement, between, made, parts)
            if placement is None or wanted is None:
                continue
            kinds |= {type(placement), type(wanted)}
            whole = torch.arange(24.0)
            mine = blocks(whole.view(between), placement, parts)
            for rank, (piece, want) in enumerate(
                zip(mine, blocks(whole.view(made), wanted, parts), strict=True)
            ):
                assert torch.equal(piece.view(local_shape(made, wanted, parts, rank)), want)
    assert kinds == {S, StridedShard}


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [(12, 6, 6), (4, 20), (6, 18), (2, 2, 20)])
def test_groups_of_several_sizes_seen_otherwise(sizes: tuple[int, ...], parts: int) -> None:
    placement, seen = side_by_side(1, sizes), 0
    for made in [(6, 24), (2, 3, 24), (6, 12, 2), (3, 2, 1, 4, 6), (6, 2, 12), (144,)]:
        wanted = viewed(placement, (6, 24), made, parts)
        if wanted is None:
            continue
        whole, seen = torch.arange(144.0), seen + 1
        mine = blocks(whole.view(6, 24), placement, parts)
        for rank, (piece, want) in enumerate(
            zip(mine, blocks(whole.view(made), wanted, parts), strict=True)
        ):
            assert torch.equal(piece.view(local_shape(made, wanted, parts, rank)), want)
    assert seen >= 2


def test_placements_as_text() -> None:
    texts = ["S(1)", "S(0/8)", "S(2/1*5)", "S(1/2+1+1)", "S(0/2)", "S(0)"]
    groups = [side_by_side(1, (64, 32, 32)), side_by_side(0, (5, 5)), side_by_side(0, (7,))]
    assert [*map(str, (S(1), I(0, 8), I(2, 1, 5), *groups))] == texts
