"""Run an unchanged script as ``python script args`` would, and keep the sessions that it opens."""

from __future__ import annotations

import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lazygt.graph.mesh import Mesh
from lazygt.graph.source import CallSite
from lazygt.session import Session

#: A script that imports lazygt opens its sessions itself.
_IMPORT = re.compile(r"^\s*(import|from)\s+lazygt\b", re.MULTILINE)
_NOTHING: Mapping[str, Any] = {}


@dataclass
class Ran:
    """A script that has run: the sessions it opened, in order, and whether it failed."""

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
        settings: of every session meanwhile, whatever the script says. A ``mesh`` takes the place
            of the script's workers, or of its mesh if that has the same axes.
        opened: called with each new session.
    """
    with _watched(settings, opened) as sessions:
        failed = _run(script, args, inline)
    return Ran(sessions, failed)


class _ScriptSession(Session):
    """The session around a script that opens none."""

    ended = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended = True
        super().__exit__(kind, error, trace)

    def forced_by(self) -> CallSite | None:
        """None once the script has ended: no line of it forces the last flush."""
        return None if self.ended else super().forced_by()


@contextmanager
def _watched(
    forced: Mapping[str, Any], opened: Callable[[Session], object]
) -> Iterator[list[Session]]:
    """The sessions that are opened meanwhile."""
    sessions: list[Session] = []
    set_up = Session.__init__

    def init(self: Session, **settings: object) -> None:
        set_up(self, **forced_upon(settings, forced))
        sessions.append(self)
        opened(self)

    Session.__init__ = init  # type: ignore[method-assign]
    try:
        yield sessions
    finally:
        Session.__init__ = set_up  # type: ignore[method-assign]


def forced_upon(given: Mapping[str, Any], forced: Mapping[str, Any]) -> dict[str, Any]:
    """A session's settings where some of them are not the script's to say.

    Raises:
        ValueError: a mesh is forced upon a script whose own has other axes.
    """
    settings = {**given, **forced}
    if "mesh" not in forced:
        return settings
    wanted = Mesh.parse(forced["mesh"])
    if given.get("mesh"):
        own = given["mesh"]
        mesh = Mesh.parse(own) if isinstance(own, str) else Mesh.of(own)
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
    """Run the script; whether it failed."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    own = _IMPORT.search(script.read_text(errors="replace"))
    around = nullcontext() if own else _ScriptSession(launcher="inline" if inline else None)
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
    """The traceback from the script's first frame on; all of it when it never got there."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename != str(script):
        here = here.tb_next
    return here or trace
