"""What every rank runs: all passes, with sharding in their midst."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.mesh import Mesh, Stored
from lazygt.graph.node import Graph
from lazygt.graph.verify import verify
from lazygt.passes import AFTER_SHARDING, BEFORE_SHARDING, run_passes
from lazygt.passes.sharding.cost import CPU, GPU
from lazygt.passes.sharding.shard import R, Sharding, same, shard

Stages = list[tuple[str, Graph]]


def programs(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Stored | None],
    device: str = "cpu",
    check: bool = False,
    stages: Stages | None = None,
) -> Sharding:
    """The graph of every rank, as the passes leave it; ranks that run the same have one object.

    Args:
        graph: as recorded.
        inputs: where each input lies; None: whole on every rank.
        device: the type of device that ranks compute on, for the costs of placements.
        check: verify after every pass.
        stages: gets (name of the pass, rank 0's graph after it) for each.

    Raises:
        GraphError: a graph breaks its own rules; with ``check``, naming the pass.
    """
    whole = Stored((R,) * len(mesh.names))
    tidy = run_passes(graph, BEFORE_SHARDING, check, stages)
    machine = GPU if device == "cuda" else CPU
    local = shard(tidy, mesh, [each or whole for each in inputs], machine)
    if stages is not None:
        stages.append(("shard", local.graphs[0]))
    made: list[tuple[Graph, Graph]] = []
    for rank, one in enumerate(local.graphs):
        found = next((after for before, after in made if same(before, one)), None)
        if found is None:
            found = run_passes(one, AFTER_SHARDING, check, None if rank else stages)
            verify(found)
        made.append((one, found))
    return Sharding(tuple([after for _, after in made]), local.outputs)
