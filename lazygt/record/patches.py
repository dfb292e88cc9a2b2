"""What of torch's has lazygt's own in its place, why, and how it is put back.

torch has hooks for nearly all that a device does. Where it has none, one of its attributes is
replaced: each is a ``Patch`` beside the function that stands in, and ``device`` applies them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of torch's that is replaced.

    Attributes:
        owner: the module or class that has it.
        ours: what stands there instead.
        why: what torch has no hook for.
    """

    owner: Any
    name: str
    ours: Any
    why: str

    def __str__(self) -> str:
        path = getattr(self.owner, "__qualname__", None)
        title = f"{self.owner.__module__}.{path}" if path else self.owner.__name__
        return f"{title}.{self.name}: {self.why}"


class Patches:
    """Patches that are made and undone together; nothing happens to those that are made already."""

    def __init__(self, *patches: Patch) -> None:
        self.patches = patches
        #: patch -> what stood there in the owner's own namespace; those alone that are made
        self._originals: dict[Patch, Any] = {}

    def apply(self) -> None:
        """Put ours there."""
        for patch in self.patches:
            if patch not in self._originals:
                self._originals[patch] = vars(patch.owner).get(patch.name, _INHERITED)
                setattr(patch.owner, patch.name, patch.ours)

    def undo(self) -> None:
        """Put torch's own back."""
        while self._originals:
            patch, original = self._originals.popitem()
            if original is _INHERITED:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, original)


_INHERITED = object()
