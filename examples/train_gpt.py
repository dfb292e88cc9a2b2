"""Train a character-level GPT on real English text, and let it write.

    python examples/train_gpt.py --steps 500
    python examples/train_gpt.py --text shakespeare.txt --dim 256 --layers 4 --heads 4
    python examples/train_gpt.py --checkpoint run/       # kill it, start it again: the same weights
    python examples/train_gpt.py --mesh data=2,model=2   # batch and weights cut over 4 workers
    python examples/train_gpt.py --mesh data=2 --fsdp    # all weights stored in blocks

Without `--text` it reads the language reference that every Python carries (`pydoc_data.topics`).
The model and the loop are plain torch; `--eager` runs them without lazygt.
"""

import argparse
import contextlib
import pydoc_data.topics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input.

    `qkv` holds query, key and value of one head after another, so that a block of its rows is a
    block of heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)  # each [batch, heads, length, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class Corpus:
    """A text as numbers, from which batches are drawn at random places."""

    def __init__(self, text: str, length: int, seed: int) -> None:
        self.characters = sorted(set(text))
        number = {character: index for index, character in enumerate(self.characters)}
        self.data = torch.tensor([number[character] for character in text], device="cpu")
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        last = len(self.data) - self.length
        starts = torch.randint(last, (size, 1), generator=self.generator, device="cpu")
        windows = self.data[starts + torch.arange(self.length + 1, device="cpu")]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[token] for token in tokens)


def megatron() -> dict[str, Any]:
    """How the weights are cut: the first of each pair of layers by its outputs, the second by its
    inputs, so that a block sums over the workers twice."""
    import lazygt  # why: --eager does without it

    return {
        "blocks.*.qkv": lazygt.ColwiseParallel(),
        "blocks.*.out": lazygt.RowwiseParallel(),
        "blocks.*.mlp.0": lazygt.ColwiseParallel(),
        "blocks.*.mlp.2": lazygt.RowwiseParallel(),
    }


class Training:
    """The model with everything that a checkpoint must remember.

    Args:
        session: None: all is computed here, in eager torch.
    """

    def __init__(self, args: argparse.Namespace, corpus: Corpus, session: Any) -> None:
        self.args, self.corpus, self.session, self.step = args, corpus, session, 0
        self.device = device = "cpu" if session is None else "lazygt"
        self.model = GPT(len(corpus.characters), args.dim, args.layers, args.heads, args.length)
        self.place: Callable[[Tensor], Tensor] = lambda batch: batch.to(device)
        if args.mesh and not args.eager:
            self.cut()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, args.schedule_steps or args.steps, eta_min=args.lr / 10
        )

    def go_on(self) -> None:
        """Be where a run was that was killed; without `--checkpoint` there is none."""
        self.session.register(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            batches=self.corpus.generator,
        )
        saved = self.session.resume()
        self.step = saved.step
        if saved.path is not None:
            print(f"resumed at step {self.step} from {saved.path}")

    def cut(self) -> None:
        """Place weights along the mesh's axis `model`, batches along `data`, with --fsdp all
        weights along `data` as well."""
        from torch.distributed.tensor import Shard  # why: it takes a while to load, few need it

        import lazygt  # why: see megatron

        axes = lazygt.current().mesh.names
        if "model" in axes:
            lazygt.parallelize_module(self.model, "model", megatron())
        if self.args.fsdp:
            lazygt.fully_shard(self.model)
        if "data" in axes:
            self.place = lambda batch: lazygt.distribute(batch.to("lazygt"), {"data": Shard(0)})

    def one_step(self) -> Tensor:
        inputs, targets = self.corpus.batch(self.args.batch_size)
        logits = self.model(self.place(inputs))
        loss = F.cross_entropy(logits.flatten(0, 1), self.place(targets).flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.detach()

    def run(self) -> None:
        tokens = self.args.batch_size * self.args.length
        since, start = self.step, time.perf_counter()
        bar = tqdm(total=self.args.steps, initial=self.step, unit="step", disable=None)
        with bar:  # disable=None: a progress bar only on a terminal
            while self.step < self.args.steps:
                loss = self.one_step()
                bar.update()
                if self.session is not None:
                    self.session.checkpoint(self.step)
                if self.step % self.args.log_every and self.step != self.args.steps:
                    continue
                value = loss.item()  # waits for the worker, so not at every step
                rate = (self.step - since) * tokens / (time.perf_counter() - start)
                tqdm.write(f"step {self.step:5d}  loss {value:.6f}  {rate:,.0f} tokens/s")
                since, start = self.step, time.perf_counter()

    @torch.no_grad()
    def sample(self, count: int) -> str:
        """Write `count` characters after the text's first window.

        The window keeps its length, so that every character is the same plan.
        """
        window = self.corpus.data[None, : self.args.length].to(self.device)
        written: list[int] = []
        for _ in range(count):
            likely = F.softmax(self.model(window)[:, -1] / self.args.temperature, dim=-1)
            token = torch.multinomial(likely, 1)
            window = torch.cat([window[:, 1:], token], dim=1)
            written.append(int(token.item()))
        return self.corpus.decode(written)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file to learn from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schedule-steps", type=int, help="length of the schedule (--steps)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters in a window")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder; a run that was killed goes on from there"
    )
    parser.add_argument("--workers", type=int)
    parser.add_argument("--mesh", help="axes data and model with their workers: data=2,model=2")
    parser.add_argument("--fsdp", action="store_true", help="store weights in blocks along data")
    parser.add_argument("--launcher", choices=["process", "inline"], default="process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without lazygt, for comparison")
    args = parser.parse_args()
    if args.eager and args.checkpoint is not None:
        parser.error("--checkpoint is a session's: leave --eager out")
    axes = [axis.partition("=")[0].strip() for axis in (args.mesh or "").split(",") if axis]
    if not set(axes) <= {"data", "model"}:
        parser.error(f"--mesh {args.mesh}: this program cuts along axes data and model alone")
    if args.fsdp and "data" not in axes:
        parser.error("--fsdp needs workers to cut the weights over: --mesh data=2")
    return args


def read_text(path: Path | None) -> str:
    return path.read_text() if path else "\n".join(pydoc_data.topics.topics.values())


def train(args: argparse.Namespace, corpus: Corpus, session: Any) -> None:
    torch.manual_seed(args.seed)
    training = Training(args, corpus, session)
    if session is not None:
        training.go_on()
    try:
        training.run()
    except KeyboardInterrupt:
        print(f"stopped at step {training.step}")
    if session is not None and session.checkpoint(training.step, now=True):
        print(f"saved step {training.step} to {session.checkpoints[-1].path}")
    if args.sample:
        print("-" * 40, training.sample(args.sample), "-" * 40, sep="\n")


def main() -> None:
    args = parse_args()
    corpus = Corpus(read_text(args.text), args.length, args.seed)
    print(f"{len(corpus.data):,} characters, {len(corpus.characters)} different ones")
    with contextlib.ExitStack() as stack:
        session = None
        if not args.eager:
            import lazygt

            session = stack.enter_context(
                lazygt.session(
                    workers=args.workers,
                    mesh=args.mesh,
                    launcher=args.launcher,
                    checkpoint=args.checkpoint,
                    # compiled code rounds otherwise, and comes when it is ready
                    compile="off" if args.checkpoint else None,
                )
            )
        train(args, corpus, session)
        if session is not None:
            stats = session.stats()
            print(
                f"{stats['plans_built']} plans built, {stats['plan_hits']:,} replayed, "
                f"{stats['messages_sent']:,} messages sent"
            )


if __name__ == "__main__":
    main()
