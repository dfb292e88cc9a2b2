"""A row of a table as a lazygt program: a transformer of few layers that trains one step.

Ordinary torch, with the layouts of ``lazygt.parallel``. It is recorded and never computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lazygt
from benchmarks.foresight_rows import PRECISIONS, Row
from lazygt import Replicate, Shard

#: What selective recomputation keeps of a block whose attention is one kernel, beside every second
#: product of matrices (torchtitan's policy).
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


class Block(nn.Module):
    """Attention and a network, each added to its input.

    The packed weight holds of each group of heads the queries, the key and the value, so that a
    block of its rows is a block of groups.
    """

    def __init__(self, row: Row, future: Tensor) -> None:
        super().__init__()
        model, self.row = row.model, row
        self.head = model.hidden // model.heads
        self.group = model.heads // model.kv_heads
        norm = nn.RMSNorm if model.gated else nn.LayerNorm
        linear = partial(nn.Linear, bias=not model.gated)
        self.norm1, self.norm2 = norm(model.hidden), norm(model.hidden)
        self.qkv = linear(model.hidden, model.kv_heads * (self.group + 2) * self.head)
        self.out = linear(model.hidden, model.hidden)
        self.up, self.down = linear(model.hidden, model.ffn), linear(model.ffn, model.hidden)
        self.gate = linear(model.hidden, model.ffn) if model.gated else None
        self.future = future

    def forward(self, x: Tensor) -> Tensor:
        if self.row.recompute == "full":
            return checkpoint(self._block, x, use_reentrant=False)
        if self.row.recompute == "selective" and self.row.attention == "fused":
            contexts = partial(create_selective_checkpoint_contexts, _every_second_product())
            return checkpoint(self._block, x, use_reentrant=False, context_fn=contexts)
        return self._block(x)

    def _block(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.out(self._attention(self.norm1(x))))
        return x + self._dropped(self._network(self.norm2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        """Dropout's work and what it keeps, without its random numbers: of blocks lazygt would draw
        those of the whole value, where others draw a rank's own."""
        rate = self.row.model.dropout
        return x.masked_fill(x.detach() < rate, 0) * (1 / (1 - rate)) if rate else x

    def _network(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head)).permute(0, 2, 3, 1, 4)
        query, key, value = heads.split((self.group, 1, 1), 2)  # [batch, groups, , sequence, head]
        if self.row.model.gated:
            query, key = rotated(query), rotated(key)
        if self.row.recompute == "selective" and self.row.attention == "unfused":
            mixed = checkpoint(self._core, query, key, value, use_reentrant=False)
        else:
            mixed = self._core(query, key, value)
        return mixed.flatten(1, 2).transpose(1, 2).flatten(2)

    def _core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.row.attention == "fused":
            shared = (each.expand_as(query).flatten(1, 2) for each in (key, value))
            mixed = F.scaled_dot_product_attention(query.flatten(1, 2), *shared, is_causal=True)
            return mixed.unflatten(1, (-1, self.group))
        scores = (query / self.head**0.5) @ key.transpose(-1, -2)
        weights = self._dropped(scores.masked_fill(self.future, -1e4).softmax(-1))
        return weights @ value


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pairs of features as complex numbers, each times one of its place."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turns = torch.ones(pairs.shape[-2:], dtype=pairs.dtype)
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Transformer(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, row: Row, layers: int) -> None:
        super().__init__()
        model, self.row = row.model, row
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        future = torch.ones(model.sequence, model.sequence, dtype=torch.bool).triu(1)
        self.blocks = nn.ModuleList(Block(row, future) for _ in range(layers))
        self.norm = (nn.RMSNorm if model.gated else nn.LayerNorm)(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.row.sequence_parallel:
            x = lazygt.distribute(x, {"model": Shard(1)})
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _every_second_product() -> Callable[..., CheckpointPolicy]:
    """Attention is kept, and every second product of matrices."""
    products = 0

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        nonlocal products
        if op in _PRODUCTS:
            products += 1
        kept = op in _KEPT or (op in _PRODUCTS and products % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# -- where it lies ---------------------------------------------------------------------------------


def mesh_of(row: Row) -> dict[str, int]:
    """The ranks of one stage; tensor parallel ones are neighbours."""
    if row.sharding == "hsdp":
        return {"replica": row.hosts, "data": row.dp // row.hosts, "model": row.tp}
    return {"data": row.dp, "model": row.tp}


def batch_axes(row: Row) -> dict[str, Shard]:
    """Along which axes samples are cut."""
    return {axis: Shard(0) for axis in mesh_of(row) if axis != "model"}


def _laid_out(model: nn.Module, row: Row) -> None:
    if row.tp > 1:
        across = {"input_layouts": Shard(1)} if row.sequence_parallel else {}
        onto = {"output_layouts": Shard(1)} if row.sequence_parallel else {}
        column, back = lazygt.ColwiseParallel(**across), lazygt.RowwiseParallel(**onto)
        lazygt.parallelize_module(model, "model", {
            "tokens": lazygt.RowwiseParallel(input_layouts=Replicate(), **onto),
            "blocks.*.qkv": column, "blocks.*.out": back, "blocks.*.up": column,
            "blocks.*.down": back, "head": column,
            **({"blocks.*.gate": column} if row.model.gated else {}),
        })  # fmt: skip
    if row.sharding in ("fsdp", "hsdp"):
        dtype = getattr(torch, PRECISIONS[row.precision])
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        lazygt.fully_shard(model, "data", mp_policy=policy)


class Training:
    """One step after another of a transformer of few layers.

    Weights that are no blocks are used in the row's precision and have float32 copies that the
    optimizer updates, as in Megatron.
    """

    def __init__(self, row: Row, layers: int) -> None:
        self.row, model = row, Transformer(row, layers)
        blocks = row.sharding in ("fsdp", "hsdp")
        self.model = model if blocks else model.to(getattr(torch, PRECISIONS[row.precision]))
        _laid_out(self.model, row)
        self.weights = list(model.parameters())
        self.copied = not blocks and row.precision != "fp32"
        self.updated = (
            [self._copy(weight) for weight in self.weights] if self.copied else self.weights
        )
        self.optimizer = torch.optim.AdamW(self.updated, fused=True)
        if row.sharding == "zero1" and row.dp > 1 and not self.copied:
            lazygt.shard_optimizer_state(self.optimizer)
        self._begin()

    def _copy(self, weight: Tensor) -> Tensor:
        copy = weight.detach().float()
        if self.row.sharding == "zero1" and self.row.dp > 1:
            placed = dict(zip(mesh_of(self.row), weight.placements, strict=True))
            whole = placed["model"] != Shard(0)
            copy = lazygt.distribute(
                copy, {**placed, "data": Shard(0 if whole else weight.dim() - 1)}
            )
        return copy.requires_grad_()

    def _begin(self) -> None:
        """The optimizer's state, as it is after a step."""
        for tensor in self.updated:
            tensor.grad = torch.zeros_like(tensor)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> Tensor:
        """Of one microbatch."""
        row = self.row
        samples = row.dp * row.microbatch
        tokens = torch.randint(row.model.vocabulary, (samples, row.model.sequence + 1))
        tokens = lazygt.distribute(tokens, batch_axes(row))
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step(self, microbatches: int) -> None:
        """Gradients of some microbatches, and an update."""
        self.optimizer.zero_grad()
        for _ in range(microbatches):
            (self.loss() / microbatches).backward()
        if self.copied:
            for weight, copy in zip(self.weights, self.updated, strict=True):
                copy.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        if self.copied:
            with torch.no_grad():
                for weight, copy in zip(self.weights, self.updated, strict=True):
                    weight.copy_(copy)
