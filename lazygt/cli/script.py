"""Runs of an unchanged script as by ``python script args``, and of its sessions.

Also the commands' script argument, and their errors.
"""

from __future__ import annotations

import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from lazygt.config import OF_POOLS, cache_setting
from lazygt.errors import MachineError
from lazygt.graph.mesh import Mesh
from lazygt.machine import machine_of
from lazygt.session import Session, overseen

#: A script that imports lazygt opens its sessions itself.
_IMPORT = re.compile(r"^\s*(from\s+|import\s([^#\n]*,)?\s*)lazygt\b", re.MULTILINE)
_NOTHING: Mapping[str, Any] = {}


@dataclass
class Ran:
    """A script that has run: the sessions it opened, in order; and True if it failed."""

    sessions: list[Session]
    failed: bool


def run_script(
    script: Path,
    args: Sequence[str] = (),
    inline: bool = False,
    settings: Mapping[str, Any] = _NOTHING,
    opened: Callable[[Session], object] = lambda session: None,
) -> Ran:
    """Run a script; one that opens no session is run inside one. Its errors are printed.

    Ctrl-C ends the script as an error would.

    Args:
        inline: where the script opens no session, run its plans in this process.
        settings: of every session meanwhile, in place of the script's own. A ``mesh`` takes the
            place of the script's workers, or of its mesh if that has the same axes.
        opened: called with each new session.
    """
    sessions: list[Session] = []

    def hear(session: Session) -> None:
        sessions.append(session)
        opened(session)

    with overseen(lambda given: forced_upon(given, settings), hear):
        failed = _run(script, args, inline)
    return Ran(sessions, failed)


class _ScriptSession(Session):
    """The session around a script that opens none."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._submitter.names_lines = False  # none forces the last flush
        super().__exit__(kind, error, trace)


def forced_upon(given: Mapping[str, Any], forced: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's settings, with forced ones in place of the script's own.

    Raises:
        ValueError: a mesh is forced upon a script with a mesh of other axes.
    """
    settings = {**given, **forced}
    if "launcher" in forced:  # nothing is asked of a pool
        for name in OF_POOLS & settings.keys():
            del settings[name]
    if "mesh" not in forced:
        return settings
    wanted = Mesh.parse(forced["mesh"])
    if given.get("mesh"):
        asked = given["mesh"]
        mesh = Mesh.parse(asked) if isinstance(asked, str) else Mesh.of(asked)
        if set(mesh.names) != set(wanted.names):
            raise ValueError(
                f"--mesh {wanted}: the script's own mesh is {mesh}, and its placements name those "
                f"axes; give sizes for {', '.join(mesh.names)}"
            )
        sizes = {name: wanted.size(name) for name in mesh.names}  # in the script's order
        settings["mesh"] = sizes
    settings.pop("workers", None)
    return settings


def _run(script: Path, args: Sequence[str], inline: bool) -> bool:
    """Run the script, and return whether it failed."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    opens_sessions = _IMPORT.search(script.read_text(errors="replace"))
    around = (
        nullcontext() if opens_sessions else _ScriptSession(launcher="inline" if inline else None)
    )
    try:
        with around:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code not in (None, 0)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what follows is what was seen until then\n")
        return True
    except Exception as error:  # noqa: BLE001 - any error of the script is shown as its own
        traceback.print_exception(type(error), error, _of_script(error.__traceback__, script))
        return True
    finally:
        sys.argv, sys.path[:] = argv, path
    return False


def _of_script(trace: TracebackType | None, script: Path) -> TracebackType | None:
    """Return the traceback from the script's first frame on; all of it without such a frame."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename != str(script):
        here = here.tb_next
    return here or trace


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
OnMachine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        help="whose costs count: a name such as h100, calibrated, or a machine file",
    ),
]
#: For commands that take a script: options unknown to lazygt are the script's.
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
    """A command with options before the script or behind it; ``--`` ends them.

    An option before the script that comes again behind it is the script's own there.
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
    """Return ``args`` with the command's own options in front; a first ``--`` ends them.

    An option is only known by its whole name, so that none of the script's is taken apart.

    Args:
        options: by name.
    """
    ours: list[str] = []
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
        ours.append(arg)
        if option.takes_value and not equals and (value := next(rest, None)) is not None:
            ours.append(value)
    return [*ours, *others, *rest]


def on_machine(
    context: typer.Context, settings: Mapping[str, Any], machine: str | None
) -> Mapping[str, Any]:
    """Return the settings, with a machine if one is given.

    Ends the command when there is no such machine.
    """
    if machine is None:
        return settings
    try:
        machine_of(machine, cache_setting())
    except MachineError as error:
        fail(context, f"--machine: {error}")
    return {**settings, "machine": machine}


def on_mesh(
    context: typer.Context, settings: Mapping[str, Any], mesh: str | None
) -> Mapping[str, Any]:
    """Return the settings; on a mesh, if one is given, those of a dry session.

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
    """Print the error, and end with exit code 2."""
    typer.echo(f"lazygt {context.info_name}: {message}", err=True)
    raise typer.Exit(2)
