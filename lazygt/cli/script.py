"""Runs of an unchanged script as by ``python script args``, and of its sessions.

Also options that several commands have, and their output and errors.
"""

from __future__ import annotations

import json
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
from rich.console import Console, RenderableType
from typer.core import TyperCommand

from lazygt.config import POOL_SETTINGS, cache_setting
from lazygt.errors import MachineError
from lazygt.graph.mesh import Mesh
from lazygt.machine import machine_of
from lazygt.printing.plots import missing
from lazygt.session import Session, intercepted_sessions

#: Matches an import of lazygt: such a script opens its sessions itself.
_IMPORTS_LAZYGT = re.compile(r"^\s*(from\s+|import\s([^#\n]*,)?\s*)lazygt\b", re.MULTILINE)
_NO_SETTINGS: Mapping[str, Any] = {}
NO_PLAN = "no plan was built: the script recorded nothing on device lazygt"


@dataclass
class ScriptRun:
    """Result of running a script: the sessions that it opened, in order, and whether it failed."""

    sessions: list[Session]
    failed: bool


def run_script(
    script: Path,
    args: Sequence[str] = (),
    inline: bool = False,
    settings: Mapping[str, Any] = _NO_SETTINGS,
    on_session_opened: Callable[[Session], object] = lambda session: None,
) -> ScriptRun:
    """Run a script, inside a session if it opens none of its own. Its errors are printed.

    Ctrl-C ends the script as an error would.

    Args:
        inline: run the plans of a script that opens no session in this process.
        settings: settings forced upon every session of the script. A ``mesh`` replaces the script's
            workers, or its mesh if that has the same axes.
        on_session_opened: called with each new session.
    """
    sessions: list[Session] = []

    def register(session: Session) -> None:
        sessions.append(session)
        on_session_opened(session)

    with intercepted_sessions(lambda options: forced_settings(options, settings), register):
        failed = _run(script, args, inline)
    return ScriptRun(sessions, failed)


class _ScriptSession(Session):
    """Session around a script that opens none."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._submitter.names_lines = False  # no line of the script forces the last flush
        super().__exit__(kind, error, trace)


def forced_settings(options: Mapping[str, Any], forced: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a session's settings with the forced ones, which win.

    Raises:
        ValueError: a mesh is forced upon a script with a mesh of other axes.
    """
    settings = {**options, **forced}
    if "launcher" in forced:  # no pool is used
        for name in POOL_SETTINGS & settings.keys():
            del settings[name]
    if "mesh" not in forced:
        return settings
    forced_mesh = Mesh.parse(forced["mesh"])
    if options.get("mesh"):
        script_mesh = options["mesh"]
        own_mesh = Mesh.parse(script_mesh) if isinstance(script_mesh, str) else Mesh.of(script_mesh)
        if set(own_mesh.names) != set(forced_mesh.names):
            raise ValueError(
                f"--mesh {forced_mesh}: the script's own mesh is {own_mesh}, and its placements "
                f"name those axes; give sizes for {', '.join(own_mesh.names)}"
            )
        sizes = {name: forced_mesh.size(name) for name in own_mesh.names}  # in the script's order
        settings["mesh"] = sizes
    settings.pop("workers", None)
    return settings


def _run(script: Path, args: Sequence[str], inline: bool) -> bool:
    """Run the script as ``__main__`` with its arguments, and return whether it failed."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    opens_sessions = _IMPORTS_LAZYGT.search(script.read_text(errors="replace"))
    session = (
        nullcontext() if opens_sessions else _ScriptSession(launcher="inline" if inline else None)
    )
    try:
        with session:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code not in (None, 0)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what follows is what was seen until then\n")
        return True
    except Exception as error:  # noqa: BLE001 - any error of the script is shown as its own
        traceback.print_exception(type(error), error, _script_frames(error.__traceback__, script))
        return True
    finally:
        sys.argv, sys.path[:] = argv, path
    return False


def _script_frames(trace: TracebackType | None, script: Path) -> TracebackType | None:
    """Return the traceback from the script's first frame on; all of it without such a frame."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename != str(script):
        frame = frame.tb_next
    return frame or trace


Script = Annotated[Path, typer.Argument(help="script to run; its own arguments follow")]
Inline = Annotated[
    bool,
    typer.Option(help="run a script that opens no session of its own in this process"),
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
        help="cost model: a name such as h100, calibrated, or a machine file",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, in seconds and bytes")]
Claims = Annotated[
    list[str] | None,
    typer.Option(
        "--claim", help="figure of your own to check, such as data=56GB or rank:collection=1.7ms"
    ),
]
Plot = Annotated[Path | None, typer.Option(help="draw a plot into this .png or .svg")]
#: For commands that take a script: options unknown to lazygt are the script's.
SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


class Option(NamedTuple):
    """An option of a command under one of its names; ``key`` is the same for all its names."""

    key: str
    takes_value: bool


class ScriptCommand(TyperCommand):
    """A command with options before or after its script; ``--`` ends them.

    An option that is given before the script belongs to the script when it is repeated after it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the command's own options to the front; the rest is the script's."""
        options = {
            name: Option(str(option.name), not getattr(option, "is_flag", False))
            for option in self.params
            if option.param_type_name == "option"
            for name in (*option.opts, *option.secondary_opts)
        }
        return super().parse_args(ctx, command_options_first(args, options))


def command_options_first(args: list[str], options: Mapping[str, Option]) -> list[str]:
    """Return ``args`` with the command's own options in front; a first ``--`` ends them.

    Options match by their full name only, so the script's options are never split.

    Args:
        options: the command's options, by each of their names.
    """
    own_args: list[str] = []
    script_args: list[str] = []
    keys_before_script: set[str] = set()
    remaining = iter(args)
    for arg in remaining:
        if arg == "--":
            break
        name, equals, _ = arg.partition("=")
        option = options.get(name)
        if option is None or (script_args and option.key in keys_before_script):
            script_args.append(arg)
            continue
        if not script_args:
            keys_before_script.add(option.key)
        own_args.append(arg)
        if option.takes_value and not equals and (value := next(remaining, None)) is not None:
            own_args.append(value)
    return [*own_args, *script_args, *remaining]


def planned_on(
    context: typer.Context, settings: Mapping[str, Any], mesh: str | None, machine: str | None
) -> Mapping[str, Any]:
    """Return the settings of sessions on a mesh and a machine; on a mesh they are dry.

    Ends the command if the mesh or the machine is invalid.
    """
    if mesh is not None:
        try:
            parsed = Mesh.parse(mesh)
        except ValueError as error:
            fail(context, f"--mesh: {error}")
        if not parsed.names:
            fail(context, f"--mesh: {mesh!r} names no axis; write for example data=8,model=4")
        settings = {**settings, "mesh": mesh, "launcher": "dry", "compile": "off"}
    if machine is not None:
        try:
            machine_of(machine, cache_setting())
        except MachineError as error:
            fail(context, f"--machine: {error}")
        settings = {**settings, "machine": machine}
    return settings


def run(
    context: typer.Context,
    script: Path,
    inline: bool,
    settings: Mapping[str, Any] | None = None,
    on_session_opened: Callable[[Session], object] = lambda session: None,
) -> ScriptRun:
    """Run the script of a command; ends the command if the file does not exist.

    Args:
        settings: of every session that the script opens.
        on_session_opened: called with each of them.
    """
    if not script.is_file():
        fail(context, f"there is no file {script}")
    return run_script(script, context.args, inline, settings or {}, on_session_opened)


def check_output(context: typer.Context, path: Path | None, plot: bool = False) -> None:
    """End the command, before its script runs, if no file can be written at ``path``.

    Args:
        plot: True for a plot by matplotlib.
    """
    if path is None:
        return
    if plot and (problem := missing(path)):
        fail(context, problem)
    if path.is_dir():
        fail(context, f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        fail(context, f"there is no folder {path.parent} to write {path.name} into")


def show(*parts: RenderableType) -> None:
    """Print a report: formatted in a terminal, in full as plain text into a file or pipe."""
    for part in parts:
        if sys.stdout.isatty():
            Console().print(part)
        else:
            typer.echo(str(part))


def show_json(data: object, indent: int | None = None) -> None:
    """Print plain data as JSON."""
    typer.echo(json.dumps(data, indent=indent))


def finish(script_run: ScriptRun) -> None:
    """End the command with exit code 1 if the script failed."""
    if script_run.failed:
        raise typer.Exit(1)


def fail(context: typer.Context, message: str) -> NoReturn:
    """Print the error, and end with exit code 2."""
    typer.echo(f"lazygt {context.info_name}: {message}", err=True)
    raise typer.Exit(2)
