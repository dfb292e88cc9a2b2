"""``lazygt dump`` and ``viz``: plans as text and as pictures; ``diff``: comparison of dumps."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Annotated, Literal

import typer

from lazygt.cli.script import (
    NO_PLAN,
    Inline,
    OnMachine,
    OnMesh,
    Script,
    ScriptRun,
    check_output,
    fail,
    finish,
    planned_on,
    run,
)
from lazygt.errors import LazyGTError
from lazygt.graph.alias import op_facts
from lazygt.graph.collectives import Communication, collective_name, communications_by_node
from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, print_graph
from lazygt.graph.text import count
from lazygt.passes import AFTER_SHARDING, BEFORE_SHARDING
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.plan_records import PlanRecord
from lazygt.session import Session

# -- ``lazygt dump``: plans as text ----------------------------------------------------------------

#: Stages of a plan, in order; some exist only on a mesh. From ``shard`` on the graph is rank 0's.
GRAPHS = (
    "recorded",
    *(stage.name for stage in BEFORE_SHARDING),
    "shard",
    "merge",
    "overlap",
    *(stage.name for stage in AFTER_SHARDING),
    "plan",
)
#: Printable stages; ``placements`` is the program before ``shard``, with each value's placement.
STAGES = (*GRAPHS[: GRAPHS.index("shard")], "placements", *GRAPHS[GRAPHS.index("shard") :])
Number = Annotated[
    int | None,
    typer.Option("--plan", help="number of the plan, from 0; by default the one that ran most ops"),
]


def dump(
    context: typer.Context,
    script: Script,
    stage: Annotated[
        str, typer.Option(help=f"print the graphs of this stage: {', '.join(STAGES)}")
    ] = "plan",
    plan: Number = None,
    everything: Annotated[bool, typer.Option("--all", help="print every plan")] = False,
    inline: Inline = False,
    mesh: OnMesh = None,
    machine: OnMachine = None,
) -> None:
    """Run an unchanged script and print a plan that its sessions built, with its costs.

    A script that opens no session is run inside one. With --mesh nothing is computed. In a terminal
    long lines are wrapped.
    """
    if stage not in STAGES:
        fail(context, f"there is no stage {stage!r}, only {', '.join(STAGES)}")
    settings = planned_on(context, {"keep_stages": stage != "plan"}, mesh, machine)
    script_run = run(context, script, inline, settings)
    built = _built(script_run)
    if everything and plan is None:
        _print_all(script_run.sessions, stage)
    elif built:
        number = _number(context, built, plan)
        _print_plan(*built[number], number, stage)
        if plan is None and len(built) > 1:
            typer.echo(f"# plan {number} of {len(built)} ran the most ops; --plan NUMBER prints "
                       f"another, --all prints them all")  # fmt: skip
    elif plan is not None and not script_run.failed:
        fail(context, f"there is no plan {plan}, the script built none")
    if not built and not script_run.failed:
        typer.echo(NO_PLAN)
    finish(script_run)


def _built(script_run: ScriptRun) -> list[tuple[Session, PlanRecord]]:
    """List the plans of a script, in the order of their numbers, with their sessions."""
    return [(session, entry) for session in script_run.sessions for entry in session.entries()]


def _number(
    context: typer.Context, built: Sequence[tuple[Session, PlanRecord]], number: int | None
) -> int:
    """Return the number of the requested plan; by default that of the one that ran the most ops.

    Ends the command if there is no such plan.

    Args:
        built: the plans of the script.
        number: the option ``--plan``.
    """
    if number is None:
        ran = [len(entry.plan.steps.graph.nodes) * max(entry.runs, 1) for _, entry in built]
        return ran.index(max(ran))
    if not 0 <= number < len(built):
        fail(context, f"there is no plan {number}, only 0 to {len(built) - 1}")
    return number


def _print_all(sessions: Iterable[Session], stage: str) -> None:
    """Print every plan, counted from 0, and each session's counts."""
    number = 0
    for session in sessions:
        entries = session.entries()
        for entry in entries:
            _print_plan(session, entry, number, stage)
            number += 1
        if entries:
            _print_counts(session)


def _print_plan(session: Session, entry: PlanRecord, number: int, stage: str) -> None:
    """Print the graphs of a plan at a stage, with its size and number of runs."""
    plan = entry.plan
    typer.echo(f"# plan {number}: shipped {entry.ships} time(s), {entry.size} bytes; "
               f"run {entry.runs} time(s)")  # fmt: skip
    texts = list(_stage_texts(session, plan, stage))
    if not texts:
        typer.echo(f"# it went through no stage {stage!r}\n")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for graph, text in texts:
        typer.echo(f"# {_size_note(graph)}")
        typer.echo((text if width is None else wrapped(text, width)) + "\n")


def wrapped(text: str, width: int) -> str:
    """Return a graph's text in lines of ``width`` columns; continuations are indented further."""
    rows = []
    for row in text.splitlines():
        indent = " " * (len(row) - len(row.lstrip()) + 6)
        more = indent if len(indent) < width // 2 else ""
        rows += textwrap.wrap(
            row, width, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(rows)


def _stage_texts(session: Session, plan: Plan, stage: str) -> Iterator[tuple[Graph, str]]:
    """Yield the graphs of a stage, with their texts; none if the plan did not go through it."""
    name = f"{stage} of plan {_plan_name(plan)}"
    if stage == "plan":
        yield plan.graph, plan_text(plan)
    elif stage == "placements":
        # why: the rules of every op take a while to load
        from lazygt.passes.sharding.reasons import decisions_text, programs_of

        for steps in programs_of(session.decided(plan)):
            graph, labels = decisions_text(steps)
            yield graph, print_graph(graph, name, _byte_notes(graph), labels)
    elif stage in (stages := dict(session.stages(plan))):
        graph = stages[stage]
        yield graph, print_graph(graph, name, _byte_notes(graph, plan.mesh))


def _print_counts(session: Session) -> None:
    """Print a session's numbers of ops, flushes, messages and bytes."""
    stats = session.stats()
    flushes = ", ".join(f"{reason} {count}" for reason, count in stats["flushes"].items())
    typer.echo(f"# {stats['ops_recorded']} ops recorded; flushes: {flushes or 'none'}")
    for direction in ("sent", "received"):
        typer.echo(
            f"# {stats[f'messages_{direction}']} messages {direction}, "
            f"{stats[f'bytes_{direction}']} bytes"
        )


def plan_text(plan: Plan) -> str:
    """Return a plan's text; each node has a note on freed values and on the bytes it allocates."""
    byte_notes = _byte_notes(plan.graph, plan.mesh)
    notes = zip(Schedule.of(plan.graph).notes(), byte_notes, strict=True)
    node_notes = ["; ".join(filter(None, pair)) for pair in notes]
    return print_graph(plan.graph, f"plan {_plan_name(plan)}", node_notes)


def _plan_name(plan: Plan) -> str:
    return plan.digest.hex()[:12]


def _byte_notes(graph: Graph, mesh: Mesh | None = None) -> list[str]:
    """Return a note for each node: bytes of its results, or of a collective's messages."""
    sent = communications_by_node(graph, mesh)
    return [
        _traffic_note(sent[number])
        if number in sent
        else f"{nbytes} bytes" if (nbytes := _new_bytes(node)) else ""
        for number, node in enumerate(graph.nodes)
    ]  # fmt: skip


def _traffic_note(record: Communication) -> str:
    """Return a collective's note: kind, axis, payload, and bytes that a rank sends in a ring."""
    kind = collective_name(record.kind, record.reduce_op)
    ring = f", {record.ring_bytes} in a ring of {record.ranks}" if record.ranks > 1 else ""
    return f"{kind} along {record.mesh_dim}: {record.nbytes} bytes{ring}"


def _new_bytes(node: Node) -> int:
    """Return the bytes that a node allocates; 0 for a view."""
    facts = op_facts(node)
    return 0 if facts is not None and facts.views else _nbytes(node.fresh)


def _nbytes(metas: Iterable[TensorMeta | None]) -> int:
    return sum(meta.nbytes for meta in metas if meta is not None)


def _size_note(graph: Graph) -> str:
    """Return the numbers and bytes of a graph's inputs, nodes and outputs."""
    values = graph.values
    outputs = _nbytes(values[number] for number in graph.outputs)
    return (
        f"{len(graph.inputs)} inputs, {_nbytes(graph.inputs)} bytes; "
        f"{len(graph.nodes)} nodes make {sum(map(_new_bytes, graph.nodes))} bytes; "
        f"{len(graph.outputs)} outputs, {outputs} bytes"
    )


# -- ``lazygt diff``: comparison of two dumps ------------------------------------------------------

_HEAD = re.compile(r"# plan (\d+):")
_LINE = re.compile(r"  # [^\[]*?(?=  \[|$)")
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def diff(
    context: typer.Context,
    old: Annotated[Path, typer.Argument(help="output of `lazygt dump`")],
    new: Annotated[Path, typer.Argument(help="another output, to compare with")],
    lines: Annotated[bool, typer.Option(help="compare the user's lines, too")] = True,
) -> None:
    """Print the differences of two dumps' plans; exit code 0: none, 1: some, 2: error.

    The numbers of a plan's shipments and runs, and the scripts' own output, are not compared.
    """
    before, after = (_read(context, path, lines) for path in (old, new))
    same = True
    for number in sorted({*before, *after}):
        for row in unified_diff(before.get(number, []), after.get(number, []),
                                f"{old} plan {number}", f"{new} plan {number}",
                                lineterm=""):  # fmt: skip
            same = False
            typer.secho(row, fg=_COLOURS.get(row[0]))
    if not same:
        raise typer.Exit(1)


def _read(context: typer.Context, path: Path, lines: bool) -> dict[int, list[str]]:
    """Return the plans of a dump, by number."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(context, f"can't read {path}: {error}")
    plans = dict(read_plans(text.splitlines()))
    if not plans:
        advice = f"write one with `lazygt dump --all SCRIPT > {path}`"
        fail(context, f"there is no plan in {path}; {advice}")
    return plans if lines else {n: [_LINE.sub("", r) for r in rows] for n, rows in plans.items()}


def read_plans(rows: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (number, lines of the text) of each plan in a dump."""
    number: int | None = None
    plan: list[str] = []
    for row in rows:
        head = _HEAD.match(row)
        if head is not None:
            number, plan = int(head[1]), []
        elif number is not None and not row.startswith("#"):
            plan.append(row)
            if row == "}":
                yield number, plan
                number = None


# -- ``lazygt viz``: a plan of a script as a picture -----------------------------------------------

_COLLAPSE: dict[str, Literal["auto"] | bool] = {"auto": "auto", "always": True, "never": False}


def viz(
    context: typer.Context,
    script: Script,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="file to write: .html, .svg, .png or .dot")
    ] = Path("graph.html"),
    plan: Number = None,
    stage: Annotated[
        str, typer.Option(help=f"draw the graph of this stage: {', '.join(GRAPHS)}")
    ] = "plan",
    collapse: Annotated[
        str, typer.Option(help="draw one box a source line: auto (for large graphs), always, never")
    ] = "auto",
    inline: Inline = False,
    mesh: OnMesh = None,
    machine: OnMachine = None,
) -> None:  # fmt: skip
    """Run an unchanged script and draw one of its plans. With --mesh nothing is computed.

    A page (.html) needs no other program and no network; .svg and .png need Graphviz.
    """
    _check(context, output, stage, collapse)
    settings = planned_on(context, {"keep_stages": stage != "plan"}, mesh, machine)
    script_run = run(context, script, inline, settings)
    built = _built(script_run)
    if built:
        number = _number(context, built, plan)
        session, entry = built[number]
        graph = _graph(session, entry.plan, stage)
        if graph is None:
            fail(context, f"plan {number} went through no stage {stage!r}")
        from lazygt.observe.picture import render  # why: networkx takes a tenth of a second to load

        try:
            render(graph, output, _COLLAPSE[collapse], entry.plan.mesh, entry.plan.backward)
        except (LazyGTError, OSError) as error:
            fail(context, str(error))
        typer.echo(f"plan {number} of {len(built)} ({_ops(graph)}) drawn to {output}")
    elif not script_run.failed:
        fail(context, NO_PLAN)
    finish(script_run)


def _check(context: typer.Context, output: Path, stage: str, collapse: str) -> None:
    """Check the options before the script runs: end the command if the picture can't be written."""
    from lazygt.observe.picture import SUFFIXES  # why: networkx takes a tenth of a second to load

    if stage not in GRAPHS:
        fail(context, f"there is no stage {stage!r}, only {', '.join(GRAPHS)}")
    if collapse not in _COLLAPSE:
        fail(context, f"--collapse is one of {', '.join(_COLLAPSE)}, not {collapse!r}")
    if output.suffix not in SUFFIXES:
        fail(context, f"{output.name!r} must end in one of {', '.join(SUFFIXES)}")
    check_output(context, output)
    if output.suffix in (".svg", ".png") and shutil.which("dot") is None:
        fail(
            context,
            f"{output.suffix} needs Graphviz's program 'dot', which is not on PATH; install it "
            f"(for example: apt-get install graphviz), or write .html or .dot",
        )


def _graph(session: Session, plan: Plan, stage: str) -> Graph | None:
    """Return a plan's graph at a stage; None if it did not go through it."""
    return plan.graph if stage == "plan" else dict(session.stages(plan)).get(stage)


def _ops(graph: Graph) -> str:
    """Return the number of ops as text; a fused group counts as its members."""
    ops = sum(1 if node.body is None else len(node.body.nodes) for node in graph.nodes)
    return count(ops, "op")
