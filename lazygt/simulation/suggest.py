"""Changes of a program that would help, found by simulating it with each of them.

change          how it is tried
reshard         ``reshard_after_forward``, ``bucket_cap_mb`` and ``wrap`` are forced upon calls of
bucket cap      ``fully_shard``, where there are any
wrap
checkpoints     the blocks that a ``ModuleList`` or ``Sequential`` repeats are computed again for
                their backward
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
_BATCHES = ("--batch", "--batch-size")
_LISTS = (nn.ModuleList, nn.Sequential)
#: So many are suggested.
_MOST = 3
#: The least gain that is worth a change.
_LEAST = 0.01
#: A share of memory is worth this share of time, where both ways there is enough.
_MEMORY = 0.25


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
        what: the change, in words for the user.
        knobs: that are forced upon ``fully_shard``.
        mesh: instead of the program's; None: its own.
        checkpoints: True if repeated blocks are computed again for their backward.
        arguments: of the script; None: its own.
        work: of a step, as a share of the present one.
    """

    what: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    checkpoints: bool = False
    arguments: Sequence[str] | None = None
    work: float = 1.0

    @contextmanager
    def made(self) -> Iterator[Forced]:
        """Apply the change for a block, but for its mesh and its arguments."""
        with forced_knobs(**self.knobs) as forced, blocks_checkpointed(self.checkpoints):
            yield forced


#: Nothing is changed.
AS_IT_IS = Trial("as it is")


class Suggestion(NamedTuple):
    """A change that would help, as simulated.

    Attributes:
        what: the change.
        seconds, peak_bytes: of a step with it.
        faster: the speedup.
        smaller: the peak, as a share of the present one.
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
        mesh: of the program.
        shards: True if it calls ``fully_shard``.
        arguments: of the script.
    """
    tried = list(_batches(arguments))
    if shards:
        tried += [
            Trial("reshard_after_forward=False", {"reshard_after_forward": False}),
            Trial("reshard_after_forward=True", {"reshard_after_forward": True}),
            Trial("bucket_cap_mb=100", {"bucket_cap_mb": 100.0}),
            Trial("wrap='one'", {"wrap": "one"}),
        ]
    tried.append(Trial("checkpoint each block", checkpoints=True))
    return tried + [Trial(f"mesh {other}", mesh=other) for other in _meshes(mesh)]


def _batches(arguments: Sequence[str]) -> Iterator[Trial]:
    for place, (name, value) in enumerate(itertools.pairwise(arguments)):
        if name in _BATCHES and value.isdigit():
            size = int(value)
            for other in (2 * size, *([size // 2] if size % 2 == 0 else ())):
                changed = [*arguments[: place + 1], str(other), *arguments[place + 2 :]]
                yield Trial(f"{name} {other}", arguments=changed, work=other / size)


def _meshes(mesh: Mesh | None) -> Iterator[Mesh]:
    """Yield the meshes with a factor of 2 moved from one axis to another."""
    if mesh is None:
        return
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    for fewer, more in itertools.permutations(mesh.names, 2):
        if sizes[fewer] % 2 == 0:
            yield Mesh.of({**sizes, fewer: sizes[fewer] // 2, more: 2 * sizes[more]})


def tried(
    everything: Iterable[Trial], run: Callable[[Trial], P]
) -> Iterator[tuple[Trial, P | None]]:
    """Run a program with each of some changes; None where that fails."""
    for trial in everything:
        try:
            yield trial, run(trial)
        except Exception:  # noqa: BLE001 - a program need not run in any other way than its own
            yield trial, None


def suggestions(
    now: Predicted, tried: Iterable[tuple[Trial, Predicted | None]]
) -> tuple[Suggestion, ...]:
    """Rank the changes that were tried, and return the most useful ones.

    Changes that fit into memory come first. Where both do, a share of memory that is saved counts
    as a quarter of the same share of time.

    Args:
        tried: changes with their predictions; None: it can't be done.
    """
    capacity = now.machine.memory.capacity
    scored = []
    for trial, other in tried:
        if other is None:
            continue
        told = _suggestion(trial, now, other, capacity)
        fits = (told.fits, now.peak_bytes <= capacity)
        if fits == (False, True):
            continue
        worth = told.faster - 1 + _MEMORY * (1 - told.smaller)
        better = (worth > _LEAST or not fits[1]) if told.fits else told.smaller < 1
        if better:
            scored.append(((told.fits, worth if told.fits else -told.smaller), told))
    scored.sort(key=lambda pair: pair[0], reverse=True)
    return tuple([told for _, told in scored[:_MOST]])


def _suggestion(trial: Trial, now: Predicted, other: Predicted, capacity: float) -> Suggestion:
    return Suggestion(
        trial.what, other.step_seconds, other.peak_bytes,
        trial.work * now.step_seconds / other.step_seconds, other.peak_bytes / now.peak_bytes,
        other.peak_bytes <= capacity,
    )  # fmt: skip


@contextmanager
def blocks_checkpointed(wanted: bool = True) -> Iterator[None]:
    """Context in which repeated blocks are computed again for their backward.

    These are blocks of one class that stand in one list and are made in the context.
    """
    if not wanted:
        yield
        return
    hook = register_module_module_registration_hook(_registered)
    try:
        yield
    finally:
        hook.remove()


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Checkpoint a new child of a list, and its siblings of the same class."""
    if child is None or not isinstance(parent, _LISTS) or not any(True for _ in child.children()):
        return
    alike = [other for other in parent.children() if type(other) is type(child)]
    for block in {id(one): one for one in (*alike, child)}.values() if alike else ():
        if "forward" not in vars(block):
            forward: Callable[..., Any] = block.forward
            block.forward = functools.partial(
                checkpoint, forward, use_reentrant=False, preserve_rng_state=False
            )
