"""Planning for 1,024 ranks: the client's time and memory beyond recording, and what is told of it.

A GPT with tensor-parallel layers in pipeline stages trains on a batch that is cut along data, in a
session that has no workers. The step is planned twice: the first one makes the optimizer's state.
CPU time is that of flushes, from the recorded step to plans that are ready to be sent, and of the
simulation of a step. Memory is by how much the resident peak exceeds what was there before the step
was planned.
"""

import argparse
import gc
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import lazygt
from benchmarks.harness import Report, parser
from lazygt.graph.mesh import Mesh
from lazygt.settings import grouped
from lazygt.simulation import DRY, LiveValue, predict

MESH = "data=32,model=8,stage=4"
MACHINE = "h100"
#: name, layers, microbatches: 10,000 recorded nodes and some
CASES = (("one microbatch", 56, 1), ("four microbatches", 20, 4))
SECONDS, MEGABYTES, JSON_BYTES = 2.0, 200.0, 1e6
DIM, HEADS, LENGTH, VOCABULARY = 4096, 32, 2048, 51_200


class Block(nn.Module):
    """A layer whose packed weight has query, key and value of one head after another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, 3, -1))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Cut into stages of as many layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def placed(model: GPT, stages: int) -> GPT:
    """Layers cut as in Megatron along ``model``, and put on stages."""
    column, row = lazygt.ColwiseParallel(), lazygt.RowwiseParallel()
    styles = {"qkv": column, "out": row, "up": column, "down": row}
    lazygt.parallelize_module(
        model.blocks, "model", {f"*.{name}": style for name, style in styles.items()}
    )
    share = len(model.blocks) // stages
    for at in range(stages):
        parts: list[nn.Module] = [model.blocks[at * share : (at + 1) * share]]
        parts += [model.tokens, model.positions] if at == 0 else []
        parts += [model.norm, model.head] if at == stages - 1 else []
        lazygt.stage(parts, at, "stage")
    return model


def training_step(layers: int, microbatches: int, mesh: str) -> Callable[[], None]:
    """A step whose optimizer updates one tensor after another; nothing is flushed in it."""
    ranks = Mesh.parse(mesh)
    model = placed(GPT(layers), ranks.size("stage"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    rows = ranks.size("data")

    def step() -> None:
        for _ in range(microbatches):
            tokens = torch.zeros(rows, LENGTH + 1, dtype=torch.long)
            tokens = lazygt.distribute(tokens, {"data": Shard(0)})
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass
class Figures:
    """What planning took.

    Attributes:
        flushes: seconds of CPU time of each step's flush; those with plans that are there last.
        simulating: seconds of CPU time of the prediction.
        grown: MB by which the resident peak exceeds what was there before the steady step was
            planned, simulation and all.
    """

    nodes: int = 0
    planned: int = 0
    classes: int = 0
    flushes: list[float] = field(default_factory=list)
    simulating: float = 0.0
    grown: float = 0.0
    json_bytes: int = 0

    @property
    def steady(self) -> float:
        """Seconds of CPU time that the steady step takes beyond recording."""
        return self.flushes[1] + self.simulating


def measured(layers: int, microbatches: int, mesh: str = MESH) -> Figures:
    """Three steps, of which two are planned."""
    figures = Figures()
    whole = {"flush_on_backward": False, "max_graph_nodes": 20_000}  # one plan a step
    settings = {**DRY, **whole, "machine": MACHINE, "device": "cuda", "mesh": mesh}
    with lazygt.session(**grouped(settings)) as s:
        living = LiveValue(s)
        step = training_step(layers, microbatches, mesh)
        s.flush()
        for number in range(3):
            before = s.stats()["ops_recorded"]
            step()
            figures.nodes = s.stats()["ops_recorded"] - before
            if number == 1:
                gc.collect()
                began = forget_peak()
            with cpu_seconds(figures.flushes):
                s.flush()
        spent: list[float] = []
        with cpu_seconds(spent):
            prediction = predict(s, s.machine, living)
            text = json.dumps(prediction.as_json())
        figures.simulating = spent[0]
        figures.grown = status("VmHWM") - began
        plans = {id(plan): plan for plan in s.entries()[-1].plans}.values()
        figures.classes, figures.planned = len(plans), sum(len(plan.graph.nodes) for plan in plans)
        figures.json_bytes = len(text)
    return figures


@contextmanager
def cpu_seconds(into: list[float]) -> Iterator[None]:
    """Add the CPU time of a block to a list."""
    start = time.process_time()
    yield
    into.append(time.process_time() - start)


def forget_peak() -> float:
    """Begin a new VmHWM; what is resident now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
    return status("VmRSS")


def status(name: str) -> float:
    """A figure of this process in MB (1e6 bytes)."""
    match = re.search(rf"(?m)^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 / 1e6 if match else float("nan")


def measure(args: argparse.Namespace) -> Report:
    columns = ["step", "recorded nodes", "classes", "their nodes", "first step s", "steady step s",
               "simulated s", "beyond recording s", "MB", "JSON bytes"]  # fmt: skip
    title = f"Planning and simulating a step for {MESH} (CPU time, the least of {args.rounds})"
    report = Report("planning", title, columns)
    for name, layers, microbatches in CASES:
        rounds = [alone(layers, microbatches) for _ in range(args.rounds)]
        best = min(rounds, key=lambda figures: figures.steady)
        report.add(
            f"{layers} layers, {name}", f"{best.nodes:,}", str(best.classes), f"{best.planned:,}",
            f"{min(figures.flushes[0] for figures in rounds):.2f}", f"{best.flushes[1]:.2f}",
            f"{best.simulating:.2f}", f"{best.steady:.2f}",
            f"{max(figures.grown for figures in rounds):.0f}", f"{best.json_bytes:,}",
        )  # fmt: skip
        met = best.steady <= SECONDS and best.grown <= MEGABYTES and best.json_bytes <= JSON_BYTES
        report.remarks.append(f"{name}: {'met' if met else 'MISSED'}")
    report.remarks.append(
        f"aim: a steady step in {SECONDS:g} s beyond recording, {MEGABYTES:g} MB, "
        f"{JSON_BYTES:,.0f} bytes of JSON; each round is a process of its own"
    )
    return report


def alone(layers: int, microbatches: int) -> Figures:
    """The figures of a new process, which has planned nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(measured, layers, microbatches).result()


def main() -> None:
    args = parser(__doc__, rounds=3).parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
