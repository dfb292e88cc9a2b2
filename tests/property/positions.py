"""Programs whose positions change from turn to turn.

A program is a list of steps, done turn after turn with other positions; what earlier turns have
made stays, and is looked at and written through later.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from hypothesis import strategies as st

TURNS = 5

Step = tuple[str, int, int, int]


class Turns:
    """The tensors of a program on one device, and what was read of them."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.drawn = device, Random(seed)
        self.bases = [
            torch.arange(60.0, device="cpu").view(5, 4, 3).to(device),
            torch.arange(28, device="cpu").view(4, 7).t().to(device),
        ]
        self.views = list(self.bases)
        self.read: list[object] = []

    def position(self, size: int) -> int:
        """Any index of a dim, from either end."""
        return self.drawn.randrange(-size, size)

    def dim(self, t: torch.Tensor, which: int) -> int | None:
        """A dim with elements."""
        dims = [dim for dim, size in enumerate(t.shape) if size > 0]
        return dims[which % len(dims)] if dims else None

    def piece(self, t: torch.Tensor, a: int, b: int) -> torch.Tensor | None:
        """Some elements along a dim, as many in every turn."""
        dim = self.dim(t, a)
        if dim is None:
            return None
        length = 1 + b % t.shape[dim]
        start = self.drawn.randrange(t.shape[dim] - length + 1)
        if dim == 0:
            return t[start : start + length]
        return t.narrow(dim, start, length)

    def turn(self, steps: list[Step]) -> None:
        """Every step once."""
        for name, a, b, c in steps:
            STEPS[name](self, self.views[a % len(self.views)], b, c)
        self.views = self.bases + self.views[-6:]

    def show(self, t: torch.Tensor | None) -> None:
        if t is not None:
            self.views.append(t)


def select(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    dim = p.dim(t, a)
    if dim is not None:
        p.show(t.select(dim, p.position(t.shape[dim])))


def cut(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    p.show(p.piece(t, a, b))


def turned(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    if t.dim() > 1:
        p.show(t.transpose(a % t.dim(), b % t.dim()))


def bits(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    """The same memory in a dtype of the same size, or of half."""
    if t.dtype in (torch.int64, torch.float32):
        p.show(t.view(torch.int32 if t.dtype == torch.float32 else torch.float64))


def unbound(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    dim = p.dim(t, a)
    if dim is not None:
        parts = t.unbind(dim)
        p.show(parts[b % len(parts)])


def strided(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    p.show(t.as_strided(t.shape[:1], t.stride()[:1]))


def add(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    t.add_(b)


def overlapping(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    """Two parts of one memory, one of which is written between two looks at the other."""
    here, there = p.piece(t, a, b), p.piece(t, a, b)
    if here is not None and there is not None:
        before = there * 2
        here.add_(3)
        p.read.append((before + there * 5 - here).tolist())


def put(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    if t.dim() and t.shape[0]:
        t[p.position(t.shape[0])] = a - b


def copied(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    part = p.piece(t, a, b)
    if part is not None:
        part.copy_(p.views[b % 2].flatten()[0].clone())


def scattered(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    t = t * 1
    dim = p.dim(t, a)
    if dim is not None:
        at = p.position(t.shape[dim])
        p.show(torch.select_scatter(t, t.select(dim, 0) * 2, dim, at))


def slice_scattered(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    t = t * 1
    dim, part = p.dim(t, a), p.piece(t, a, b)
    if dim is not None and part is not None:
        start = p.drawn.randrange(t.shape[dim] - part.shape[dim] + 1)
        end = start + part.shape[dim]
        p.show(torch.slice_scatter(t, part * 2, dim, start, end))


def rolled(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    if t.dim():
        p.show(torch.roll(t, p.drawn.randrange(-3, 9), a % t.dim()))


def counted(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    start = p.drawn.randrange(9)
    p.show(torch.arange(start, start + 1 + b % 4, device=p.device))


def gradient(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    """Of two pieces, the second one with a hole that is filled in place."""
    if not t.dtype.is_floating_point or not t.numel() or not t.dim():
        return
    leaf = t.detach().clone().requires_grad_()
    twice = leaf * 2
    part = p.piece(leaf, a, b)
    dim = p.dim(twice, b)
    assert part is not None
    assert dim is not None
    twice.select(dim, p.position(twice.shape[dim])).mul_(3)
    (part.square().sum() + twice.sin().sum()).backward()
    assert leaf.grad is not None
    p.read.append(leaf.grad.tolist())


def look(p: Turns, t: torch.Tensor, a: int, b: int) -> None:
    places = (t.storage_offset(), t.data_ptr() - t.untyped_storage().data_ptr(), t.stride())
    p.read.append((t.tolist(), places if t.numel() else None))


STEPS: dict[str, Callable[[Turns, torch.Tensor, int, int], None]] = {
    step.__name__: step
    for step in (
        select, cut, turned, bits, unbound, strided, add, overlapping, put, copied, scattered,
        slice_scattered, rolled, counted, gradient, look,
    )
}  # fmt: skip

NUMBERS = st.integers(0, 11)

PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), NUMBERS, NUMBERS, NUMBERS),
                    min_size=1, max_size=8)  # fmt: skip


def run(device: str, program: list[Step], seed: int, flush: Callable[[], None]) -> list[object]:
    """Everything that is read, errors included."""
    turns = Turns(device, seed)
    for _ in range(TURNS):
        try:
            turns.turn(program)
        except (RuntimeError, IndexError) as error:
            turns.read.append(str(error).splitlines()[0])
        flush()
    turns.read += [view.tolist() for view in turns.views]
    return turns.read
