"""Stack of open sessions: the innermost one's recorder gets the ops."""

from __future__ import annotations

from typing import Protocol

from lazygt.config import Config
from lazygt.errors import NoSession
from lazygt.graph.mesh import Mesh
from lazygt.record.idle import Idle
from lazygt.record.recorder import Recorder

#: The name of the device.
NAME = "lazygt"


class OpenSession(Protocol):
    """Interface of a session, as far as the device needs it."""

    config: Config
    mesh: Mesh
    recorder: Recorder
    device_type: str
    idle: Idle

    def synchronize(self) -> None:
        """Ship the recorded ops and wait for them."""


#: Open sessions, innermost last.
session_stack: list[OpenSession] = []
_used = False


def note_use() -> None:
    """Record that this process has opened a session."""
    global _used
    _used = True


def was_used() -> bool:
    """Return whether this process, or an ancestor by fork, has opened a session."""
    return _used


def current_session() -> OpenSession | None:
    """Return the innermost open session, or None."""
    return session_stack[-1] if session_stack else None


def recorder() -> Recorder:
    """Return the recorder of the open session.

    Raises:
        NoSession: no session is open; the message gives the remedy.
    """
    if not session_stack:
        raise NoSession(
            "device 'lazygt' needs an open session: do this inside `with lazygt.session():`"
        )
    return session_stack[-1].recorder


def workers_device() -> str:
    """Return the type of device that the open session's workers compute on."""
    return session_stack[-1].device_type if session_stack else "cpu"


def computes_values() -> bool:
    """Return whether the open session computes values, so that one can be fetched."""
    return bool(session_stack) and session_stack[-1].config.launcher != "dry"
