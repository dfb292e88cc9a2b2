"""What the figures of a machine are the constants of, by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from lazygt.graph.collectives import ring_bytes
from lazygt.graph.mesh import Mesh, VirtualMesh
from lazygt.machine import Figure, Machine, default_machine, on_hosts
from lazygt.machine.prices import (
    axis_group_seconds,
    collective_seconds,
    link_for,
    matmul_seconds,
    moving_seconds,
)
from lazygt.simulation.node_costs import Kernel

#: 4 tiles of 100 x 10 at once, 1e9 operations a second.
GPU = default_machine("cuda").with_values({
    "matmul.tile_rows": 100, "matmul.tile_columns": 10, "matmul.units": 4, "matmul.rate.bf16": 1e9,
    "memory.bandwidth": 1e12, "memory.cache": 1e3, "memory.cache_bandwidth": 1e14,
    "pointwise.exp": 1e9, "host.launch": 0.0,
})  # fmt: skip


def test_a_matmul_computes_whole_tiles_and_whole_rounds_of_them() -> None:
    full = 2 * 4 * 100 * 10 * 50 / 1e9
    assert matmul_seconds(GPU, "bf16", 200, 20, 50) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 101, 11, 50) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 1, 1, 50) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 201, 20, 50) == pytest.approx(2 * full)
    assert matmul_seconds(GPU, "bf16", 100, 10, 50, batch=4) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 100, 10, 50, batch=5) == pytest.approx(2 * full)


def test_the_ends_of_a_tile_take_as_long_as_some_steps_of_its_sum() -> None:
    deep = replace(GPU, figures={**GPU.figures, "matmul.depth": Figure(50, "measured", "nccl")})
    assert matmul_seconds(deep, "bf16", 9, 9, 50) == 2 * matmul_seconds(GPU, "bf16", 9, 9, 50)


def test_a_thin_product_is_as_slow_as_memory() -> None:
    slow = GPU.with_values({"memory.bandwidth": 1e6})
    assert matmul_seconds(slow, "bf16", 1, 1000, 100) == pytest.approx(2 * 101_100 / 1e6)


def test_a_dtype_without_a_rate_counts_as_f32() -> None:
    assert "f64" not in default_machine("cpu").matmul.rate
    cpu = default_machine("cpu")
    f32, f64 = (matmul_seconds(cpu, dtype, 600, 640, 512) for dtype in ("f32", "f64"))
    assert f64 == f32


def test_small_operands_are_in_the_cache() -> None:
    assert moving_seconds(GPU, 1000) == pytest.approx(1000 / 1e14)
    assert moving_seconds(GPU, 1001) == pytest.approx(1001 / 1e12)


def test_arithmetic_or_memory_decides_whichever_takes_longer() -> None:
    assert Kernel((), (("exp", 1000),), 8000).seconds(GPU) == pytest.approx(1e-6)
    assert Kernel((), (("exp", 1),), 8_000_000).seconds(GPU) == pytest.approx(8e-6)


def test_a_carrier_may_be_another_one_for_large_payloads() -> None:
    new = {
        "collectives.local[0].latency": 1.0,
        "collectives.local[0].bandwidth": 10.0,
        "collectives.local[0].up_to": 100.0,
        "collectives.local[1].latency": 5.0,
        "collectives.local[1].each": 2.0,
        "collectives.local[1].bandwidth": 100.0,
    }
    figures = {**GPU.figures, **{k: Figure(v, "measured", "nccl") for k, v in new.items()}}
    machine = replace(GPU, figures=figures)
    assert [link.up_to for link in machine.collectives.local] == [100.0, float("inf")]
    assert link_for(machine.collectives.local, 100).latency == 1.0
    assert collective_seconds(machine, "all_gather", 200, 2) == 1.0 + 100 / 10
    assert collective_seconds(machine, "all_gather", 400, 4) == 5.0 + 2 * 2.0 + 300 / 100
    assert collective_seconds(machine, "all_gather", 400, 1) == 0.0


# -- several hosts -----------------------------------------------------------------------------


def on_mesh(text: str, hosts: list[int], invariant: int | None = None) -> Machine:
    mesh = VirtualMesh.of(Mesh.parse(text), invariant)
    return on_hosts(default_machine("cpu"), mesh, hosts)


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3, 4), repeat=3)))
def test_inner_axes_lie_on_a_host_first(sizes: tuple[int, int, int]) -> None:
    """Ranks run through the last axis fastest: its lines lie within a host whose ranks are some of
    them; and an axis leads between hosts only where those within it fill a host.
    """
    mesh = Mesh(("a", "b", "c"), sizes)
    for here in (size for size in range(1, mesh.world_size + 1) if mesh.world_size % size == 0):
        for at, axis in enumerate(mesh.names):
            inner = math.prod(sizes[at:])
            if here % inner == 0:
                lines = mesh.axis_groups(axis)
                assert all(len({rank // here for rank in line}) == 1 for line in lines)
            hosts = [here] * (mesh.world_size // here)
            crosses = axis in on_mesh(str(mesh), hosts).shares
            assert crosses == any(
                len({rank // here for rank in line}) > 1 for line in mesh.axis_groups(axis)
            )


def test_axis_between_hosts_has_network_cost() -> None:
    machine = on_mesh("data=2,model=2", [2, 2])
    assert machine.shares == {"data": 0.5}
    assert machine.along("model") is machine
    assert machine.along("data") is machine.along("data")
    cpu = default_machine("cpu")
    (network,) = cpu.collectives.network
    for kind, nbytes in (("all_reduce", 8 << 20), ("all_gather", 100), ("all_to_all", 1 << 20)):
        inside = collective_seconds(machine.along("model"), kind, nbytes, 2)
        assert inside == collective_seconds(cpu, kind, nbytes, 2)
        between = collective_seconds(machine.along("data"), kind, nbytes, 2)
        sent = ring_bytes(kind, nbytes, 2)
        assert between == pytest.approx(network.latency + sent / network.bandwidth)
        assert between > inside


def test_a_ring_goes_between_hosts_once_for_each_rank_that_it_has_there() -> None:
    """As of a line of the mesh that is simulated."""
    machine = on_mesh("x=8", [4, 4])
    line = machine.along("x")
    for kind in ("all_reduce", "all_to_all"):
        simulated = axis_group_seconds(machine, kind, 8 << 20, range(8))
        assert collective_seconds(line, kind, 8 << 20, 8) == simulated
    lonely, (network,) = on_mesh("x=8", [1] * 8).along("x"), machine.collectives.network
    sent = ring_bytes("all_reduce", 8 << 20, 8)
    start = network.latency + 6 * network.each
    once = collective_seconds(lonely, "all_reduce", 8 << 20, 8)
    assert once == pytest.approx(start + sent / network.bandwidth)
    four = collective_seconds(line, "all_reduce", 8 << 20, 8)
    assert four == pytest.approx(start + sent / (4 * network.bandwidth))


def test_hosts_of_different_sizes_count_as_the_worst_line_does() -> None:
    assert on_mesh("a=2,b=2", [3, 1]).shares == {"a": 0.5, "b": 0.5}
    assert on_mesh("x=4", [3, 1]).shares == {"x": 0.75}


def test_on_one_host_nothing_changes() -> None:
    assert on_mesh("data=2,model=2", [4]) is default_machine("cpu")


def test_virtual_ranks_are_where_their_workers_are() -> None:
    assert on_mesh("data=2,model=2", [2, 2], 4).shares == {"data": 0.5}


def test_hosts_of_other_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hosts of \[2, 1\] workers are not those of the mesh"):
        on_mesh("x=4", [2, 1])
