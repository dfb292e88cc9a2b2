"""Origins: processes that hold a model's blocks and write them themselves.

A sender sees the workers of a session through this; how a session reaches them is its own affair.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from lazygt.graph.mesh import Mesh, Placements

if TYPE_CHECKING:
    from lazygt.transfer.orders import Order


class Located(NamedTuple):
    """Where a tensor's value is.

    Attributes:
        key: how its holders call it.
        held: an object that keeps the value alive.
    """

    key: int
    placement: Placements
    held: object


class Written(NamedTuple):
    """The answer to an order: see `orders.Answer`; or what went wrong."""

    rank: int
    number: int
    checks: Sequence[int]
    error: str
    handles: Sequence[Any] = ()


class Holders(Protocol):
    """The processes of one mesh, which have a model's blocks."""

    @property
    def mesh(self) -> Mesh: ...

    def order(self, rank: int, number: int, order: Order) -> None:
        """Have a rank write; does not wait."""

    def answers(self, seconds: float) -> list[Written]:
        """What has been answered; waits at most so long for it.

        Raises:
            WorkerDied, WorkerFrozen: a rank is gone, or does not answer.
        """

    def let_go(self, sender: str) -> None:
        """Have the ranks drop all places of a sender; does not wait."""


class Origin(Holders, Protocol):
    """Holders that tell where a tensor is.

    Attributes:
        turn: held by the transfer that takes the answers.
    """

    turn: threading.Lock

    def locate(self, tensors: Sequence[Tensor]) -> list[Located]:
        """Have the tensors computed; where each one is now."""


class Remote(NamedTuple):
    """A model that others hold: who they are, and its parameters by position."""

    origin: Origin
    tensors: Mapping[int, Tensor]


#: Type of device -> what finds the origin of a tensor on such a device.
BY_DEVICE: dict[str, Callable[[Any], Origin | None]] = {}


def origin_of(tensors: Sequence[Tensor]) -> Origin | None:
    """The origin of all of these tensors; None when there is none, or not one for all."""
    found: Origin | None = None
    for tensor in tensors:
        find = BY_DEVICE.get(tensor.device.type)
        origin = None if find is None else find(tensor)
        if origin is None or (found is not None and origin is not found):
            return None
        found = origin
    return found
