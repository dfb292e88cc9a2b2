"""Says once when a session is there, and the client does the work that it was opened for.

Nothing tells the CPU ops that somebody wants from those that should have gone to the workers. But
it is likely where optimizers step on the CPU again and again, where a session is never entered, and
where one ends that has recorded nothing while gradients or new tensors were asked of the CPU.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any, ClassVar

import torch

from lazygt.errors import IdleWarning
from lazygt.graph.source import expand, user_call_site

#: Steps on the CPU that are taken for a comparison, or for something small aside; after as many on
#: the workers, one after the other, nobody looks any more.
_MOST_STEPS = 3
_autograd: Any = torch.autograd


class Idle:
    """Watches a session from the time it is made until it is closed; says one thing at most."""

    #: entered in this process
    sessions: ClassVar[int] = 0

    def __init__(self, session: object, default_device: bool) -> None:
        self._default_device = default_device
        self.entered = self._said = False
        #: a tensor was made in the session on a device of torch's own
        self.made_elsewhere = False
        #: how many nodes autograd had made on this thread, and how many sessions this process had
        #: entered, when this one was
        self._nodes = self._sessions = 0
        self._made = expand(user_call_site(1))
        self._owner = os.getpid()
        self._session = weakref.ref(session)
        #: of optimizers in one place, since one in the other
        self._steps = 0
        self._here = True
        self._end = weakref.finalize(session, self.close)

    def enter(self) -> None:
        """The session is entered, maybe once more."""
        if not self.entered:
            Idle.sessions += 1
            self._sessions, self._nodes = Idle.sessions, _autograd._get_sequence_nr()
        self.entered = True

    def ended_unused(self) -> None:
        """The session has ended well, and has neither recorded nor uploaded anything."""
        alone = Idle.sessions == self._sessions  # else nodes may be of the other one's ops
        graded = alone and _autograd._get_sequence_nr() > self._nodes
        if self._default_device and (self.made_elsewhere or graded):
            self._say(
                f"the session made at {self._made} has ended and has recorded nothing: what was "
                f"computed meanwhile was computed by this process. A device of torch's own, as of "
                f"`'cuda' if torch.cuda.is_available() else 'cpu'`, is not the session's. Write "
                f"device='lazygt', or leave the device out, and move what was made before the "
                f"session with .to('lazygt'). If it is meant so, open the session with "
                f"default_device=False."
            )

    def used(self) -> None:
        """A method was called that makes sense in a session only."""
        if not self.entered:
            self._say(
                f"the session made at {self._made} was never entered: nothing goes to its workers, "
                f"all is done by this process. Write `with lazygt.session() as s:` around the work."
            )

    def close(self) -> None:
        """The session ends, or is collected."""
        self.used()
        self._end.detach()

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer has stepped; whether there is nothing more to look for."""
        if self._session() is None or not self._default_device:
            return True
        here = all(p.device.type == "cpu" for p in optimizer.param_groups[0]["params"][:1])
        self._steps = self._steps + 1 if here == self._here else 1
        self._here = here
        if not self.entered:
            self.used()
            return False
        if here and self._steps == _MOST_STEPS:
            self._say(
                f"the optimizer that stepped at {expand(user_call_site(1))} trains parameters on "
                f"the CPU of this process, not on the workers of the session made at {self._made}. "
                f"Make the model in the session, or move it with .to('lazygt') before the "
                f"optimizer is made; tell a framework the device (docs/frameworks.md). If it is "
                f"meant so, open the session with default_device=False."
            )
        return self._steps >= _MOST_STEPS

    def _say(self, text: str) -> None:
        said, self._said = self._said, True
        if not said and os.getpid() == self._owner:
            warnings.warn(text, IdleWarning, stacklevel=2)
