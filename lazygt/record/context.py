"""The open sessions: which recorder an op goes to."""

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
    """What the device needs of a session."""

    config: Config
    mesh: Mesh
    recorder: Recorder
    device_type: str
    idle: Idle

    def synchronize(self) -> None:
        """Ship what is recorded and wait for it."""


#: Innermost last.
session_stack: list[OpenSession] = []
_used = False


def note_use() -> None:
    """Note that this process has opened a session."""
    global _used
    _used = True


def was_used() -> bool:
    """Whether this process, or one that it was forked from, has opened a session."""
    return _used


def current_session() -> OpenSession | None:
    """The innermost open session, or None."""
    return session_stack[-1] if session_stack else None


def recorder() -> Recorder:
    """The recorder of the open session.

    Raises:
        NoSession: with what to do about it.
    """
    if not session_stack:
        raise NoSession(
            "device 'lazygt' needs an open session: do this inside `with lazygt.session():`"
        )
    return session_stack[-1].recorder


def workers_device() -> str:
    """What the open session's workers compute on."""
    return session_stack[-1].device_type if session_stack else "cpu"


def computes_values() -> bool:
    """Whether the open session computes values, so that one can be asked for."""
    return bool(session_stack) and session_stack[-1].config.launcher != "dry"
