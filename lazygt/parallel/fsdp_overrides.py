"""Arguments forced upon every call of ``fully_shard``, for parameter sweeps.

with forced_knobs(wrap="one", reshard_after_forward=False) as forced:
    ...                     # every call of fully_shard meanwhile gets these
forced.check()              # raises where they had nothing to act upon

A script may call ``fully_shard`` for each block, and then for the whole model. A forced ``wrap`` is
that of the whole: the last call for a parameter decides its unit.
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
    """Settings of the gathering of parameters; see ``fully_shard``."""

    wrap: Wrap = "auto"
    bucket_cap_mb: float | None = None
    reshard_after_forward: bool | int | None = True
    limit_all_gathers: bool = True


@dataclass
class Forced:
    """Arguments forced upon calls, with counts of these.

    Attributes:
        calls: number of calls of ``fully_shard`` meanwhile.
        without_blocks: number of those that kept their own ``wrap``, since their modules have no
            repeated blocks.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 0
    without_blocks: int = 0

    @property
    def rewraps(self) -> bool:
        """True if a call takes over parameters that are in another call's unit."""
        return "wrap" in self.given

    def upon(self, asked: Knobs, has_blocks: Callable[[], bool]) -> Knobs:
        """Return the settings of a call that asks for ``asked``.

        Args:
            has_blocks: function that returns whether the call's module has repeated blocks.
        """
        self.calls += 1
        knobs = asked._replace(**self.given)
        if self.rewraps and knobs.wrap == "block" and not has_blocks():
            self.without_blocks += 1
            return knobs._replace(wrap=asked.wrap)
        return knobs

    def check(self) -> None:
        """Raise if nothing was forced upon anything.

        Raises:
            ValueError: there was no call, or no call's module had blocks to be wrapped.
        """
        if self.given and not self.calls:
            names = ", ".join(self.given)
            raise ValueError(
                f"{names}: the script never calls lazygt.fully_shard, whose arguments these are"
            )
        if self.calls and self.calls == self.without_blocks:
            raise ValueError(
                "wrap='block': no module that fully_shard is called on has repeated blocks in a "
                "ModuleList or Sequential"
            )


_forced = Forced()


def knobs_for(asked: Knobs, has_blocks: Callable[[], bool]) -> Knobs:
    """Return the settings of a call of ``fully_shard``; see ``Forced.upon``."""
    return _forced.upon(asked, has_blocks)


def reshards_as_told(asked: bool) -> bool:
    """Return the value that a call of ``set_reshard_after_forward`` gets."""
    return bool(_forced.given.get("reshard_after_forward", asked))


def rewraps() -> bool:
    """See ``Forced``."""
    return _forced.rewraps


@contextmanager
def forced_knobs(**given: Any) -> Iterator[Forced]:
    """Context in which every call of ``fully_shard`` gets these settings.

    Args:
        given: fields of ``Knobs``.

    Raises:
        TypeError: there is no such field.
    """
    global _forced
    unknown = sorted(set(given) - set(Knobs._fields))
    if unknown:
        raise TypeError(f"forced_knobs({unknown[0]}=...): expected {', '.join(Knobs._fields)}")
    before, _forced = _forced, Forced(given)
    try:
        yield _forced
    finally:
        _forced = before
