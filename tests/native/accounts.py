"""What a session did with programs, as plain data that the accounts of another process can equal.

Run as ``python -m tests.native.accounts FILE JSON``, with the recorder that LAZYGT_RECORDER names;
``compare`` starts two such processes.

For tensors of a Python subclass, as those of the recorder in Python are, torch's own C++ calls
other ops here and there (``isTensorSubclassLike``). It does so for every tensor in a dispatch mode,
and replays views backward where that is asked for: a task may ask for both.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_leaves

import lazygt
from lazygt.graph.node import Graph
from lazygt.graph.source import expand
from lazygt.runtime.plan import Plan
from lazygt.settings import grouped
from tests.models import zoo
from tests.native import mutations
from tests.property import positions as position_programs
from tests.property.programs import ACTIONS, State, Step

Account = dict[str, Any]
#: torch's name for the backward function of a tensor. A view of a written base has that of
#: ``as_strided`` in C++, as in eager torch, and its own in Python.
MADE_BY = re.compile(r"output \d+ of \w+")
#: Counts that tell how a program was recorded and what was sent for it.
COUNTS = ("ops_recorded", "ops_inferred", "flushes", "plans_built", "plans_resized", "plan_hits",
          "plan_misses", "messages_sent", "bytes_uploaded", "bytes_fetched")  # fmt: skip


class Task(NamedTuple):
    """Programs that run in one session, one after the other."""

    name: str
    programs: list[Callable[[], Any]]
    settings: dict[str, Any]


def account(task: Task, as_subclasses: bool) -> Account:
    """What a session makes of them.

    Args:
        as_subclasses: torch is to call the ops that it calls for Python subclasses.
    """
    results, errors = [], []
    settings = {"launcher": "inline", "compile": "off", "keep_stages": True, **task.settings}
    with lazygt.session(**grouped(settings)) as s:
        for program in task.programs:
            try:
                with like_subclasses() if as_subclasses else nullcontext():
                    result = program()
                results.append([shown(leaf) for leaf in tree_leaves(result)])
            except Exception as error:  # noqa: BLE001 - what it is is compared
                errors.append(f"{type(error).__name__}: {error}")
        flushes = [[flush.reason, expand(flush.call_site)] for flush in s.history.recent]
        runs = [[flush.ops, flush.hit, hexed(flush.digest)] for flush in s.history.recent]
        stats = s.stats()
        graphs = [recorded(s, plan) for plan in s.plans()]
        plans = [
            [*map(str, graph), *lines(plan)] for graph, plan in zip(graphs, s.plans(), strict=True)
        ]
        digests = [hexed(plan.digest) for plan in s.plans()]
    return {
        "name": task.name,
        "values": results,
        "errors": errors,
        "ops": [node.op for each in graphs for graph in each for node in graph.nodes],
        "plans": plans,
        "digests": digests,
        "flushes": flushes,
        "runs": runs,
        **{f"count of {count}": stats[count] for count in COUNTS},
    }


@contextmanager
def like_subclasses() -> Iterator[None]:
    """Have torch call the ops that it calls for Python subclasses, of any tensor."""
    with BaseTorchDispatchMode(), _force_original_view_tracking(True):
        yield


def hexed(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


def recorded(s: lazygt.Session, plan: Plan) -> list[Graph]:
    """The graph before any pass; none of a plan that was no trace."""
    return [graph for _, graph in s.stages(plan)[:1]]


def lines(plan: Plan) -> list[str]:
    """The user's line of each step."""
    graph = plan.steps.graph
    return [graph.line(number) for number in range(len(graph.nodes))]


def shown(value: Any) -> str:
    """A tensor by its layout and the bits of its values."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"{value.dtype} {list(value.shape)} {value.stride()} grad={value.requires_grad}"
    if value.layout != torch.strided:
        return f"{text} {value.layout}"
    there = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    bits = there.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{text} {hashlib.sha256(bits).hexdigest()[:16]}"


# -- programs --------------------------------------------------------------------------------------


def drawn(first: int, count: int) -> Iterator[Task]:
    """Programs of the property tests, drawn by numbered seeds."""
    for seed in range(first, first + count):
        draw = random.Random(seed)
        program = [
            Step(draw.choice(sorted(ACTIONS)), draw.randrange(8), draw.randrange(8),
                 draw.choice([0.5, 2.0, -1.0, 0.0, 3.0]))
            for _ in range(draw.randint(1, 25))
        ]  # fmt: skip
        length = draw.choice([5_000, 5_000, 4])
        at = draw.randrange(len(program))
        changed = replace(program[at], b=draw.randrange(8), number=0.25)
        other = [*program[:at], changed, *program[at + 1 :]]
        runs = [partial(run, each) for each in (program, other, program, other)]
        yield Task(f"program {seed}", runs, {"max_graph_nodes": length})


def run(program: list[Step]) -> list[Any]:
    """Run a program: its tensors, what it read, and its errors with their texts."""
    torch.manual_seed(11)
    state, errors = State("lazygt"), []
    for step in program:
        try:
            step.run(state)
        except (RuntimeError, IndexError, ValueError) as error:
            errors.append(f"{step}: {type(error).__name__}: {MADE_BY.sub('a result', str(error))}")
    return [state.tensors, state.read, errors]


def positions(first: int, count: int) -> Iterator[Task]:
    """Programs whose positions change from turn to turn, some of them shipped after each turn."""
    steps = sorted(position_programs.STEPS)
    for seed in range(first, first + count):
        draw = random.Random(seed)
        program = [
            (draw.choice(steps), *(draw.randrange(12) for _ in range(3)))
            for _ in range(draw.randint(1, 8))
        ]
        ship = partial(torch.ones, (), device="lazygt") if seed % 4 == 0 else read_one
        turns = partial(position_programs.run, "lazygt", program, seed, ship)
        yield Task(f"positions {seed}", [turns, turns], {})


def read_one() -> None:
    """Ship what is recorded."""
    torch.ones((), device="lazygt").tolist()


def operators(first: int, every: int, samples: int) -> Iterator[Task]:
    """torch's operator database, forward and backward: each operator that comes ``every`` so many
    from number ``first`` on."""
    # why: the database takes seconds to load
    from tests.conformance import harness

    for op in harness.operators()[first::every]:
        for grad in (False, True) if harness.with_gradient(op) else (False,):
            direction = "backward" if grad else "forward"
            try:
                drawn_samples = list(harness.samples(op, grad, samples))
            except Exception:  # noqa: BLE001 - torch can't make the samples here
                continue
            for number, sample in enumerate(drawn_samples):
                once = partial(harness.outcome, op, sample, grad, harness.moved)
                yield Task(f"{harness.name_of(op)} {direction} {number}", [once, once], {})


def models(optimizers: list[str], steps: int) -> Iterator[Task]:
    """The models of the zoo, trained."""
    for name in zoo.MODELS:
        data = zoo.batches(name, steps)
        for optimizer in optimizers:
            training = partial(zoo.train, name, optimizer, data, "lazygt")
            yield Task(f"{name} with {optimizer}", [training], {})


KINDS = {"drawn": drawn, "positions": positions, "operators": operators, "models": models}


def main() -> None:
    """Write the accounts of a kind of programs into a file."""
    path, text = sys.argv[1:]
    asked = json.loads(text)
    only = asked.get("only")
    torch.set_num_threads(1)
    with mutations.applied(asked["mutation"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accounts = [
            account(task, as_subclasses=only is not None)
            for task in KINDS[asked["kind"]](*asked["arguments"])
            if only is None or task.name in only
        ]
    with open(path, "w") as file:
        json.dump({"recorder": recorder(), "accounts": accounts}, file)


def recorder() -> str:
    """Which one there really is: the native one's handles have no class of their own."""
    with lazygt.session(launcher="inline"):
        return "native" if type(torch.ones(1)) is torch.Tensor else "python"


if __name__ == "__main__":
    main()
