"""Training steps with pipeline stages, as they are recorded, for the tests to cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard as TorchShard
from torch.utils.checkpoint import checkpoint

import lazygt
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement, Replicate, SingleRank
from lazygt.record.tensor import is_lazy, storage_of
from tests.models.zoo import GPT

WIDTH, BATCH = 8, 8


class Program(NamedTuple):
    """A recorded step, what it starts from, and how that lies on the mesh."""

    graph: Graph
    mesh: Mesh
    inputs: list[torch.Tensor]
    stored: list[Sharding]
    params: list[Any]


class MLP(nn.Module):
    """Eight layers: two, four or eight stages."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.Sequential(*(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))
            for _ in range(8)
        ))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self.layers(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def stages(self, count: int) -> list[list[nn.Module]]:
        each = len(self.layers) // count
        return [[self.layers[at : at + each]] for at in range(0, len(self.layers), each)]


class StagedGPT(GPT):
    """Embeddings on the first stage, the head, which shares their weight, on the last."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def stages(self, count: int) -> list[list[nn.Module]]:
        each = len(self.blocks) // count
        cut: list[list[nn.Module]] = [
            [self.blocks[at : at + each]] for at in range(0, len(self.blocks), each)
        ]
        cut[0] += [self.tokens, self.places]
        cut[-1] += [self.norm, self.head]
        return cut


def batch(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model is trained on, and the classes that it should tell; made on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(5)
    if isinstance(model, GPT):
        x, y = (torch.randint(0, 20, (BATCH, 6), generator=generator, device="cpu")
                for _ in range(2))  # fmt: skip
        return x, y
    x = torch.randn(BATCH, WIDTH, generator=generator, device="cpu")
    return x, torch.randint(0, WIDTH, (BATCH,), generator=generator, device="cpu")


def train_step(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    microbatches: int,
    clip: bool = False,
) -> torch.Tensor:
    """One update, its gradient summed over microbatches; gives the loss."""
    opt.zero_grad()
    losses = []
    for one, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = F.cross_entropy(model(one).flatten(0, -2), target.flatten()) / microbatches
        loss.backward()
        losses.append(loss.detach())
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    return torch.stack(losses).sum()


def put_on_stages(parts: Sequence[Sequence[nn.Module]]) -> None:
    for index, modules in enumerate(parts):
        lazygt.stage(modules, index)


def mark_for(session: lazygt.Session, mesh: Mesh) -> None:
    """From here on marks are of a mesh whose workers need not be there."""
    session.mesh = session._submitter.mesh = mesh


def recorded(
    make: Callable[[], Any],
    mesh: str,
    microbatches: int,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    clip: bool = False,
    skip: Callable[[Any], list[nn.Module]] = lambda _: [],
) -> Program:
    """The second training step of a model cut into stages, as it is recorded.

    Args:
        mesh: with an axis ``pipe``; where there is one named ``data``, the batch is cut along it.
        skip: the modules that are not put on a stage.
    """
    ranks = Mesh.parse(mesh)
    torch.manual_seed(3)
    with lazygt.session(
        launcher="inline",
        planning=lazygt.Planning(keep_stages=True),
        tracing=lazygt.Tracing(flush_on_backward=False),
    ) as s:
        alone = s.mesh
        mark_for(s, ranks)  # marks are of the mesh; what is run is run here
        model = make()
        left = skip(model)
        parts = [[m for m in part if m not in left] for part in model.stages(ranks.size("pipe"))]
        put_on_stages(parts)
        homes = {
            storage_of(t): index for index, part in reversed(list(enumerate(parts)))
            for module in part for t in (*module.parameters(), *module.buffers())
        }  # fmt: skip
        opt = optimizer(model.parameters(), lr=0.1)
        x, y = (t.to("lazygt") for t in batch(model))
        mark_for(s, alone)
        train_step(model, opt, x, y, microbatches, clip)
        for parameter, state in opt.state.items():
            moments = [t for t in state.values() if is_lazy(t) and t.dim()]
            for t in moments:
                homes[storage_of(t)] = homes.get(storage_of(parameter), -1)
        s.flush()
        values = {storage.remote.id: home for storage, home in homes.items()}
        mark_for(s, ranks)
        if "data" in ranks.names:
            x, y = (lazygt.distribute(t, {"data": TorchShard(0)}) for t in (x, y))
        loss = train_step(model, opt, x, y, microbatches, clip)
        mark_for(s, alone)
        trace, store = s.recorder.trace, s._link._worker.store  # type: ignore[attr-defined]
        inputs = [store.get(remote.id).clone() for remote in trace.entered]
        stored = [_held(ranks, values.get(remote.id, -1)) for remote in trace.entered]
        params = list(trace.params)
        s.flush()
        assert loss.isfinite().item()
        plan = s.plans()[-2]
        return Program(dict(s.stages(plan))["recorded"], ranks, inputs, stored, params)


def _held(mesh: Mesh, home: int) -> Sharding:
    def label(axis: str) -> Placement:
        return SingleRank(home) if axis == "pipe" and home >= 0 else Replicate()

    return Sharding(tuple(map(label, mesh.names)))
