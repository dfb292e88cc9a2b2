"""What a step of a random program on a mesh may do, by kind.

On the CPU a placement is a copy. What is compared with a constant is not near it, so that the
order of a sum decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.session import current
from tests.property.programs import State, Step, inplace, keep, unary

Tensor = torch.Tensor
EDGE = 0.3137  # no result of a step


def dim_of(x: Tensor, step: Step) -> int:
    """A dim, counted from the end for odd numbers."""
    if x.dim() == 0:
        raise IndexError("no dim")
    dim = step.b % x.dim()
    return dim - x.dim() if step.number < 0 else dim


def size_of(x: Tensor, step: Step) -> int:
    return x.shape[dim_of(x, step)]


def pair(call: Callable[[Tensor, Tensor, Step], Tensor]) -> Any:
    """An action on two tensors."""

    def action(s: State, step: Step) -> None:
        x, y = s.get(step.a), s.get(step.b)
        if x is not None and y is not None:
            keep(s, call(x, y, step))

    return action


def real(call: Callable[[Tensor, Step], Tensor]) -> Any:
    """An action on one tensor of real numbers."""
    return unary(lambda x, step: call(x if x.is_floating_point() else x.double(), step))


def placements(x: Tensor, step: Step, axes: int) -> list[Any]:
    labels = [Replicate(), *map(Shard, range(x.dim()))]
    return [labels[(step.b + 3 * axis) % len(labels)] for axis in range(axes)]


def place(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is None:
        return
    if x.device.type == "cpu":
        keep(s, x.clone())
        return
    where = placements(x, step, len(current().mesh.names))
    keep(s, lazygt.distribute(x, where, fixed=step.number < 0))


def indices(x: Tensor, size: int) -> Tensor:
    """Whole numbers below ``size``, from the program's own index tensor."""
    if not size:
        raise IndexError("nothing to index")
    return x.remainder(size)


def indexed(call: Callable[[Tensor, int, Tensor], Tensor]) -> Any:
    """An action with the program's indices, below the size of a dim."""

    def action(s: State, step: Step) -> None:
        x, found = s.get(step.a), [t for t in s.tensors if t.dtype == torch.int64 and t.dim() == 1]
        if x is not None and found and x.dim():
            dim = step.b % x.dim()
            keep(s, call(x, dim, indices(found[0], x.shape[dim])))

    return action


def gathered(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    sizes = list(x.shape)
    sizes[dim] = len(index)
    return x.gather(dim, index.view(shape).expand(sizes))


def layer_norm(x: Tensor, step: Step) -> Tensor:
    weight = x.detach().new_full(x.shape[-1:], step.number)
    return F.layer_norm(x, x.shape[-1:], weight, None, 0.1)


def batch_norm(x: Tensor, step: Step) -> Tensor:
    return F.batch_norm(x, None, None, training=True, eps=0.1)


def cross_entropy(x: Tensor, step: Step) -> Tensor:
    target = x.new_ones(x.shape[0], dtype=torch.int64).cumsum(0).remainder(max(x.shape[-1], 1))
    return F.cross_entropy(x, target, reduction=["mean", "sum", "none"][step.b % 3])


def attention(x: Tensor, step: Step) -> Tensor:
    if x.dim() != 3 or not x.numel():
        raise RuntimeError("attention of a batch of sequences")
    heads = x.unsqueeze(1)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads, is_causal=step.number < 0)


def embedding(x: Tensor, dim: int, index: Tensor) -> Tensor:
    if x.dim() != 2 or dim:
        raise RuntimeError("an embedding has rows")
    return F.embedding(index, x)


def halves(x: Tensor, step: Step) -> Tensor:
    parts = x.split(max((size_of(x, step) + 1) // 2, 1), dim_of(x, step))
    return parts[-1] + 1 if step.number > 1 else parts[0]


def convolution(x: Tensor, step: Step) -> Tensor:
    if x.dim() != 3 or not x.numel():
        raise RuntimeError("a convolution over sequences")
    made = torch.arange(3.0 * 2 * x.shape[1], dtype=x.dtype, device=x.device)
    return F.conv1d(x, made.view(2, x.shape[1], 3) * EDGE, padding=1)


def descend(s: State, step: Step) -> None:
    """A backward pass, and a step along the gradients."""
    losses = [t.square().sum() for t in s.tensors if t.requires_grad]
    if not losses:
        return
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    total.backward()
    for t in s.tensors:
        if t.is_leaf and t.grad is not None:
            with torch.no_grad():
                t.add_(t.grad, alpha=-0.01)
            t.grad = None


def median(x: Tensor, step: Step) -> Tensor:
    """Of a copy: torch's own is wrong where elements share memory."""
    return x.clone(memory_format=torch.contiguous_format).median(dim_of(x, step)).values


def written(call: Callable[[Tensor, State, Step], Any]) -> Any:
    """An action that writes; torch's strides of tensors without elements are not always lazygt's,
    so whether those may be written is not told by them."""
    action = inplace(call)

    def run(s: State, step: Step) -> None:
        x = s.get(step.a)
        if x is not None and x.numel():
            action(s, step)

    return run


def written_block(x: Tensor, s: State, step: Step) -> None:
    dim, size = dim_of(x, step), size_of(x, step)
    x.narrow(dim, size // 3, size - size // 2).mul_(step.number).add_(1)


def set_by_index(x: Tensor, s: State, step: Step) -> None:
    found = [t for t in s.tensors if t.dtype == torch.int64 and t.dim() == 1]
    if found and x.dim():
        index, value = indices(found[0], x.shape[0]), s.tensors[0].detach().sum()
        x.index_put_((index,), value.to(x.dtype), step.b % 2 == 0)


def add_other(x: Tensor, s: State, step: Step) -> None:
    source = s.get(step.b)
    assert source is not None
    x.add_(source.detach().clone(), alpha=2)


POINTWISE: dict[str, Any] = {
    "add": pair(lambda x, y, step: x + y), "mul": pair(lambda x, y, step: x * y),
    "sub": pair(lambda x, y, step: x - 2 * y), "maximum": pair(lambda x, y, step: x.maximum(y)),
    "div": pair(lambda x, y, step: x / (1 + y.abs())),
    "where": pair(lambda x, y, step: torch.where(x > EDGE, x, y)),
    "lerp": pair(lambda x, y, step: x.lerp(y, 0.25)),
    "scale": unary(lambda x, step: x * step.number), "shift": unary(lambda x, step: x + step.b),
    "tanh": unary(lambda x, step: x.tanh()), "gelu": real(lambda x, step: F.gelu(x)),
    "relu": unary(lambda x, step: x.relu()), "sigmoid": unary(lambda x, step: x.sigmoid()),
    "compare": unary(lambda x, step: x > EDGE), "clamp": unary(lambda x, step: x.clamp(-2.1, 2.3)),
    "masked_fill": unary(lambda x, step: x.masked_fill(x > EDGE, step.number)),
    "clone": unary(lambda x, step: x.clone()), "detach": unary(lambda x, step: x.detach()),
}  # fmt: skip
PRODUCTS: dict[str, Any] = {
    "matmul": pair(lambda x, y, step: (x @ y).tanh()),
    "gram": real(lambda x, step: (x.transpose(-2, -1) @ x).tanh()),
    "linear": real(lambda x, step: F.linear(x, x.reshape(-1, x.shape[-1]).tanh())),
    "rows": real(lambda x, step: (x.flatten(0, -2) @ x.new_ones(x.shape[-1], 2)).sigmoid()),
    "outer": pair(lambda x, y, step: torch.einsum("...i,...j->...ij", x, y)),
    "attention": real(attention), "convolution": real(convolution),
}  # fmt: skip
REDUCTIONS: dict[str, Any] = {
    "sum": unary(lambda x, step: x.sum()),
    "mean": real(lambda x, step: x.mean()),
    "sum_dim": unary(lambda x, step: x.sum(dim_of(x, step), keepdim=step.number > 1)),
    "mean_dim": real(lambda x, step: x.mean(dim_of(x, step), keepdim=step.number > 1)),
    "amax": unary(lambda x, step: x.amax(dim_of(x, step), keepdim=step.number > 1)),
    "min": unary(lambda x, step: x.min(dim_of(x, step)).values),
    "argmax": unary(lambda x, step: x.argmax(dim_of(x, step))),
    "prod": unary(lambda x, step: x.tanh().prod(dim_of(x, step))),
    "any": unary(lambda x, step: (x > EDGE).any(dim_of(x, step))),
    "all": unary(lambda x, step: (x > -EDGE).all()),
    "norm": real(lambda x, step: (x.square() + 1).norm()),
    "norm_dim": real(lambda x, step: torch.linalg.vector_norm(x.cosh(), 3, dim_of(x, step))),
    "logsumexp": real(lambda x, step: x.logsumexp(dim_of(x, step))),
    "var": real(lambda x, step: x.var(dim_of(x, step), correction=0)),
    "std": real(lambda x, step: (x.cosh() + 1).std(correction=0)),
}
NORMALISATIONS: dict[str, Any] = {
    "softmax": real(lambda x, step: x.softmax(dim_of(x, step))),
    "log_softmax": real(lambda x, step: x.log_softmax(dim_of(x, step))),
    "cross_entropy": real(cross_entropy),
    "layer_norm": real(layer_norm), "batch_norm": real(batch_norm),
}  # fmt: skip
VIEWS: dict[str, Any] = {
    "transpose": unary(lambda x, step: x.transpose(0, -1)),
    "flat": unary(lambda x, step: x.reshape(-1)),
    "merge": unary(lambda x, step: x.flatten(0, 1)),
    "merge_last": unary(lambda x, step: x.flatten(-2)),
    "unmerge": unary(lambda x, step: x.unflatten(0, (2, -1))),
    "swap_merged": unary(lambda x, step: x.flatten(0, 1).unflatten(0, (x.shape[1], x.shape[0]))),
    "unsqueeze": unary(lambda x, step: x.unsqueeze(step.b % (x.dim() + 1))),
    "squeeze": unary(lambda x, step: x.squeeze()),
    "expand": unary(lambda x, step: x.expand(2, *x.shape)),
    "slice": unary(lambda x, step: x.narrow(dim_of(x, step), size_of(x, step) // 3,
                                            size_of(x, step) - size_of(x, step) // 3)),
    "stride": unary(lambda x, step: x[step.b % 2 :: 2]),
    "select": unary(lambda x, step: x.select(dim_of(x, step), size_of(x, step) // 2)),
    "halves": unary(halves),
    "unbind": unary(lambda x, step: x.unbind(dim_of(x, step))[-1]),
    "diagonal": unary(lambda x, step: x.diagonal()),
}  # fmt: skip
MOVING: dict[str, Any] = {
    "cat": pair(lambda x, y, step: torch.cat([x, y, x], dim_of(x, step))),
    "cat_self": unary(lambda x, step: torch.cat([x, x + 1], dim_of(x, step))),
    "stack": unary(lambda x, step: torch.stack([x, 2 * x], step.b % (x.dim() + 1))),
    "flip": unary(lambda x, step: x.flip(dim_of(x, step))),
    "roll": unary(lambda x, step: x.roll(step.a - 3, dim_of(x, step))),
    "pad": unary(lambda x, step: F.pad(x, (step.a % 3, step.b % 2), value=step.number)),
    "tril": unary(lambda x, step: x.tril(step.b - 2)),
    "repeat": unary(lambda x, step: x.repeat(2, *[1] * (x.dim() - 1))),
    "index_select": indexed(lambda x, dim, index: x.index_select(dim, index)),
    "index": indexed(lambda x, dim, index: x.transpose(0, dim)[index]),
    "gather": indexed(gathered),
    "embedding": indexed(embedding),
    "index_add": indexed(lambda x, dim, index: x.index_add(dim, index, gathered(x, dim, index))),
    "cumsum": unary(lambda x, step: x.cumsum(dim_of(x, step))),
    "cumprod": unary(lambda x, step: x.tanh().cumprod(dim_of(x, step))),
    "topk": unary(lambda x, step: x.topk(max(size_of(x, step) // 2, 1), dim_of(x, step)).values),
    "sort": unary(lambda x, step: x.sort(dim_of(x, step), step.number > 1).values),
    "order": unary(lambda x, step: x.argsort(dim=dim_of(x, step), stable=True)),
    "median": unary(median),
    "kth": unary(lambda x, step: x.kthvalue(1, dim_of(x, step)).values),
}
WRITES: dict[str, Any] = {
    "add_": written(lambda x, s, step: x.add_(step.b)),
    "mul_": written(lambda x, s, step: x.mul_(2)),
    "zero_": written(lambda x, s, step: x.zero_()),
    "add_other_": written(add_other), "block_": written(written_block),
    "index_put_": written(set_by_index),
    "row_": written(lambda x, s, step: x.select(dim_of(x, step), size_of(x, step) // 2).fill_(2)),
}  # fmt: skip
ACTIONS: dict[str, Any] = {
    **POINTWISE, **PRODUCTS, **REDUCTIONS, **NORMALISATIONS, **VIEWS, **MOVING, **WRITES,
    "place": place, "descend": descend,
}  # fmt: skip
