"""Small programs on several ranks: what their plans exchange, and the numbers they come to.

A program is recorded once, on tensors that lie as it is said; its plan is made for a mesh of any
size, and run by all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.passes.sharding.marks import without_places
from lazygt.passes.sharding.programs import programs
from tests.sharding.world import run_sharded, run_whole

Tensor = torch.Tensor
#: ``place(value, placement)``: where a value is wanted; and the program's tensors.
Body = Callable[..., Any]


class Program(NamedTuple):
    """A recorded program, and the values that it starts from."""

    graph: Graph
    inputs: list[Tensor]
    params: list[Any]
    stored: list[Sharding]


def _flat(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [t for one in made for t in _flat(one)]


def recorded(
    body: Body, tensors: Sequence[Tensor], placements: Sequence[Placement], fixed: bool = False
) -> Program:
    """A program on tensors that lie so."""
    with lazygt.session(
        launcher="inline", planning=lazygt.Planning(keep_stages=True), compile="off", mesh={"x": 1}
    ) as s:

        def place(value: Tensor, placement: Placement) -> Tensor:
            return lazygt.distribute(value, {"x": placement})

        lazy = [t.detach().to("lazygt").requires_grad_(t.requires_grad) for t in tensors]
        s.flush()
        made = _flat(body(place, *lazy))
        trace = s.recorder.trace
        store = s._link._worker.store  # type: ignore[attr-defined]
        entered = [store.get(remote.id).clone() for remote in trace.entered]
        params = list(trace.params)
        s.flush()
        assert s.last_plan is not None
        graph = dict(s.stages(s.last_plan))["recorded"]
        del made
    where = [_which(value, tensors) for value in entered]
    stored = [Sharding((placements[at],), fixed and placements[at] != Replicate()) for at in where]
    return Program(graph, entered, params, stored)


def _which(value: Tensor, tensors: Sequence[Tensor]) -> int:
    """Which of the program's tensors entered as this value."""
    return next(
        at for at, t in enumerate(tensors) if t.dtype == value.dtype and torch.equal(t, value)
    )


def exchanged(program: Program, ranks: int) -> list[tuple[str, int]]:
    """(kind, payload in bytes) of each collective of rank 0, in order."""
    mesh = Mesh(("x",), (ranks,))
    made = programs(program.graph, mesh, program.stored)
    return [(c.kind, c.nbytes) for c in communications(made.graphs[0], mesh)]


def ring(program: Program, ranks: int) -> int:
    """Bytes that rank 0 sends."""
    mesh = Mesh(("x",), (ranks,))
    made = programs(program.graph, mesh, program.stored)
    return sum(c.ring_bytes for c in communications(made.graphs[0], mesh))


def check_numbers(program: Program, ranks: int, close: float = 1e-5) -> None:
    """Assert that ranks come to what eager torch does."""
    mesh = Mesh(("x",), (ranks,))
    made = run_sharded(program.graph, mesh, program.stored, program.inputs, program.params)
    expected = run_whole(without_places(program.graph), program.inputs, program.params)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=close, atol=close, equal_nan=True)


# -- programs whose best plan is known -------------------------------------------------------------


class Known(NamedTuple):
    """A program, where its tensors lie, and the fewest bytes that a rank can send."""

    body: Body
    tensors: Sequence[Tensor]
    placements: Sequence[Placement]
    best: Callable[[int], float]
    fixed: bool = False


class Programs(dict[str, Known]):
    """Programs by name, each recorded once."""

    def known(
        self,
        tensors: Sequence[Tensor],
        placements: Sequence[Placement],
        best: Callable[[int], float],
        fixed: bool = False,
    ) -> Callable[[Body], Body]:
        """Add a function as a program, under its name."""

        def add(body: Body) -> Body:
            self[body.__name__] = Known(body, tensors, placements, best, fixed)
            return body

        return add

    @cache  # noqa: B019 - it lives as long as its module
    def program(self, name: str) -> Program:
        """What it records."""
        body, tensors, placements, _, fixed = self[name]
        return recorded(body, tensors, placements, fixed)

    def check_bytes(self, name: str, ranks: int) -> None:
        """Assert that rank 0 sends no more than it has to."""
        best, made = self[name].best(ranks), self.program(name)
        assert ring(made, ranks) <= best * 1.001 + 4, exchanged(made, ranks)

    def __hash__(self) -> int:
        return id(self)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) / 4


def weight(*shape: int) -> Tensor:
    return draw(*shape).requires_grad_()


def whole_numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def sent(nbytes: int, ranks: int) -> float:
    """Around a ring by a gather of so many bytes, or by a reduction to blocks."""
    return nbytes * (ranks - 1) / ranks


def moved(nbytes: int, ranks: int) -> float:
    """By an exchange of the blocks of so many bytes."""
    return sent(nbytes, ranks) / ranks


def reduced(nbytes: int, ranks: int) -> float:
    return 2 * sent(nbytes, ranks)


R, S = Replicate(), Shard

Place = Callable[[Tensor, Placement], Tensor]

PRODUCT = (draw(256, 2048), draw(2048, 256))

PARTIAL = (S(1), S(0))  #: so their product is a partial sum
