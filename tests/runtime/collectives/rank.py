"""One rank of a real group: runs every collective and compares with what it should give.

Every rank draws all ranks' blocks from one seed, so each knows what the others have.

    python rank.py RANK MESH DIRECTORY LISTENER [STORE HOST ADDRESS TOKEN]
"""

from __future__ import annotations

import itertools
import sys
from functools import reduce

import torch

from lazygt.graph import collectives
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import shard_bounds
from lazygt.net.sockets import GroupSpec
from lazygt.runtime.collectives import collective_ops, group, peer_backend, shared_backend
from lazygt.runtime.collectives.backends import HOST
from tests.support.bits import assert_same_bits
from tests.support.values import Kind, draw

SIZES = (1, 3, 4, 7)  # even, uneven, and with ranks that have nothing
LARGE = (67, 53)  # many slots of memory
shared_backend.SLOT_BYTES = peer_backend.PIECE_BYTES = 1024
SECONDS = 60.0


def cut(whole: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    start, stop = shard_bounds(whole.shape[dim], parts, index)
    return whole.narrow(dim, start, stop - start)


def same(made: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert made.is_contiguous(), what
    torch.testing.assert_close(made, expected, msg=lambda text: f"{what}: {text}")


def check_reductions(axis: str, values: list[torch.Tensor], line: group.AxisGroup) -> None:
    mine, stacked = values[line.index], torch.stack(values)
    reductions = {"sum": stacked.sum(0), "prod": stacked.prod(0), "max": stacked.amax(0),
                  "min": stacked.amin(0)}  # fmt: skip
    for op, expected in reductions.items():
        before = mine.clone()
        same(collective_ops.all_reduce(mine, op, axis), expected, f"all_reduce {op}")
        assert torch.equal(mine, before), "all_reduce wrote its operand"
        for dim in range(mine.dim()):
            block = cut(expected, dim, line.size, line.index)
            made = collective_ops.reduce_scatter(mine, dim, op, axis)
            same(made, block.contiguous(), f"reduce_scatter {op} {dim}")


def check_scatters(axis: str, values: list[torch.Tensor], line: group.AxisGroup) -> None:
    """Blocks that come back in the memory of what was sent: in its own, or in that of a pack."""
    total = torch.stack(values).sum(0)
    for dim in range(total.dim()):
        block = cut(total, dim, line.size, line.index).contiguous()
        mine = values[line.index].clone()
        if dim == 0:
            collective_ops.launch_("reduce_scatter", [mine], [(dim,)], "sum", axis)
            same(collective_ops.wait(mine, (), (), axis), block, "reduce_scatter over its operand")
        for kept in ((), (0,), (0, 1)):
            sent = [values[line.index], 2 * values[line.index]]
            flying = collective_ops.launch("reduce_scatter", sent, [(dim,), (dim,)], "sum", axis)
            first, second = collective_ops.wait(flying, (), kept, axis)
            same(first, block, f"reduce_scatter of a pack {dim}, {kept}")
            same(second, 2 * block, f"reduce_scatter of a pack {dim}, {kept}")


def check_moves(axis: str, whole: torch.Tensor, line: group.AxisGroup) -> None:
    for dim in range(whole.dim()):
        block = cut(whole, dim, line.size, line.index)
        same(collective_ops.shard(whole, dim, axis), block.contiguous(), f"shard {dim}")
        made = collective_ops.all_gather(block, dim, whole.shape[dim], axis)
        same(made, whole, f"all_gather {dim}")
        for split in range(whole.dim()):
            if split != dim:
                made = collective_ops.all_to_all(block, split, dim, whole.shape[dim], axis)
                expected = cut(whole, split, line.size, line.index).contiguous()
                same(made, expected, f"all_to_all {dim} to {split}")
        check_rows(axis, whole, line, dim)
    only = whole if line.index == 0 else torch.zeros_like(whole)
    same(collective_ops.first(whole, axis), only, "first")


def check_rows(axis: str, whole: torch.Tensor, line: group.AxisGroup, dim: int) -> None:
    """Each rank sends as many rows as it has places behind it to each of these, some nothing."""
    ranks = range(line.size)
    sent = [(a, b, a % 3) for a in ranks for b in ranks if a < b and a % 3]
    rows = whole.repeat_interleave(line.size, dim).narrow(dim, 0, whole.shape[dim])
    size = rows.shape[dim]
    if size < 2:
        return
    mine = sum(count for a, _, count in sent if a == line.index)
    value = torch.cat([rows] * (mine // size + 1), dim).narrow(dim, 0, mine)
    got = [torch.cat([rows] * 2, dim).narrow(dim, 0, 0)]
    for a, b, count in sent:
        if b == line.index:
            start = sum(c for x, y, c in sent if x == a and y < b)
            total = sum(c for x, _, c in sent if x == a)
            theirs = torch.cat([rows] * (total // size + 1), dim)
            got.append(theirs.narrow(dim, start, count))
    same(
        collective_ops.send_recv(value, dim, tuple(sent), axis),
        torch.cat(got, dim),
        f"send_recv {dim}",
    )


def check_dtypes(axis: str) -> None:
    """Those among them that are reduced in others."""
    line = group.axis_group(axis)
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        values = [torch.randn(5, 3).mul(2).round().to(dtype) for _ in range(line.size)]
        exact = [
            value.to(torch.complex64 if dtype.is_complex else torch.float32) for value in values
        ]
        total = torch.stack(exact).sum(0).to(dtype)
        mine = values[line.index]
        same(collective_ops.all_reduce(mine, "sum", axis), total, f"all_reduce of {dtype}")
        block = cut(total, 0, line.size, line.index).contiguous()
        same(
            collective_ops.reduce_scatter(mine, 0, "sum", axis), block, f"reduce_scatter of {dtype}"
        )
        check_moves(axis, values[0], line)


REDUCTIONS = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
LIMITS = {
    torch.float64: (Kind.NAN,),
    torch.float32: (Kind.INFINITE, Kind.NAN, Kind.LIMIT),
    torch.bfloat16: (Kind.INFINITE,),
    torch.float16: (Kind.LIMIT,),
    torch.complex64: (Kind.NAN,),
    torch.int64: (Kind.LIMIT,),
    torch.int16: (Kind.LIMIT,),
    torch.uint8: (Kind.LIMIT,),
}


def check_limits(axis: str) -> None:
    """Ranks reduce in their order, so infinities, NaN, zeros and overflow have the same bits.

    The maximum of zeros of both signs is either: torch's vectorised loop takes another than the
    loop over the elements that remain.
    """
    line = group.axis_group(axis)
    for dtype, kind in ((dtype, kind) for dtype, kinds in LIMITS.items() for kind in kinds):
        values = [draw((4, 7), dtype, kind) for _ in range(line.size)]
        ops_of = {"sum": torch.add} if dtype.is_complex else REDUCTIONS
        for op, reduction in ops_of.items():
            sent = [value + 0 for value in values] if op in ("max", "min") else values
            expected = reduce(reduction, sent)
            assert_same_bits(collective_ops.all_reduce(sent[line.index], op, axis), expected)
            block = cut(expected, 1, line.size, line.index)
            assert_same_bits(collective_ops.reduce_scatter(sent[line.index], 1, op, axis), block)
        assert_same_bits(collective_ops.all_gather(values[0][:1], 0, line.size, axis),
                         values[0][:1].expand(line.size, -1))  # fmt: skip


def main() -> None:
    rank, mesh = int(sys.argv[1]), Mesh.parse(sys.argv[2])
    spec = GroupSpec(HOST, sys.argv[3], SECONDS, str(mesh), *sys.argv[5:])
    group.join(spec, rank, mesh.world_size, int(sys.argv[4]))
    torch.manual_seed(0)
    for small in (1 << 20, -1):  # all by sockets, then all in shared memory
        collectives.SOCKET_BYTES = collectives.EXTRA_BYTES = small
        for shape in [*itertools.product(SIZES, SIZES), LARGE]:
            for axis in mesh.names:
                line = group.axis_group(axis)
                assert (line.size, line.index) == (mesh.size(axis), mesh.index(rank, axis))
                values = [torch.randn(shape) for _ in range(line.size)]
                check_reductions(axis, values, line)
                check_scatters(axis, values, line)
                check_moves(axis, torch.randint(100, shape), line)
        check_dtypes(mesh.names[-1])
        check_limits(mesh.names[-1])
    group.wait()
    print("ok")
    group.leave()


if __name__ == "__main__":
    main()
