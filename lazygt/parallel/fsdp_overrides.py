"""Overrides of the arguments of every ``fully_shard`` call, for parameter sweeps.

with forced_knobs(wrap="one", reshard_after_forward=False) as forced:
    ...                     # every call of fully_shard here gets these arguments
forced.check()              # raises if no call used the arguments

A script may call ``fully_shard`` for each block, and then for the full model. A forced ``wrap``
applies to the full model: the last call for a parameter decides its unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

#: Predicate of a module's name and the module: it is the root of a unit.
Roots = Callable[[str, nn.Module], bool]
Wrap = Literal["auto", "block", "one", "block2"] | Roots


class Knobs(NamedTuple):
    """Sweepable arguments of ``fully_shard``."""

    wrap: Wrap = "auto"
    bucket_cap_mb: float | None = None
    reshard_after_forward: bool | int | None = True
    limit_all_gathers: bool = True


@dataclass
class Forced:
    """Overridden arguments, with counts of the affected calls.

    Attributes:
        calls: number of calls of ``fully_shard`` so far.
        without_blocks: number of calls that kept their own ``wrap`` against a forced ``"block"``,
            because their modules have no repeated blocks.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 0
    without_blocks: int = 0

    @property
    def rewraps(self) -> bool:
        """True if a call moves parameters out of an earlier call's unit."""
        return "wrap" in self.overrides

    def apply(self, requested: Knobs, has_blocks: Callable[[], bool]) -> Knobs:
        """Count a call, and return its settings: the arguments ``requested`` with the overrides.

        A forced ``wrap="block"`` leaves modules without repeated blocks as they are.

        Args:
            has_blocks: function that returns whether the call's module has repeated blocks.
        """
        self.calls += 1
        knobs = requested._replace(**self.overrides)
        if self.rewraps and knobs.wrap == "block" and not has_blocks():
            self.without_blocks += 1
            return knobs._replace(wrap=requested.wrap)
        return knobs

    def check(self) -> None:
        """Raise if the overrides had no effect.

        Raises:
            ValueError: there was no call, or no call's module had repeated blocks.
        """
        if self.overrides and not self.calls:
            names = ", ".join(self.overrides)
            raise ValueError(
                f"{names}: the script never calls lazygt.fully_shard, whose arguments these are"
            )
        if self.calls and self.calls == self.without_blocks:
            raise ValueError(
                "wrap='block': no module that fully_shard is called on has repeated blocks in a "
                "ModuleList or Sequential"
            )


_forced = Forced()


def knobs_for(requested: Knobs, has_blocks: Callable[[], bool]) -> Knobs:
    """Return the settings of a call of ``fully_shard``; see ``Forced.apply``."""
    return _forced.apply(requested, has_blocks)


def forced_reshard(requested: bool) -> bool:
    """Return the argument of ``set_reshard_after_forward``, or its override."""
    return bool(_forced.overrides.get("reshard_after_forward", requested))


def rewraps() -> bool:
    """See ``Forced.rewraps``."""
    return _forced.rewraps


@contextmanager
def forced_knobs(**overrides: Any) -> Iterator[Forced]:
    """Context in which every call of ``fully_shard`` gets these settings.

    Args:
        overrides: fields of ``Knobs``.

    Raises:
        TypeError: there is no such field.
    """
    global _forced
    unknown = sorted(set(overrides) - set(Knobs._fields))
    if unknown:
        raise TypeError(f"forced_knobs({unknown[0]}=...): expected {', '.join(Knobs._fields)}")
    previous, _forced = _forced, Forced(overrides)
    try:
        yield _forced
    finally:
        _forced = previous
