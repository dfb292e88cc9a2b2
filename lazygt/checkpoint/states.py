"""The states of registered objects: nested containers, told apart from the tensors in them.

A state is pickled without its tensors, each of which is a *leaf* with a number. Only classes that
can do no harm are unpickled: a checkpoint may come from anywhere.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from lazygt.errors import CheckpointError

#: What states may hold besides numbers, strings, lists, tuples, dicts and tensors.
_CLASSES = {
    "builtins": {"set", "frozenset", "complex", "slice", "range", "bytearray",
                 "bool", "int", "float", "str", "list", "dict"},
    "collections": {"OrderedDict", "defaultdict", "deque", "Counter"},
    "torch": {"Size", "device"},
    "numpy": {"ndarray", "dtype"},
}  # fmt: skip
#: numpy's own, in whatever module of it
_NUMPYS = {"_reconstruct", "_frombuffer", "scalar"}


class Leaf(msgspec.Struct, frozen=True):
    """A tensor of a state.

    Attributes:
        lazy: it is of the session, not on the CPU.
        placements: how it lay on the mesh, as text; none: whole on every worker.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lazy: bool = False
    placements: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


# -- one object ----------------------------------------------------------------------------


class _Way(NamedTuple):
    """How the state of a kind of objects is asked for, and given back."""

    kind: type
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _set_dict(given: dict[Any, Any], state: dict[Any, Any]) -> None:
    given.clear()
    given.update(state)


def _set_tensor(given: Tensor, state: Tensor) -> None:
    with torch.no_grad():
        given.copy_(state)


_WAYS = (
    _Way(Tensor, lambda t: t.detach(), _set_tensor),
    _Way(torch.Generator, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    _Way(random.Random, lambda r: r.getstate(), lambda r, state: r.setstate(state)),
    _Way(
        np.random.Generator,
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
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
    """Raise TypeError for what has no state that could be saved and loaded."""
    if _way(given) is None:
        raise TypeError(
            f"register({name}={given!r:.60}): a {type(given).__name__} has no state_dict() and "
            f"load_state_dict(). A plain value goes with each checkpoint: "
            f"session.checkpoint(step, {name}=...)"
        )


def state_of(given: Any) -> Any:
    """The state of a registered object; its tensors may be the object's own."""
    way = _way(given)
    assert way is not None
    return way.get(given)


def load(given: Any, state: Any) -> None:
    """Give a registered object a state."""
    way = _way(given)
    assert way is not None
    way.set(given, state)


def class_of(given: Any) -> str:
    """What kind of object it is, as checkpoints have it: of a module in blocks, what it was."""
    if isinstance(given, Tensor):
        return Tensor.__qualname__
    kind: type = getattr(type(given), "__plain_class__", type(given))
    return kind.__qualname__


# -- texts ---------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, leaf: Callable[[Tensor], int]) -> None:
        super().__init__(file, protocol=5)
        self._leaf = leaf

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, Tensor):
            return "tensor", self._leaf(value)
        if isinstance(value, torch.dtype):
            return "dtype", str(value).removeprefix("torch.")
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensor: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, told: tuple[str, Any]) -> Any:
        kind, value = told
        return self._tensor(value) if kind == "tensor" else getattr(torch, value)

    def find_class(self, module: str, name: str) -> Any:
        room = module.partition(".")[0]
        if name in _CLASSES.get(module, ()) or (room == "numpy" and name in _NUMPYS):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def encoded(name: str, state: Any, leaf: Callable[[Tensor], int]) -> bytes:
    """A state without its tensors.

    Args:
        leaf: is given each of them; its number.

    Raises:
        TypeError: there is something in it that would not be loaded again.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, leaf).dump(state)
        data = file.getvalue()
        decoded(data, lambda number: None)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the state of {name!r} can't be saved: {error}. It may hold tensors, numbers, "
            f"strings, NumPy arrays, and lists, tuples, sets and dicts of them"
        ) from error
    return data


def decoded(data: bytes, tensor: Callable[[int], Any]) -> Any:
    """A state again.

    Args:
        tensor: number of a leaf -> what is to stand there.

    Raises:
        UnpicklingError: it has something that no checkpoint has.
    """
    return _Unpickler(data, tensor).load()


# -- whose state it is ---------------------------------------------------------------------


def check(path: Any, name: str, given: Any, saved_class: str, state: Any) -> None:
    """Raise CheckpointError unless a saved state can be this object's.

    Args:
        state: with a ``Leaf`` for each tensor.
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
    """The tensors of a flat state, each as it is told in errors."""
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
    """The tensors of a state, each with the leaf that stands in its place in a saved one."""
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
