"""``lazygt viz``: a plan of a script as a picture."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from lazygt.cli.dump import GRAPHS, most_ops
from lazygt.cli.script import (
    Inline,
    OnMachine,
    OnMesh,
    Script,
    check_output,
    fail,
    finish,
    on_machine,
    on_mesh,
    run,
)
from lazygt.errors import LazyGTError
from lazygt.graph.node import Graph
from lazygt.graph.text import count
from lazygt.runtime.plan import Plan
from lazygt.session import Session

_COLLAPSE: dict[str, Literal["auto"] | bool] = {"auto": "auto", "always": True, "never": False}


def viz(
    context: typer.Context,
    script: Script,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="file to write: .html, .svg, .png or .dot")
    ] = Path("graph.html"),
    plan: Annotated[
        int | None,
        typer.Option(help="draw this plan, counted from 0; by default the one of most ops"),
    ] = None,
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
    settings = on_mesh(context, {"keep_stages": stage != "plan"}, mesh)
    settings = on_machine(context, settings, machine)
    ran = run(context, script, inline, settings)
    plans = [(session, built) for session in ran.sessions for built in _plans(session)]
    if plans:
        number = most_ops([built for _, built in plans]) if plan is None else plan
        if not 0 <= number < len(plans):
            fail(context, f"there is no plan {number}, only 0 to {len(plans) - 1}")
        graph = _graph(*plans[number], stage)
        if graph is None:
            fail(context, f"plan {number} went through no stage {stage!r}")
        from lazygt.observe.picture import render  # why: networkx takes a tenth of a second to load

        try:
            drawn = plans[number][1]
            render(graph, output, _COLLAPSE[collapse], drawn.mesh, drawn.backward)
        except (LazyGTError, OSError) as error:
            fail(context, str(error))
        typer.echo(f"plan {number} of {len(plans)} ({_ops(graph)}) drawn to {output}")
    elif not ran.failed:
        fail(context, "no plan was built: the script recorded nothing on device lazygt")
    finish(ran)


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


def _plans(session: Session) -> list[Plan]:
    """Return a session's plans, numbered as ``lazygt dump`` numbers them."""
    return [entry.plan for entry in session.entries()]


def _graph(session: Session, plan: Plan, stage: str) -> Graph | None:
    return plan.graph if stage == "plan" else dict(session.stages(plan)).get(stage)


def _ops(graph: Graph) -> str:
    ops = sum(1 if node.body is None else len(node.body.nodes) for node in graph.nodes)
    return count(ops, "op")
