"""Train a GPT of any size, on any number of GPUs: an ordinary script, built on the meta device.

    python examples/large_gpt.py --layers 2 --hidden 64 --heads 4 --sequence 32 --vocabulary 100

    # 47 billion parameters on 8 GPUs, 175 billion on 1,536; nothing of that size is allocated
    lazygt simulate examples/large_gpt.py --machine b200 --data-parallel 8 --shard fsdp
    lazygt simulate examples/large_gpt.py --machine h100 --layers 96 --hidden 12288 --heads 96 \\
        --tensor-parallel 8 --pipeline 12 --data-parallel 16 --batch 32 --microbatches 2

The defaults are a model of 47 billion parameters. Words are drawn at random: this is about time
and memory. `--eager` runs the same model and loop in plain torch, on one device.
"""

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Place = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input.

    `qkv` holds query, key and value of one head after another, so that a block of its rows is a
    block of heads.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)  # each [batch, heads, sequence, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary].

    Args:
        recompute: keep only what goes into a block, and compute the block again for its backward.
    """

    def __init__(
        self, vocabulary: int, hidden: int, layers: int, heads: int, sequence: int, recompute: bool
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, hidden),
            nn.Embedding(sequence, hidden),
        )
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def initialise(module: nn.Module) -> None:
    """Give a module's own parameters their first values, as GPT-2 has them."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


# -- over the mesh -------------------------------------------------------------------------------


def megatron() -> dict[str, Any]:
    """How the weights are cut: the first of each pair of layers by its outputs, the second by its
    inputs; embeddings and logits by words."""
    import lazygt  # why: --eager does without it

    return {
        "tokens": lazygt.VocabParallel(),
        "blocks.*.qkv": lazygt.ColwiseParallel(),
        "blocks.*.out": lazygt.RowwiseParallel(),
        "blocks.*.up": lazygt.ColwiseParallel(),
        "blocks.*.down": lazygt.RowwiseParallel(),
        "head": lazygt.ColwiseParallel(),
    }


def put_on_stages(model: GPT, count: int) -> None:
    """As many blocks on each stage; the embeddings are on the first, the head on the last."""
    import lazygt  # why: see megatron

    for index in range(count):
        first, last = (len(model.blocks) * at // count for at in (index, index + 1))
        lazygt.stage(model.blocks[first:last], index)
    lazygt.stage([model.tokens, model.positions], 0)
    lazygt.stage([model.norm, model.head], count - 1)


def shard(model: GPT, args: argparse.Namespace) -> None:
    """What each rank of the axis `data` stores: all, all but a part of the optimizer's state, or a
    part of everything."""
    import lazygt  # why: see megatron

    if args.shard == "fsdp":
        policy = None
        if args.precision == "mixed":
            from torch.distributed.fsdp import MixedPrecisionPolicy  # why: few need it

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        lazygt.fully_shard(
            model, wrap=args.wrap, bucket_cap_mb=args.bucket_cap_mb,
            reshard_after_forward=not args.keep_gathered, mp_policy=policy,
        )  # fmt: skip
    else:
        lazygt.data_parallel(model)


def place_over_mesh(model: GPT, args: argparse.Namespace) -> Place:
    """Place the weights along the axes that the mesh has; how a batch is placed."""
    from torch.distributed.tensor import Shard  # why: it takes a while to load, few need it

    import lazygt  # why: see megatron

    mesh = lazygt.current().mesh
    if "model" in mesh.names:
        lazygt.parallelize_module(model, "model", megatron())
    if "pipe" in mesh.names:
        put_on_stages(model, mesh.size("pipe"))
    if "data" not in mesh.names:
        return lambda batch: batch.to("lazygt")
    shard(model, args)
    return lambda batch: lazygt.distribute(batch.to("lazygt"), {"data": Shard(0)})


# -- training ------------------------------------------------------------------------------------


def build(args: argparse.Namespace, device: str) -> tuple[GPT, Place]:
    """The model, first without memory, then where it is trained."""
    with torch.device("meta"):
        model = GPT(
            args.vocabulary, args.hidden, args.layers, args.heads, args.sequence, args.recompute
        )
    model = model.to(torch.bfloat16 if args.precision == "bf16" else torch.float32)
    model.to_empty(device=device)
    place: Place = lambda batch: batch.to(device)  # noqa: E731 - the usual one
    if device == "lazygt":
        place = place_over_mesh(model, args)
    model.apply(initialise)
    return model, place


def train(args: argparse.Namespace, device: str) -> None:
    torch.manual_seed(args.seed)
    model, place = build(args, device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    if args.shard == "optimizer" and device == "lazygt":
        import lazygt  # why: see megatron

        lazygt.shard_optimizer_state(optimizer)
    mixed = args.precision == "mixed" and args.shard != "fsdp"
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=mixed)
    rows = args.batch // args.microbatches
    loss = torch.zeros(())
    for _ in range(args.steps):
        for _ in range(args.microbatches):
            words = torch.randint(args.vocabulary, (rows, args.sequence + 1), device="cpu")
            words = place(words)
            with autocast():
                logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
            (loss / args.microbatches).backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
    print(f"last loss {loss.item():.3f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=57)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=51_200)
    parser.add_argument("--sequence", type=int, default=2048, help="words of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, of all ranks")
    parser.add_argument("--microbatches", type=int, default=1, help="a step")
    parser.add_argument("--steps", type=int, default=3, help="4 for --shard optimizer to settle")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of gradients; 0: any")
    parser.add_argument("--recompute", action="store_true", help="blocks, for their backward")
    parser.add_argument(
        "--precision", choices=["bf16", "mixed", "fp32"], default="bf16",
        help="mixed: stored in fp32, computed in bf16",
    )  # fmt: skip
    parser.add_argument("--data-parallel", type=int, default=1, help="axis data of the mesh")
    parser.add_argument("--pipeline", type=int, default=1, help="axis pipe: stages")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="axis model")
    parser.add_argument(
        "--shard", choices=["none", "optimizer", "fsdp"], default="none",
        help="what is stored in blocks along data: nothing, optimizer state, everything",
    )  # fmt: skip
    parser.add_argument("--wrap", choices=["auto", "block", "one"], default="auto")
    parser.add_argument("--bucket-cap-mb", type=float, help="MiB gathered or reduced at once")
    parser.add_argument(
        "--keep-gathered", action="store_true", help="weights, from the forward to the backward"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without lazygt, on one device")
    parser.add_argument("--device", default="cpu", help="of --eager")
    args = parser.parse_args()
    if args.batch % args.microbatches:
        parser.error(f"--batch {args.batch} is no multiple of --microbatches {args.microbatches}")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is no multiple of --heads {args.heads}")
    return args


def mesh_of(args: argparse.Namespace) -> dict[str, int] | None:
    """The ranks, by what they are for; ranks of one host share weights and activations most.

    None: one, or as many as whoever runs this says.
    """
    axes = {"data": args.data_parallel, "pipe": args.pipeline, "model": args.tensor_parallel}
    return {name: size for name, size in axes.items() if size > 1} or None


def main() -> None:
    args = parse_args()
    with contextlib.ExitStack() as stack:
        device = args.device
        if not args.eager:
            import lazygt  # why: see megatron

            # a step is one program, however long, or stages would wait at each cut
            stack.enter_context(
                lazygt.session(
                    mesh=mesh_of(args),
                    tracing=lazygt.Tracing(max_graph_nodes=10**7, max_graph_bytes=1 << 50),
                )
            )
            device = "lazygt"
        train(args, device)


if __name__ == "__main__":
    main()
