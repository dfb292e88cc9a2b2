"""Patches of torch: attributes replaced by lazygt's own, with reasons, and their undoing.

torch has hooks for nearly all that a device does. Where it has none, one of its attributes is
replaced. Each replacement is a ``Patch``, defined beside the replacing function; ``device`` applies
them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of one attribute of torch's."""

    owner: Any  # the module or class that has it
    name: str
    ours: Any  # the replacement
    why: str  # the reason: the behaviour that torch has no hook for

    def __str__(self) -> str:
        path = getattr(self.owner, "__qualname__", None)
        title = f"{self.owner.__module__}.{path}" if path else self.owner.__name__
        return f"{title}.{self.name}: {self.why}"


class Patches:
    """Patches that are applied and undone together; applying them again changes nothing."""

    def __init__(self, *patches: Patch) -> None:
        self.patches = patches
        #: applied patch -> the original in the owner's own namespace
        self._originals: dict[Patch, Any] = {}

    def apply(self) -> None:
        """Set lazygt's attributes; patches that are applied already are skipped."""
        for patch in self.patches:
            if patch not in self._originals:
                self._originals[patch] = vars(patch.owner).get(patch.name, _INHERITED)
                setattr(patch.owner, patch.name, patch.ours)

    def undo(self) -> None:
        """Restore torch's own attributes."""
        while self._originals:
            patch, original = self._originals.popitem()
            if original is _INHERITED:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, original)


_INHERITED = object()
