"""Warnings that the client does the work meant for the workers, at most one a session.

CPU ops may be intended. A mistake is likely if optimizers step on the CPU again and again, if a
session is never entered, and if one ends without a recorded op although the program computed
gradients or created tensors on torch's devices meanwhile.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any, ClassVar

import torch

from lazygt.errors import IdleWarning
from lazygt.graph.source import expand, user_call_site

#: Number of consecutive optimizer steps on the CPU that cause a warning: fewer may be a comparison
#: or a side job. After as many on the workers the monitor ends.
_MAX_STEPS = 3
_autograd: Any = torch.autograd


class Idle:
    """Monitor of a session from its creation until it is closed; it warns at most once."""

    #: number of sessions entered in this process
    sessions: ClassVar[int] = 0

    def __init__(self, session: object, default_device: bool) -> None:
        self._default_device = default_device
        self.entered = self._warned = False
        #: a tensor was made in the session on a device of torch's own
        self.made_elsewhere = False
        #: number of autograd's nodes on this thread, and of sessions entered in this process, when
        #: this one was entered
        self._nodes = self._sessions = 0
        self._site = expand(user_call_site(1))
        self._pid = os.getpid()
        self._session = weakref.ref(session)
        #: number of steps of optimizers in one place since the last in the other
        self._steps = 0
        self._on_cpu = True
        self._finalizer = weakref.finalize(session, self.close)

    def enter(self) -> None:
        """Note an ``__enter__`` of the session."""
        if not self.entered:
            Idle.sessions += 1
            self._sessions, self._nodes = Idle.sessions, _autograd._get_sequence_nr()
        self.entered = True

    def warn_unused(self) -> None:
        """Warn, if the CPU was used meanwhile, that the session recorded and uploaded nothing."""
        only_session = Idle.sessions == self._sessions  # else nodes may be of the other one's ops
        has_gradients = only_session and _autograd._get_sequence_nr() > self._nodes
        if self._default_device and (self.made_elsewhere or has_gradients):
            self._warn(
                f"the session made at {self._site} has ended and has recorded nothing: what was "
                f"computed meanwhile was computed by this process. A device of torch's own, as of "
                f"`'cuda' if torch.cuda.is_available() else 'cpu'`, is not the session's. Write "
                f"device='lazygt', or leave the device out, and move what was made before the "
                f"session with .to('lazygt'). If it is meant so, open the session with "
                f"tracing=Tracing(default_device=False)."
            )

    def warn_if_never_entered(self) -> None:
        """Warn if the session was never entered; called by methods that need an open session."""
        if not self.entered:
            self._warn(
                f"the session made at {self._site} was never entered: nothing goes to its workers, "
                f"all is done by this process. Write `with lazygt.session() as s:` around the work."
            )

    def close(self) -> None:
        """Note that the session ends, or is garbage-collected."""
        self.warn_if_never_entered()
        self._finalizer.detach()

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note an optimizer's step; return whether the watch has ended."""
        if self._session() is None or not self._default_device:
            return True
        on_cpu = all(p.device.type == "cpu" for p in optimizer.param_groups[0]["params"][:1])
        self._steps = self._steps + 1 if on_cpu == self._on_cpu else 1
        self._on_cpu = on_cpu
        if not self.entered:
            self.warn_if_never_entered()
            return False
        if on_cpu and self._steps == _MAX_STEPS:
            self._warn(
                f"the optimizer that stepped at {expand(user_call_site(1))} trains parameters on "
                f"the CPU of this process, not on the workers of the session made at {self._site}. "
                f"Make the model in the session, or move it with .to('lazygt') before the "
                f"optimizer is made; tell a framework the device (docs/frameworks.md). If it is "
                f"meant so, open the session with tracing=Tracing(default_device=False)."
            )
        return self._steps >= _MAX_STEPS

    def _warn(self, text: str) -> None:
        """Issue the warning, unless one was issued or this is a forked child."""
        warned, self._warned = self._warned, True
        if not warned and os.getpid() == self._pid:
            warnings.warn(text, IdleWarning, stacklevel=2)
