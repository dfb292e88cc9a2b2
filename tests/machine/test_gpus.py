"""So many GPUs of a kind, on so many hosts."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.errors import MachineError
from lazygt.machine import Gpus, machine_of


def test_a_machine_and_a_mesh() -> None:
    gpus = Gpus.parse("8xB200")
    assert gpus == (8, "B200")
    assert gpus.mesh() == "data=8"
    assert gpus.mesh("data=2,model=4") == "data=2,model=4"
    assert Gpus.parse("8 x a100-80", 1) == (8, "a100-80")
    assert Gpus.parse("4", None, "h100") == (4, "h100")
    assert Gpus.parse("4") == (4, None)


def test_hosts_with_fewer_ranks_than_they_have_room_for() -> None:
    assert Gpus.parse("8xB200", 2).machine == "B200@4"
    assert Gpus.parse("16xb200", 2).machine == "b200"
    machine, whole = machine_of("B200@4"), machine_of("b200")
    assert machine.collectives.ranks == 4
    assert str(machine) == "b200@4"
    assert machine.collectives.local == whole.collectives.local
    assert whole.collectives.ranks == 8


@pytest.mark.parametrize(
    ("text", "hosts", "machine", "told"),
    [
        ("many", None, None, "'many' is not so many GPUs of a kind, such as 8xB200"),
        ("0xb200", None, None, "is not so many GPUs"),
        ("8xb200", None, "h100", "8xb200 names a machine, and h100 is another"),
        ("8xb300", None, None, "machine b300 is no machine, and no file"),
        ("8xb200", 3, None, "8 GPUs are not as many on each of 3 hosts"),
        ("16xb200", 1, None, "collectives.ranks is 8 on a host, and 16 GPUs on 1 would be 16"),
        ("8", 2, None, "which hosts"),
    ],
)
def test_invalid_gpu_text_is_refused(
    text: str, hosts: int | None, machine: str | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Gpus.parse(text, hosts, machine)


def test_a_mesh_of_another_number_of_ranks() -> None:
    told = "the mesh data=4 is of 4 ranks, and there are 8 GPUs: its sizes have to multiply to 8"
    with pytest.raises(ValueError, match=told):
        Gpus.parse("8xb200").mesh("data=4")


def test_no_rank_on_a_host() -> None:
    with pytest.raises(MachineError, match="b200@0 has no rank on a host"):
        machine_of("b200@0")


def program() -> None:
    x = lazygt.distribute(torch.ones(8, 1 << 22), {"data": lazygt.Shard(0)})
    for _ in range(3):
        total = lazygt.redistribute(x.sum(0), [lazygt.Replicate()])
        lazygt.current().flush()
        del total


def test_simulate_accepts_gpus_and_hosts() -> None:
    here = lazygt.simulate(program, gpus="8xb200")
    assert str(here.mesh) == "data=8"
    assert str(here.machine) == "b200"
    spread = lazygt.simulate(program, gpus="8xb200", hosts=4, mesh={"data": 8})
    assert str(spread.machine) == "b200@2"
    assert spread.computing > here.computing
    with pytest.raises(ValueError, match="give gpus, too"):
        lazygt.simulate(program, hosts=2)
