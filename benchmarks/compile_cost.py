"""What a new plan costs the client, a node of the graph: inference, graph, passes, plan, bytes.

Real programs are recorded into one long trace each; nothing of it runs while the clock does.
Then each part of a miss is timed by itself, as the session would do it. Growth is the cost a node
of the longest trace over that of the shortest: 1.0 is linear.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import lazygt
from benchmarks.harness import Measured, Report, parser
from benchmarks.models import TINY_GPT, Step, gpt_step, mlp_step
from lazygt.graph.alias import op_facts
from lazygt.graph.node import Graph
from lazygt.graph.source import expand
from lazygt.passes import PIPELINE, run_passes
from lazygt.record.infer import Inference
from lazygt.record.trie import TrieNode, build_graph
from lazygt.runtime.graph_codec import encode_graph
from lazygt.runtime.plan import Plan

SIZES = (1_000, 3_000, 10_000)
AIM = 60.0
ALL_PASSES = "all passes"

#: A value for each type of run-time number: inference only asks for their types.
_NUMBERS = {"int": 1, "float": 1.0, "complex": 1j, "bool": True}


class Recorded(NamedTuple):
    """A trace as the session finds it at a flush."""

    steps: list[TrieNode]
    outputs: tuple[int, ...]
    lines: tuple[str, ...]
    kinds: tuple[str, ...]

    def graph(self) -> Graph:
        """The graph before any pass."""
        return build_graph(self.steps, self.outputs, self.lines, self.kinds)


def chain_of_numbers() -> Step:
    """Ten ops a step of one long chain; one of them takes a number known only at run time."""
    a, b = torch.full((4,), 0.999, device="lazygt"), torch.full((4,), 0.001, device="lazygt")
    state = [torch.ones(4, device="lazygt")]

    def step() -> torch.Tensor:
        x = state[0] * 0.5 + b
        for _ in range(4):
            x = x * a + b
        state[0] = x
        return x

    return step


# name, how to make the step
PROGRAMS: tuple[tuple[str, Callable[[], Step]], ...] = (
    ("chain", chain_of_numbers),
    ("MLP, Adam", lambda: mlp_step("lazygt", "adam", batch=4, width=16)),
    ("GPT, AdamW", lambda: gpt_step("lazygt", TINY_GPT)),
)


def record(make: Callable[[], Step], nodes: int) -> Recorded:
    """Steps of a program in one trace, at least `nodes` ops of them.

    The first step is shipped before: it makes the optimizer's state, later ones are all alike.
    """
    limit = 2 * nodes + 10_000
    with lazygt.session(
        launcher="inline", tracing=lazygt.Tracing(flush_on_backward=False, max_graph_nodes=limit)
    ) as s:
        step = make()
        step()
        s.synchronize()
        recorder = s.recorder
        kept = []
        while len(recorder.trace.call_sites) < nodes:
            kept.append(step())
        trace = recorder.trace
        lines = tuple(
            expand(call_site or recorder.backward_call_site) for call_site in trace.call_sites
        )
        kinds = tuple(type(value).__name__ for value in trace.params)
        return Recorded(trace.step.path(), trace.alive().numbers, lines, kinds)


def infer(graph: Graph) -> None:
    """Infer every op's results from the beginning, as recording does on its first time."""
    inference = Inference("cpu")
    metas = graph.values
    numbers = [_NUMBERS[kind] for kind in graph.params]
    for node in graph.nodes:
        facts = op_facts(node)
        if facts is not None:
            known: dict[int, Any] = {index: metas[index] for index in node.refs()}
            inference.results(facts, node.args, node.kwargs, known, numbers)


def parts(recorded: Recorded) -> Iterator[tuple[str, Callable[[], object]]]:
    """The parts of a miss in their order, by name; passes by their own."""
    graph = recorded.graph()
    yield "inference", lambda: infer(graph)
    yield "build_graph", recorded.graph
    before = graph
    for one in PIPELINE:
        yield f"pass {one.name}", lambda one=one, before=before: one.run(before)
        before = one.run(before)
    yield ALL_PASSES, lambda: run_passes(graph, PIPELINE)
    yield "plan", lambda: Plan.build(before)
    # a copy, since a graph's encoding is remembered
    yield "encode", lambda: encode_graph(replace(before))


def seconds(part: Callable[[], object]) -> float:
    gc.collect()  # a part pays for its own garbage, as it would in a session, and for no other's
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def costs(recorded: Recorded, rounds: int) -> dict[str, Measured]:
    """Microseconds a recorded op of each part."""
    count = len(recorded.graph().nodes)
    return {
        name: Measured(tuple(seconds(part) / count * 1e6 for _ in range(rounds)))
        for name, part in parts(recorded)
    }


def measure(args: argparse.Namespace) -> Report:
    sizes: Sequence[int] = args.sizes
    columns = ["graph", "part of a miss", *(f"{size:,} ops" for size in sizes), "growth"]
    title = "A new plan: client's time in us an op, by length of the trace"
    report = Report("compile_cost", title, columns)
    slowest = 0.0
    for name, make in PROGRAMS:
        recordings = [record(make, size) for size in sizes]
        found = [costs(recorded, args.rounds) for recorded in recordings]
        for part in found[0]:
            medians = [each[part].median for each in found]
            cells = [f"{median:.2f}" for median in medians]
            report.add(name, part, *cells, f"{medians[-1] / medians[0]:.1f}x")
        slowest = max(slowest, found[-1][ALL_PASSES].median)
        graph = recordings[-1].graph()
        left = len(run_passes(graph, PIPELINE).nodes)
        report.remarks.append(f"{name}: {len(graph.nodes):,} ops recorded, {left:,} nodes left")
    met = "met" if slowest <= AIM else "MISSED"
    report.remarks.append(
        f"aim: all passes together at most {AIM:.0f} us a node at {sizes[-1]:,} ops; "
        f"{slowest:.1f} here: {met}"
    )
    return report


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ops in a trace")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
