"""Suggestions of changes to a program, found by simulating the program with each of them.

change          way of trying it
reshard         ``reshard_after_forward``, ``bucket_cap_mb`` and ``wrap`` are forced upon calls of
bucket cap      ``fully_shard``, if there are any
wrap
checkpoints     repeated blocks of a ``ModuleList`` or ``Sequential`` are recomputed in the backward
                (activation checkpointing)
mesh            twice as many ranks along an axis, and half along another
batch           the script's own argument ``--batch`` or ``--batch-size`` is doubled, and halved
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.checkpoint import checkpoint

from lazygt.graph.mesh import Mesh
from lazygt.graph.text import amount, duration
from lazygt.machine import Machine
from lazygt.parallel.fsdp_overrides import Forced, forced_knobs

#: Arguments of scripts that set the work of a step.
_BATCH_OPTIONS = ("--batch", "--batch-size")
_BLOCK_LISTS = (nn.ModuleList, nn.Sequential)
#: Number of suggestions, at most.
_MAX_SUGGESTIONS = 3
#: Minimum gain of a suggestion.
_MIN_GAIN = 0.01
#: Weight of a relative saving of memory against the same saving of time, if both programs fit.
_MEMORY_WEIGHT = 0.25


class Predicted(Protocol):
    """Figures of a step; see ``Prediction``."""

    @property
    def machine(self) -> Machine: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...


P = TypeVar("P", bound=Predicted)


@dataclass(frozen=True)
class Trial:
    """A change of a program.

    Attributes:
        what: description of the change for the user.
        knobs: overrides of arguments of ``fully_shard``.
        mesh: mesh in place of the program's; None: its own.
        checkpoints: True if repeated blocks are recomputed in the backward.
        arguments: arguments of the script; None: its own.
        work: work of a step, relative to the unchanged program.
    """

    what: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    checkpoints: bool = False
    arguments: Sequence[str] | None = None
    work: float = 1.0

    @contextmanager
    def applied(self) -> Iterator[Forced]:
        """Context with the change applied, except its mesh and its arguments."""
        with forced_knobs(**self.knobs) as forced, blocks_checkpointed(self.checkpoints):
            yield forced


#: The unchanged program.
UNCHANGED = Trial("as it is")


class Suggestion(NamedTuple):
    """A change that would help, as simulated.

    Attributes:
        what: the change.
        seconds, peak_bytes: time and peak memory of a step with the change.
        faster: the speedup, per unit of work.
        smaller: the peak, relative to the unchanged program.
        fits: True if the memory suffices.
    """

    what: str
    seconds: float
    peak_bytes: int
    faster: float
    smaller: float
    fits: bool

    def __str__(self) -> str:
        pace = f"{abs(self.faster - 1):.0%} {'more' if self.faster >= 1 else 'less'}"
        return (
            f"{self.what}: {duration(self.seconds)} a step ({pace} work a second), "
            f"peak {amount(self.peak_bytes, 'B')} ({self.smaller - 1:+.0%})"
        )


def trials(mesh: Mesh | None, shards: bool, arguments: Sequence[str] = ()) -> list[Trial]:
    """List the changes to try.

    Args:
        mesh: mesh of the program.
        shards: True if the program calls ``fully_shard``.
        arguments: arguments of the script.
    """
    changes = list(_batches(arguments))
    if shards:
        changes += [
            Trial("reshard_after_forward=False", {"reshard_after_forward": False}),
            Trial("reshard_after_forward=True", {"reshard_after_forward": True}),
            Trial("bucket_cap_mb=100", {"bucket_cap_mb": 100.0}),
            Trial("wrap='one'", {"wrap": "one"}),
        ]
    changes.append(Trial("checkpoint each block", checkpoints=True))
    return changes + [Trial(f"mesh {other}", mesh=other) for other in _meshes(mesh)]


def _batches(arguments: Sequence[str]) -> Iterator[Trial]:
    """Yield the changes of the batch size among a script's arguments."""
    for index, (name, value) in enumerate(itertools.pairwise(arguments)):
        if name in _BATCH_OPTIONS and value.isdigit():
            size = int(value)
            for other in (2 * size, *([size // 2] if size % 2 == 0 else ())):
                changed = [*arguments[: index + 1], str(other), *arguments[index + 2 :]]
                yield Trial(f"{name} {other}", arguments=changed, work=other / size)


def _meshes(mesh: Mesh | None) -> Iterator[Mesh]:
    """Yield the meshes with a factor of 2 moved from one axis to another."""
    if mesh is None:
        return
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    for fewer, more in itertools.permutations(mesh.names, 2):
        if sizes[fewer] % 2 == 0:
            yield Mesh.of({**sizes, fewer: sizes[fewer] // 2, more: 2 * sizes[more]})


def run_trials(
    changes: Iterable[Trial], run: Callable[[Trial], P]
) -> Iterator[tuple[Trial, P | None]]:
    """Run a program with each change; yield the change and its prediction, None if it failed."""
    for trial in changes:
        try:
            yield trial, run(trial)
        except Exception:  # noqa: BLE001 - a changed program may fail in any way
            yield trial, None


def suggestions(
    now: Predicted, tried: Iterable[tuple[Trial, Predicted | None]]
) -> tuple[Suggestion, ...]:
    """Rank the changes that were tried, and return the most useful ones.

    Changes that fit into memory come first. Among these, a relative saving of memory counts a
    quarter of the same saving of time.

    Args:
        tried: changes with their predictions; None for a change that failed.
    """
    capacity = now.machine.memory.capacity
    scored = []
    for trial, other in tried:
        if other is None:
            continue
        suggestion = _suggestion(trial, now, other, capacity)
        fits_now = now.peak_bytes <= capacity
        if fits_now and not suggestion.fits:
            continue
        score = suggestion.faster - 1 + _MEMORY_WEIGHT * (1 - suggestion.smaller)
        # a program that does not fit gains by any change that fits, or else by a smaller peak
        better = (score > _MIN_GAIN or not fits_now) if suggestion.fits else suggestion.smaller < 1
        if better:
            scored.append(
                ((suggestion.fits, score if suggestion.fits else -suggestion.smaller), suggestion)
            )
    scored.sort(key=lambda pair: pair[0], reverse=True)
    return tuple([suggestion for _, suggestion in scored[:_MAX_SUGGESTIONS]])


def _suggestion(trial: Trial, now: Predicted, other: Predicted, capacity: float) -> Suggestion:
    """Build a suggestion from the predictions with and without a change."""
    return Suggestion(
        trial.what, other.step_seconds, other.peak_bytes,
        trial.work * now.step_seconds / other.step_seconds, other.peak_bytes / now.peak_bytes,
        other.peak_bytes <= capacity,
    )  # fmt: skip


@contextmanager
def blocks_checkpointed(wanted: bool = True) -> Iterator[None]:
    """Context in which repeated blocks are checkpointed: recomputed in their backward.

    These are blocks of one class in one list that are created in the context.
    """
    if not wanted:
        yield
        return
    hook = register_module_module_registration_hook(_checkpoint_block)
    try:
        yield
    finally:
        hook.remove()


def _checkpoint_block(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Checkpoint a new child of a list, and its siblings of the same class."""
    if (
        child is None
        or not isinstance(parent, _BLOCK_LISTS)
        or not any(True for _ in child.children())
    ):
        return
    alike = [other for other in parent.children() if type(other) is type(child)]
    for block in {id(other): other for other in (*alike, child)}.values() if alike else ():
        if "forward" not in vars(block):
            forward: Callable[..., Any] = block.forward
            block.forward = functools.partial(
                checkpoint, forward, use_reentrant=False, preserve_rng_state=False
            )
