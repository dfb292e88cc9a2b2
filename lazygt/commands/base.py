"""What the commands share: how they take a script, run it, and say that something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from lazygt.graph.mesh import Mesh
from lazygt.scripts import Ran, run_script
from lazygt.session import Session

Script = Annotated[Path, typer.Argument(help="the script; its own arguments follow")]
Inline = Annotated[
    bool,
    typer.Option(help="where the script opens no session of its own, run it in this process"),
]
OnMesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="plan for this mesh, such as data=8,model=4, without its workers: nothing is computed",
    ),
]
#: For commands that take a script: what lazygt does not know is the script's.
SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


class Option(NamedTuple):
    """An option of a command under one of its names; all of them have the same ``key``."""

    key: str
    takes_value: bool


class ScriptCommand(TyperCommand):
    """A command whose options may stand before the script or behind it; ``--`` ends them.

    One that stands before the script is the script's own when it comes again behind it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the command's own options to the front; the rest is the script's."""
        options = {
            name: Option(str(option.name), not getattr(option, "is_flag", False))
            for option in self.params
            if option.param_type_name == "option"
            for name in (*option.opts, *option.secondary_opts)
        }
        return super().parse_args(ctx, own_first(args, options))


def own_first(args: list[str], options: Mapping[str, Option]) -> list[str]:
    """``args`` with the command's own options in front; a first ``--`` ends them.

    An option is only known by its whole name, so that none of the script's is taken apart.

    Args:
        options: by name.
    """
    own: list[str] = []
    others: list[str] = []
    before: set[str] = set()
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            break
        name, equals, _ = arg.partition("=")
        option = options.get(name)
        if option is None or (others and option.key in before):
            others.append(arg)
            continue
        if not others:
            before.add(option.key)
        own.append(arg)
        if option.takes_value and not equals and (value := next(rest, None)) is not None:
            own.append(value)
    return [*own, *others, *rest]


def on_mesh(
    context: typer.Context, settings: Mapping[str, Any], mesh: str | None
) -> Mapping[str, Any]:
    """The settings; on a mesh, if one is given, those of a dry session.

    Ends the command when it is no mesh.
    """
    if mesh is None:
        return settings
    try:
        parsed = Mesh.parse(mesh)
    except ValueError as error:
        fail(context, f"--mesh: {error}")
    if not parsed.names:
        fail(context, f"--mesh: {mesh!r} names no axis; write for example data=8,model=4")
    return {**settings, "mesh": mesh, "launcher": "dry", "compile": "off"}


def run(
    context: typer.Context,
    script: Path,
    inline: bool,
    settings: Mapping[str, Any] | None = None,
    opened: Callable[[Session], object] = lambda session: None,
) -> Ran:
    """Run the script of a command; ends the command when there is no such file.

    Args:
        settings: of every session that the script opens.
        opened: called with each of them.
    """
    if not script.is_file():
        fail(context, f"there is no file {script}")
    return run_script(script, context.args, inline, settings or {}, opened)


def check_output(context: typer.Context, path: Path) -> None:
    """End the command, before its script runs, when ``path`` can't become a file after it."""
    if path.is_dir():
        fail(context, f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        fail(context, f"there is no folder {path.parent} to write {path.name} into")


def finish(ran: Ran) -> None:
    """End the command with exit code 1 when the script failed."""
    if ran.failed:
        raise typer.Exit(1)


def fail(context: typer.Context, message: str) -> NoReturn:
    """Say what is wrong, and end with exit code 2."""
    typer.echo(f"lazygt {context.info_name}: {message}", err=True)
    raise typer.Exit(2)
