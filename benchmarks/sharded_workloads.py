"""What the benchmark of sharded sessions trains, for lazygt and for its peers alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt import GPT


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how each way to parallelise cuts it.

    Attributes:
        columns: modules that tensor parallelism cuts by their outputs, with ``*`` for any text.
        rows: those that it cuts by their inputs; each follows one of ``columns``.
        units: the modules that are gathered together when the model is fully sharded.
        steps: in a burst.
        microbatches: of a step, whose gradients are added up.
        cut: the dim of its data that is in blocks.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    units: Callable[[nn.Module], Iterable[nn.Module]]
    steps: int
    microbatches: int = 1
    cut: int = 0

    def batches(self) -> list[tuple[Tensor, ...]]:
        """Inputs and targets of each microbatch of a step."""
        parts = (one.chunk(self.microbatches) for one in self.data())
        return list(zip(*parts, strict=True))


def gpt(
    dim: int = 128, layers: int = 2, length: int = 64, batch: int = 16, steps: int = 10
) -> Workload:
    """The model of ``examples/train_gpt.py`` in its default size."""

    def data() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(100, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(
        model=lambda: GPT(100, dim, layers, 4, length),
        data=data,
        loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        columns=("blocks.*.qkv", "blocks.*.mlp.0"),
        rows=("blocks.*.out", "blocks.*.mlp.2"),
        units=lambda model: model.blocks,
        steps=steps,
    )


def mlp(width: int = 2048, layers: int = 4, batch: int = 256, steps: int = 3) -> Workload:
    """Square layers with ReLU; matmuls are most of the work, gradients most of the traffic."""

    def model() -> nn.Module:
        pairs = (m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(*pairs)

    numbers = range(0, 2 * layers, 4)
    return Workload(
        model=model,
        data=lambda: (torch.randn(batch, width), torch.randn(batch, width)),
        loss=lambda made, targets: (made - targets).square().mean(),
        optimizer=partial(torch.optim.SGD, lr=1e-2),
        columns=tuple(str(number) for number in numbers),
        rows=tuple(str(number + 2) for number in numbers),
        units=lambda model: [m for m in model if isinstance(m, nn.Linear)],
        steps=steps,
    )


class LongBlock(nn.Module):
    """Attention over a long sequence, and a network.

    Attributes:
        to_heads, to_places: exchange blocks of the sequence for heads, and back, where that is
            up to the model.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.to_heads: Callable[[Tensor], Tensor] = lambda value: value
        self.to_places: Callable[[Tensor], Tensor] = lambda value: value

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            self.to_heads(part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2))
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(self.to_places(mixed).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def long_context(dim: int = 256, layers: int = 2, heads: int = 8, length: int = 2048) -> Workload:
    """One sequence, cut along its length."""
    return Workload(
        model=lambda: nn.Sequential(*(LongBlock(dim, heads) for _ in range(layers))),
        data=lambda: (torch.randn(1, length, dim), torch.randn(1, length, dim)),
        loss=lambda made, targets: (made - targets).square().mean(),
        optimizer=partial(torch.optim.SGD, lr=1e-2),
        columns=(),
        rows=(),
        units=lambda model: model.children(),
        steps=1,
        cut=1,
    )


LONG = "2 layers of 256, 2048 places"
GPT_EXAMPLE, SMALL_GPT = "GPT example", "GPT example, small step"
DEEP_MLP = "MLP 8 x 2048"
GPT_MICROBATCHES = "GPT example, 4 microbatches"
DEEP_MICROBATCHES = "MLP 8 x 2048, 4 microbatches"
WIDE_MLP, COMPUTE = "MLP 4 x 2048", "MLP 4 x 1024, batch 2048"
MIDDLE_MLP, SMALL_MLP = "MLP 4 x 512, batch 512", "MLP 4 x 64, batch 64"

WORKLOADS = {
    GPT_EXAMPLE: gpt(),
    SMALL_GPT: gpt(64, length=32, batch=4, steps=20),
    LONG: long_context(),
    WIDE_MLP: mlp(),
    DEEP_MLP: mlp(layers=8, steps=1),
    GPT_MICROBATCHES: replace(gpt(), microbatches=4),
    DEEP_MICROBATCHES: replace(mlp(layers=8, steps=1), microbatches=4),
    COMPUTE: mlp(1024, batch=2048, steps=1),
    MIDDLE_MLP: mlp(512, batch=512, steps=5),
    SMALL_MLP: mlp(64, batch=64, steps=50),
}
#: The same, so small that a test can run them.
QUICK = {
    GPT_EXAMPLE: gpt(16, 1, length=8, batch=4, steps=2),
    SMALL_GPT: gpt(8, 1, length=4, batch=2, steps=2),
    LONG: long_context(16, 1, heads=4, length=16),
    WIDE_MLP: mlp(16, batch=8, steps=2),
    DEEP_MLP: mlp(16, batch=8, steps=2),
    GPT_MICROBATCHES: replace(gpt(16, 1, length=8, batch=8, steps=2), microbatches=4),
    DEEP_MICROBATCHES: replace(mlp(16, batch=8, steps=2), microbatches=4),
    COMPUTE: mlp(16, batch=8, steps=2),
    MIDDLE_MLP: mlp(16, batch=8, steps=2),
    SMALL_MLP: mlp(8, batch=8, steps=2),
}


def train_step(
    workload: Workload, model: nn.Module, batches: Sequence[tuple[Tensor, ...]]
) -> Callable[[], Tensor]:
    """One step of training on these microbatches; returns the loss of the last."""
    optimizer = workload.optimizer(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        for inputs, targets in batches:
            loss = workload.loss(model(inputs), targets)
            (loss if len(batches) == 1 else loss / len(batches)).backward()
        optimizer.step()
        return loss.detach()

    return step
