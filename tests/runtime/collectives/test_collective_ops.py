"""The collectives' kernels on real processes, and where blocks lie."""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lazygt.errors import LazyGTError
from lazygt.graph.mesh import Mesh, joined, owners, region
from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import Replicate, Shard, block_size
from lazygt.net.channel import listen_local
from lazygt.runtime.collectives import group
from lazygt.runtime.collectives.rendezvous_store import StoreServer

ROOT = Path(__file__).parents[3]
SECONDS = 600


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", ["x=2", "x=3", "x=4", "a=2,b=2"])
def test_collectives_match_reference(mesh: str, tmp_path: Path) -> None:
    with_ranks(mesh, tmp_path, [Mesh.parse(mesh).world_size])


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mesh", "hosts"),
    [("x=2", [1, 1]), ("x=4", [3, 1]), ("a=2,b=2", [2, 2]), ("a=2,b=2", [1, 3])],
)
def test_collectives_give_the_same_on_several_hosts(
    mesh: str, hosts: list[int], tmp_path: Path
) -> None:
    """Each host has a directory of its own, and an address on the loopback interface."""
    token = secrets.token_bytes(32)
    with closing(StoreServer("127.0.0.1", token)) as store:
        with_ranks(mesh, tmp_path, hosts, [store.endpoint, token.hex()])
        assert store.refused == 0


def with_ranks(mesh: str, place: Path, hosts: list[int], store: Sequence[str] = ()) -> None:
    """Run ranks of which each host has so many; all have to say that all is well."""
    script, world = str(Path(__file__).with_name("rank.py")), sum(hosts)
    host_of = [host for host, count in enumerate(hosts) for _ in range(count)]
    directories = [place / f"host{host}" for host in host_of]
    for directory in set(directories):
        directory.mkdir()
    doors = [listen_local(directories[r] / f"rendezvous{r}") for r in range(world)]
    across = [
        [store[0], f"host{host}", f"127.0.0.{host + 1}", store[1]] if store else []
        for host in host_of
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), mesh, str(directories[rank]), str(rendezvous.fd),
             *across[rank]],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[rendezvous.fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, rendezvous in enumerate(doors)
    ]  # fmt: skip
    for rendezvous in doors:
        os.close(rendezvous.fd)
    try:
        for rank in ranks:
            output, error = rank.communicate(timeout=SECONDS)
            assert (output, rank.returncode) == ("ok\n", 0), error
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_worker_alone_has_no_line() -> None:
    with pytest.raises(LazyGTError, match="alone"):
        group.axis_group("data")


def test_a_mesh_runs_through_its_last_axis_fastest() -> None:
    mesh = Mesh.parse("data=2, model=3")
    assert (mesh.world_size, str(mesh)) == (6, "data=2,model=3")
    assert [mesh.index(rank, "data") for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [mesh.index(rank, "model") for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert mesh.axis_groups("model") == [(0, 1, 2), (3, 4, 5)]
    assert mesh.axis_groups("data") == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize("text", ["data", "data=", "data=x", "=2", "data=2,data=2", "a b=2"])
def test_malformed_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mesh"):
        Mesh.parse(text)


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no axis 'model'"):
        Mesh.parse("data=2").size("model")


LABELS = (Replicate(), Shard(0), Shard(1))


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 3), (0, 2), (2, 0)])
@pytest.mark.parametrize("placement", list(itertools.product(LABELS, LABELS)), ids=str)
def test_owners_have_every_element_once(
    placement: tuple[Replicate | Shard, ...], shape: tuple[int, int]
) -> None:
    mesh = Mesh.parse("data=2,model=3")
    found = owners(mesh, placement, shape)
    assert 0 in found
    count = torch.zeros(shape, dtype=torch.int)
    for where in found.values():
        count[where] += 1
    assert bool((count == 1).all())
    whole = torch.randn(shape)
    meta = TensorMeta.of(torch.empty(shape).t().contiguous().t())
    made = joined(meta, [(where, whole[where]) for where in found.values()])
    assert torch.equal(made, whole)
    assert made.stride() == meta.stride


def test_a_dim_that_two_axes_shard_is_cut_twice() -> None:
    mesh = Mesh.parse("data=2,model=2")
    twice = (Shard(0), Shard(0))
    found = [region(mesh, twice, (7,), rank)[0] for rank in range(4)]
    assert [(s.start, s.stop) for s in found] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert block_size(7, 2, 1) == 3
