"""One rank of a group in which others may die: does what it is told, line by line.

    python rank_that_goes_on.py RANK MESH DIRECTORY NUMBER STORE HOST ADDRESS TOKEN

    add 1000    all-reduces so many elements, and prints the first and the last of the sum
    renew 1     leaves the group, and meets the others in the one of this number

What fails is printed as ``lost`` and the reason; the rank has then left its group.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lazygt.graph.mesh import Mesh
from lazygt.net.channel import listen_local
from lazygt.net.sockets import GroupSpec
from lazygt.runtime.collectives import collective_ops, group
from lazygt.runtime.collectives.backends import HOST

SECONDS = 60.0


def add(count: str, rank: int) -> str:
    value = torch.full((int(count),), float(rank + 1))
    value[-1] = 10.0
    result = collective_ops.all_reduce(value, "sum", "x")
    return f"{result[0].item():g} {result[-1].item():g}"


def renew(number: str, rank: int) -> str:
    group.renew(int(number))
    group.wait()
    return f"joined {rank}"


def main() -> None:
    rank, mesh, place, number = int(sys.argv[1]), Mesh.parse(sys.argv[2]), *sys.argv[3:5]
    door = Path(place) / f"rendezvous{rank}"
    door.unlink(missing_ok=True)
    spec = GroupSpec(HOST, place, SECONDS, str(mesh), *sys.argv[5:])
    group.join(spec, rank, mesh.world_size, listen_local(door).fd, int(number))
    group.wait()
    print("joined", rank, flush=True)
    for line in sys.stdin:
        op, word = line.split()
        try:
            print({"add": add, "renew": renew}[op](word, rank), flush=True)
        except (OSError, RuntimeError) as error:
            group.abandon(str(error))
            print("lost", error, flush=True)
    group.leave()


if __name__ == "__main__":
    main()
