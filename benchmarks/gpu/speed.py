"""Steps beside eager torch, `torch.compile` in two modes, and a CUDA graph by hand.

Contestants run one after another in one process: inside a session torch.compile is left out.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lazygt
from benchmarks.generation import Decoder, timed
from benchmarks.gpu.rows import Goal, Row, text_of
from benchmarks.harness import Measured
from benchmarks.models import GPT, GPTSize, Step, Wrap, as_it_is, mlp_step, update
from benchmarks.training_steps import burst

#: Makes a step on a device, with its functions wrapped for torch.compile.
Program = Callable[[str, Wrap], Step]

EAGER, COMPILE = "eager", "torch.compile"
REDUCED, CAPTURED = "torch.compile, reduce-overhead", "CUDA graph by hand"
NOT_SLOWER, CAPTURED_PLANS = Goal(EAGER, 1.0), Goal(EAGER, 0.3)
GPT2 = GPTSize(dim=768, layers=12, heads=12, length=1024, batch=8, vocabulary=50_304)
TINY = GPTSize(dim=32, layers=2, heads=2, length=16, batch=2, vocabulary=100)
ROUNDS, WARM_STEPS = 5, 16
#: Seconds to wait for compiled plans.
COMPILING = 60.0


def size_for(device: str) -> GPTSize:
    return GPT2 if device == "cuda" else TINY


# -- training ------------------------------------------------------------------------------


def mlp(device: str) -> Iterator[Row]:
    """Training of a small MLP with SGD: eager torch is bound by its launches."""
    yield from contest(lambda d, wrap: mlp_step(d, wrap=wrap), device, 40, CAPTURED_PLANS)


def gpt2(device: str) -> Iterator[Row]:
    """Training of GPT-2 small under autocast to bfloat16 with AdamW."""
    program = partial(gpt2_step, size=size_for(device))
    yield from contest(program, device, 5, NOT_SLOWER, Goal(COMPILE, 1.0))


def gpt2_step(where: str, wrap: Wrap = as_it_is, *, size: GPTSize) -> Step:
    """A step on device `where`; the tokens stay there."""
    torch.manual_seed(0)
    with torch.device(where):
        model = GPT(size)
        tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1))
    on_gpu = where == "cuda"  # a graph by hand takes it so only
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, fused=on_gpu or None, capturable=on_gpu
    )

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(where, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    forward = wrap(loss_of)
    return lambda: update(optimizer, forward(tokens))


def item(device: str) -> Iterator[Row]:
    """The sum of four floats, read at once."""

    def program(where: str, wrap: Wrap) -> Step:
        x, total = torch.ones(4, device=where), wrap(lambda t: t.sum())
        return lambda: total(x)

    yield from contest(program, device, 1, NOT_SLOWER, rounds=300)


# -- measuring steps -----------------------------------------------------------------------


def contest(
    program: Program, device: str, each: int, *goals: Goal, rounds: int = ROUNDS
) -> Iterator[Row]:
    """A row for each contestant: bursts of ``each`` steps, the last one's result read."""
    took: dict[str, Measured] = {}
    for name, make in _peers(program, device).items():
        try:
            took[name] = _steps(make(), each, rounds)
            row = Row(name, shown(took[name]))
        except Exception as error:  # noqa: BLE001 - a peer that fails leaves the others to compare
            row = Row(name, text_of(error))
        yield row
        _forget(device)
    with lazygt.session() as session:
        step = program("lazygt", as_it_is)
        _steps(step, each, 1)
        session.compiled(COMPILING)
        ours = _steps(step, each, rounds)
        figure = f"{shown(ours)}, {session.stats()['cuda_graphs']} graphs"
    for goal in goals:
        peer = took.get(goal.peer)
        yield goal.row("lazygt", figure, ours.median / peer.median if peer else None, device)


def _peers(program: Program, device: str) -> dict[str, Callable[[], Step]]:
    peers: dict[str, Callable[[], Step]] = {
        EAGER: lambda: program(device, as_it_is),
        COMPILE: lambda: program(device, torch.compile),
    }
    if device == "cuda":
        reduced = partial(torch.compile, mode="reduce-overhead")
        peers[REDUCED] = lambda: program(device, reduced)
        peers[CAPTURED] = lambda: captured(program(device, as_it_is))
    return peers


def captured(step: Step) -> Step:
    """A step as one CUDA graph, as in torch's notes on CUDA: after steps on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _steps(step: Step, each: int, rounds: int) -> Measured:
    """Milliseconds a step."""
    burst(step, WARM_STEPS)
    return Measured(tuple(burst(step, each) * 1e3 for _ in range(rounds)))


def _forget(device: str) -> None:
    """Give back a contestant's memory and compiled code."""
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def shown(took: Measured) -> str:
    return f"{took.median:.3g} ms"


# -- text ----------------------------------------------------------------------------------


def decode(device: str) -> Iterator[Row]:
    """Text of a GPT, each token read at once; a token's position is a Python number."""
    size = GPTSize(768, 12, 12, 128, 1, 50_304) if device == "cuda" else TINY

    def text(where: str, grows: bool) -> Callable[[], float]:
        return timed(Decoder(where, size, grows), size.length)

    for name, grows, goal in (
        ("cache of one size", False, CAPTURED_PLANS),
        ("growing cache", True, NOT_SLOWER),
    ):
        eager = _tokens(text(device, grows))
        yield Row(f"eager, {name}", shown(eager))
        with lazygt.session() as session:
            ours = _tokens(text("lazygt", grows), session)
        yield goal.row(f"lazygt, {name}", shown(ours), ours.median / eager.median, device)


def generate(device: str) -> Iterator[Row]:
    """Greedy `generate` of transformers, which compiles a static cache's decoding by itself."""
    if importlib.util.find_spec("transformers") is None:
        yield Row("all", "transformers is not installed")
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    eager = _tokens(_generation(device, device, None))
    yield Row("eager, dynamic cache", shown(eager))
    if device == "cuda":
        compiled = _tokens(_generation(device, device, "static"))
        yield Row("torch.compile, static cache", shown(compiled))
        _forget(device)
    for cache, goal in ((None, NOT_SLOWER), ("static", CAPTURED_PLANS)):
        with lazygt.session() as session:
            ours = _tokens(_generation("lazygt", device, cache), session)
        case = f"lazygt, {cache or 'dynamic'} cache"
        yield goal.row(case, shown(ours), ours.median / eager.median, device)


def _generation(where: str, device: str, cache: str | None) -> Callable[[], float]:
    """Milliseconds a token of a GPT-2 with random weights."""
    transformers: Any = importlib.import_module("transformers")
    size, count = size_for(device), 64 if device == "cuda" else 8
    torch.manual_seed(0)
    configuration = transformers.GPT2Config(
        n_embd=size.dim, n_layer=size.layers, n_head=size.heads, vocab_size=size.vocabulary,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(configuration).eval().to(where)
    prompt = torch.arange(1, 9, device="cpu").view(1, 8).to(where)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}

    def run() -> float:
        begin = time.perf_counter()
        model.generate(prompt, **options, pad_token_id=0, cache_implementation=cache).tolist()
        return (time.perf_counter() - begin) * 1e3 / count

    return run


def _tokens(run: Callable[[], float], session: lazygt.Session | None = None) -> Measured:
    """Milliseconds a token, after two texts that don't count."""
    run()
    run()
    if session is not None:
        session.compiled(COMPILING)
    return Measured(tuple(run() for _ in range(ROUNDS)))
