"""Text written token by token, each one read before the next: with a cache of fixed size, which is
written at a position, and with one that grows.

The peer is eager torch in the same run, on one thread. Counted besides: new plans after the third
token.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lazygt
from benchmarks.harness import CORES, Report, interleave, parser, pin, ratio
from benchmarks.models import GPT, Block, GPTSize

COLUMNS = ["cache", "eager ms a token", "lazygt ms a token", "ratio", "new plans after 3 tokens"]
#: Tokens after which every plan of a cache of fixed size is known.
KNOWN = 3


class Decoder:
    """A GPT that keeps keys and values of what it has read.

    Args:
        grows: the cache has as many places as there are tokens, and not as many as may come.
    """

    def __init__(self, device: str, size: GPTSize, grows: bool) -> None:
        torch.manual_seed(0)
        self.size, self.grows = size, grows
        self.model: Any = GPT(size).to(device).eval()
        rows = torch.ones(size.length, size.length, dtype=torch.bool, device="cpu").tril()
        self.seen = rows.to(device)
        self.first = torch.zeros(1, 1, dtype=torch.long, device="cpu").to(device)
        self.start()

    def start(self) -> None:
        """Forget the text."""
        size, device = self.size, self.first.device
        shape = (1, size.heads, 0 if self.grows else size.length, size.dim // size.heads)
        self.cache = [
            [torch.zeros(shape, device=device) for _ in range(2)] for _ in range(size.layers)
        ]

    def written(self, count: int, seen: Callable[[int], None] = lambda position: None) -> list[int]:
        """So many tokens of a new text, the likeliest each time."""
        self.start()
        token, text = self.first, []
        with torch.no_grad():
            for position in range(count):
                token = self._after(token, position).argmax(-1)
                text.append(int(token.item()))
                seen(position)
        return text

    def _after(self, token: Tensor, position: int) -> Tensor:
        model = self.model
        x = model.tokens(token) + model.positions.weight[position]
        for block, kept in zip(model.blocks, self.cache, strict=True):
            x = self._through(block, kept, x, position)
        return model.head(model.norm(x))  # type: ignore[no-any-return]

    def _through(self, block: Block, kept: list[Tensor], x: Tensor, position: int) -> Tensor:
        size = self.size
        qkv = block.qkv(block.norm1(x)).view(1, 3, size.heads, 1, size.dim // size.heads)
        query, *new = qkv.unbind(1)
        for which, value in enumerate(new):
            if self.grows:
                kept[which] = torch.cat([kept[which], value], 2)
            else:
                kept[which][:, :, position] = value[:, :, 0]
        mask = None if self.grows else self.seen[position : position + 1]
        mixed = F.scaled_dot_product_attention(query, kept[0], kept[1], attn_mask=mask)
        x = x + block.out(mixed.reshape(1, 1, size.dim))
        return x + block.down(F.gelu(block.up(block.norm2(x))))


def timed(decoder: Decoder, count: int) -> Callable[[], float]:
    """Milliseconds a token."""

    def run() -> float:
        begin = time.perf_counter()
        decoder.written(count)
        return (time.perf_counter() - begin) * 1e3 / count

    return run


def row(name: str, grows: bool, args: argparse.Namespace) -> tuple[str, ...]:
    """One kind of cache, measured."""
    size = GPTSize(dim=args.dim, length=args.tokens)
    eager = Decoder("cpu", size, grows)
    plans: list[int] = []
    with lazygt.session(workers=lazygt.Workers(1, threads=1), launcher=args.launcher) as s:
        if args.pin:
            pin(s.worker_pids)
        ours = Decoder("lazygt", size, grows)
        text = ours.written(args.tokens, lambda _: plans.append(s.stats()["plans_built"]))
        if text != eager.written(args.tokens):
            raise RuntimeError(f"cache {name}: another text than eager torch writes")
        runs = {"eager": timed(eager, args.tokens), "lazygt": timed(ours, args.tokens)}
        figures = interleave(runs, args.rounds)
    peer, lazy = figures["eager"], figures["lazygt"]
    new = plans[-1] - plans[KNOWN - 1]
    times = (f"{peer.median:.2f}", f"{lazy.median:.2f}", f"{ratio(lazy, peer):.2f}")
    return (name, *times, str(new))


def measure(args: argparse.Namespace) -> Report:
    name = "generation" if len(CORES) > 1 else "generation on one core"
    report = Report(name, "Text token by token, each read at once, batch 1", COLUMNS)
    for name, grows in (("of fixed size", False), ("that grows", True)):
        report.add(*row(name, grows, args))
    report.remarks.append("the same text as eager torch's; the new plans are those of the first")
    return report


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--launcher", choices=["process", "inline"], default="process")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
