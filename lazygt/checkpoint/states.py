"""States of registered objects: nested containers, with the tensors in them separate.

Each tensor is a *leaf* with a number; `encoding` has the rest as bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from lazygt.errors import CheckpointError
from lazygt.graph.meta import dtype_of

#: Sizes or strides of a tensor; torch has 64 dimensions at most.
Sizes = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=64)
]


class Leaf(msgspec.Struct, frozen=True):
    """A tensor of a state.

    Attributes:
        lazy: True if it is a tensor of the session, not of the CPU.
        placements: its placements on the mesh, as text; none: whole on every worker.
    """

    dtype: str
    shape: Sizes
    stride: Sizes
    lazy: bool = False
    placements: tuple[Annotated[str, msgspec.Meta(pattern=r"^(R|[SH]\(\d{1,6}\))$")], ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype; raises ValueError if torch has none of that name."""
        return dtype_of(self.dtype)

    def fits(self, nbytes: int) -> bool:
        """Return whether a tensor of this dtype, shape and stride takes exactly ``nbytes``."""
        if len(self.shape) != len(self.stride):
            return False
        numel = math.prod(self.shape)
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return numel * self.torch_dtype.itemsize == nbytes and numel in (0, extent)


# -- one object ----------------------------------------------------------------------------


class _Way(NamedTuple):
    """Getter and setter of the state of a kind of objects."""

    kind: type
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _set_dict(given: dict[Any, Any], state: dict[Any, Any]) -> None:
    given.clear()
    given.update(state)


def _set_tensor(given: Tensor, state: Tensor) -> None:
    with torch.no_grad():
        given.copy_(state)


def check_numpy(position: Any, words: int = 624) -> None:
    """Raise ValueError for a position outside a generator's words: NumPy does not check."""
    if not 0 <= position <= words:
        raise ValueError(f"the place {position} among {words} words of a NumPy generator")


def _set_numpy(given: np.random.Generator, state: dict[str, Any]) -> None:
    if isinstance(given.bit_generator, np.random.MT19937):
        check_numpy(state["state"]["pos"])
    elif "buffer_pos" in state:
        check_numpy(state["buffer_pos"], len(state["buffer"]))
    given.bit_generator.state = state


_WAYS = (
    _Way(Tensor, lambda t: t.detach(), _set_tensor),
    _Way(torch.Generator, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    _Way(random.Random, lambda r: r.getstate(), lambda r, state: r.setstate(state)),
    _Way(
        np.random.Generator,
        lambda g: g.bit_generator.state,
        _set_numpy,
    ),
    _Way(dict, dict, _set_dict),
)


def _way(given: Any) -> _Way | None:
    if callable(getattr(given, "state_dict", None)) and callable(
        getattr(given, "load_state_dict", None)
    ):
        return _Way(object, lambda o: o.state_dict(), lambda o, state: o.load_state_dict(state))
    return next((way for way in _WAYS if isinstance(given, way.kind)), None)


def check_registered(name: str, given: Any) -> None:
    """Raise TypeError for an object without a state that could be saved and loaded."""
    if _way(given) is None:
        raise TypeError(
            f"register({name}={given!r:.60}): a {type(given).__name__} has no state_dict() and "
            f"load_state_dict(). A plain value goes with each checkpoint: "
            f"session.checkpoint(step, {name}=...)"
        )


def state_of(given: Any) -> Any:
    """Return the state of a registered object; its tensors may be the object's own."""
    way = _way(given)
    assert way is not None
    return way.get(given)


def load(given: Any, state: Any) -> None:
    """Load a state into a registered object."""
    way = _way(given)
    assert way is not None
    way.set(given, state)


def class_of(given: Any) -> str:
    """Return the class name of an object; of a sharded module, that of its plain class."""
    if isinstance(given, Tensor):
        return Tensor.__qualname__
    kind: type = getattr(type(given), "__plain_class__", type(given))
    return kind.__qualname__


# -- comparison with a saved state ---------------------------------------------------------


def check(path: Any, name: str, given: Any, saved_class: str, state: Any) -> None:
    """Raise CheckpointError unless a saved state can be this object's.

    Args:
        state: the saved state, with a ``Leaf`` for each tensor.
    """
    if saved_class != class_of(given):
        why = f"{name!r} was a {saved_class}, and is a {class_of(given)} here"
    elif isinstance(given, nn.Module | Tensor):
        why = next(_differences(name, _tensors(state_of(given)), _tensors(state)), "")
    elif isinstance(given, torch.optim.Optimizer):
        groups = [len(group["params"]) for group in given.param_groups]
        saved = [len(group["params"]) for group in state["param_groups"]]
        why = "" if groups == saved else (
            f"{name!r} had {saved} parameters in its groups, and has {groups} here"
        )  # fmt: skip
    else:
        why = ""
    if why:
        raise CheckpointError(path, f"it is of another program: {why}. Nothing was loaded")


def _tensors(state: Any) -> dict[str, str]:
    """Return the tensors of a flat state, each described for errors."""
    items = state.items() if isinstance(state, Mapping) else [("", state)]
    return {key: _told(value) for key, value in items if isinstance(value, Tensor | Leaf)}


def _told(value: Tensor | Leaf) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}"


def _differences(name: str, here: Mapping[str, str], saved: Mapping[str, str]) -> Iterator[str]:
    for key in {**here, **saved}:
        if here.get(key) != saved.get(key):
            whole = f"{name}.{key}" if key else name
            yield (
                f"{whole} was {saved.get(key, 'not there')}, and is "
                f"{here.get(key, 'not there')} here"
            )


def pairs(here: Any, saved: Any) -> Iterable[tuple[Tensor, Leaf]]:
    """Yield the tensors of a state, each with the leaf in its place in a saved state."""
    if isinstance(saved, Leaf):
        if isinstance(here, Tensor):
            yield here, saved
    elif isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key, value in saved.items():
            if key in here:
                yield from pairs(here[key], value)
    elif isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        for item, other in zip(here, saved, strict=False):
            yield from pairs(item, other)
