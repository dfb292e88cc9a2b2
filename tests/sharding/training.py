"""One training loop for all placements: what `tests.models.zoo` trains, with marks on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from tests.models import zoo

STEPS = 5

#: Column by column, then row by row: what Megatron does to each pair of linear layers.
MEGATRON: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "mlp": {
        "0.*": {"model": Shard(0)},
        "2.weight": {"model": Shard(1)},
    },
    "gpt": {
        "blocks.*.qkv.*": {"model": Shard(0)},
        "blocks.*.proj.weight": {"model": Shard(1)},
        "blocks.*.mlp.0.*": {"model": Shard(0)},
        "blocks.*.mlp.2.weight": {"model": Shard(1)},
    },
}


def eager(name: str, optimizer: str = "sgd") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and final weights without lazygt."""
    return zoo.train(name, optimizer, zoo.batches(name, STEPS), "cpu")


def train(
    name: str,
    mesh: Mapping[str, int],
    optimizer: str = "sgd",
    model: nn.Module | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], lazygt.Session]:
    """The same in the session that is open: the batch is cut along ``data``, if the mesh has
    such an axis, the weights along ``model``.

    Args:
        model: None: it is drawn by the session's workers.
    """
    torch.manual_seed(3)
    if model is None:
        model = zoo.MODELS[name][0]()
    if "model" in mesh:
        lazygt.parallelize_module(model, None, MEGATRON[name])
    opt = zoo.OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    losses = []
    for x, y in zoo.batches(name, STEPS):
        x, y = _placed(x, mesh), _placed(y, mesh)
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        losses.append(loss.detach())
    state = [t.detach().cpu() for t in model.state_dict().values()]
    return [loss.cpu() for loss in losses], state, lazygt.current()


def _placed(batch: torch.Tensor, mesh: Mapping[str, int]) -> torch.Tensor:
    lazy = batch.to("lazygt")
    return lazygt.distribute(lazy, {"data": Shard(0)}) if "data" in mesh else lazy
