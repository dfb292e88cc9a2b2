"""``lazygt why``: what a script made lazygt do, and for what reason."""

from __future__ import annotations

import typer

from lazygt.commands.base import Inline, Script, finish, run


def why(context: typer.Context, script: Script, inline: Inline = False) -> None:
    """Run an unchanged script and say what forced each flush and why each plan was built."""
    ran = run(context, script, inline)
    for number, session in enumerate(ran.sessions):
        stats = session.stats()
        typer.echo(f"session {number}: {stats['ops_recorded']} ops recorded, "
                   f"{stats['plans_built']} plans built, {stats['plan_hits']} hits")  # fmt: skip
        typer.echo(session.why())
    finish(ran)
