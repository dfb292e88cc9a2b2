"""States of checkpoints as MessagePack, in a closed set of types that run no code.

None, booleans, numbers, strings and bytes stand for themselves. Everything else is an array of a
name from `_KINDS` and its fields. A reader makes only values of that table: it imports no module,
looks up no attribute by name, and takes no more memory than the bytes it reads.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from lazygt.graph.meta import TORCH_NAMES, torch_name

#: Maximum depth of nested containers.
_DEPTH = 100
_INT64 = range(-(1 << 63), 1 << 63)
_PLAIN = (type(None), bool, float, str, bytes)
#: Types that may be values themselves, such as the factory of a ``defaultdict``.
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, list, tuple, set, dict)}
_DEVICES = frozenset({"cpu", "cuda", "lazygt", "meta", "mps", "xpu"})
#: Simple NumPy dtypes: no objects, no fields, and no text that NumPy would interpret.
_DTYPE = re.compile(r"[<>|=](?:[biufcSUV]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-z]{1,2}\])?)")


class _Kind(NamedTuple):
    """Supported type: a value is encoded as its fields, which are encoded in turn."""

    type: type
    fields: Callable[[Any], Iterable[Any]]  # value -> fields
    make: Callable[[Sequence[Any]], Any]  # fields -> value


# -- kinds: fields of values, and values from fields that a file has, which are checked ------------


def _flat(items: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield key, value, key, value ... of a mapping."""
    return (each for item in items.items() for each in item)


def _pairs(fields: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Invert `_flat`."""
    return zip(fields[::2], fields[1::2], strict=True)


def _checked(value: Any, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """Return a value of exactly this type, or one of these types; TypeError for others."""
    if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
        raise TypeError(f"a {type(value).__name__} in an unexpected place")
    return value


def _only(fields: Sequence[Any], kind: type[Any]) -> Any:
    """Return the only field, of this type."""
    (value,) = fields
    return _checked(value, kind)


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    """Parse the text of a dtype without objects and fields."""
    if not _DTYPE.fullmatch(_checked(text, str)):
        raise ValueError(f"{text!r:.40} is no NumPy dtype without objects and fields")
    dtype: np.dtype[Any] = np.dtype(text)
    return dtype


def _dtype_text(dtype: np.dtype[Any]) -> str:
    """Format a dtype; TypeError if it has objects or fields."""
    if not _DTYPE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
        raise TypeError(f"NumPy's dtype {dtype} has objects or fields")
    return dtype.str


def _array_fields(array: np.ndarray) -> Iterator[Any]:
    """Yield dtype, order of the elements (C or Fortran), shape and bytes."""
    data = array.tobytes("F" if array.flags.fnc else "C")
    order = "F" if array.flags.fnc else "C"
    return iter((_dtype_text(array.dtype), order, array.shape, data))


def _array(fields: Sequence[Any]) -> np.ndarray:
    """Invert `_array_fields`."""
    text, order, shape, data = fields
    dtype = _numpy_dtype(text)
    flat = np.frombuffer(_checked(data, bytes), dtype) if data else np.empty(0, dtype)
    if any(size < 0 for size in _checked(shape, tuple)):
        raise ValueError(f"the shape {shape} of an array")
    return flat.reshape(shape, order="F" if order == "F" else "C").copy(order="K")


def _scalar(fields: Sequence[Any]) -> Any:
    """Make a NumPy scalar of its dtype and bytes."""
    (number,) = _array([fields[0], "C", (1,), fields[1]])
    return number


def _default_fields(value: defaultdict[Any, Any]) -> Iterator[Any]:
    """Yield the factory, then the items as `_flat`."""
    yield value.default_factory
    yield from _flat(value)


def _default(fields: Sequence[Any]) -> defaultdict[Any, Any]:
    """Invert `_default_fields`."""
    factory = fields[0]
    if factory is not None and not isinstance(factory, type):
        raise TypeError("a factory that is no type")
    return defaultdict(factory, _pairs(fields[1:]))


def _type_name(value: type) -> str:
    """Return the name of one of `_TYPES`."""
    if _TYPES.get(value.__name__) is not value:
        raise TypeError(f"the class {value.__qualname__}")
    return value.__name__


def _device(fields: Sequence[Any]) -> torch.device:
    """Make a device of its type and index."""
    kind, index = fields
    if kind not in _DEVICES:
        raise ValueError(f"{kind!r:.40} is no device")
    return torch.device(kind) if index is None else torch.device(kind, _checked(index, int))


def _integers(fields: Sequence[Any]) -> tuple[Any, ...]:
    """Return the fields, all of which are integers or None."""
    return tuple(_checked(field, (int, type(None))) for field in fields)


_KINDS: dict[str, _Kind] = {
    "list": _Kind(list, iter, list),
    "tuple": _Kind(tuple, iter, tuple),
    "set": _Kind(set, iter, set),
    "frozenset": _Kind(frozenset, iter, frozenset),
    "dict": _Kind(dict, _flat, lambda f: dict(_pairs(f))),
    "OrderedDict": _Kind(OrderedDict, _flat, lambda f: OrderedDict(_pairs(f))),
    "Counter": _Kind(Counter, _flat, lambda f: Counter(dict(_pairs(f)))),
    "defaultdict": _Kind(defaultdict, _default_fields, _default),
    "deque": _Kind(deque, lambda v: (v.maxlen, *v), lambda f: deque(f[1:], f[0])),
    "int": _Kind(
        int,
        lambda v: (v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True),),
        lambda f: int.from_bytes(_only(f, bytes), "little", signed=True),
    ),
    "complex": _Kind(
        complex, lambda v: (v.real, v.imag), lambda f: complex(*(_checked(x, float) for x in f))
    ),
    "slice": _Kind(slice, lambda v: (v.start, v.stop, v.step), lambda f: slice(*f)),
    "range": _Kind(
        range, lambda v: (v.start, v.stop, v.step), lambda f: range(*_integers(f))
    ),
    "bytearray": _Kind(
        bytearray, lambda v: (bytes(v),), lambda f: bytearray(_only(f, bytes))
    ),
    "type": _Kind(type, lambda v: (_type_name(v),), lambda f: _TYPES[_only(f, str)]),
    "torch": _Kind(torch.dtype, lambda v: (str(v),), lambda f: torch_name(_only(f, str))),
    "size": _Kind(torch.Size, iter, lambda f: torch.Size(_integers(f))),
    "device": _Kind(torch.device, lambda v: (v.type, v.index), _device),
    "array": _Kind(np.ndarray, _array_fields, _array),
    "scalar": _Kind(np.generic, lambda v: (_dtype_text(v.dtype), v.tobytes()), _scalar),
    "dtype": _Kind(np.dtype, lambda v: (_dtype_text(v),), lambda f: _numpy_dtype(*f)),
}  # fmt: skip
_BY_TYPE = {kind.type: name for name, kind in _KINDS.items()} | dict.fromkeys(TORCH_NAMES, "torch")
_TENSOR = "tensor"


def _name_of(value: Any) -> str:
    """Return the name of a value's kind; TypeError if it has none."""
    name = _BY_TYPE.get(type(value))
    if name is not None:
        return name
    for kind in (np.generic, np.dtype):
        if isinstance(value, kind) and type(value).__module__.startswith("numpy"):
            return _BY_TYPE[kind]
    raise TypeError(f"a {type(value).__qualname__}")


# -- values --------------------------------------------------------------------------------


def encoded(name: str, state: Any, leaf: Callable[[Tensor], int]) -> bytes:
    """Encode a state without its tensors.

    Args:
        leaf: returns the number of a tensor, which is encoded in its place.

    Raises:
        TypeError: a value in it has a type that checkpoints don't support.
    """

    def fields(value: Any, depth: int) -> Any:
        """Return a value as MessagePack takes it: itself, or an array of its kind and fields."""
        if type(value) in _PLAIN or (type(value) is int and value in _INT64):
            return value
        if isinstance(value, Tensor):
            return [_TENSOR, leaf(value)]
        if not depth:
            raise TypeError(f"containers within containers, more than {_DEPTH}")
        kind = _name_of(value)
        return [kind, *(fields(field, depth - 1) for field in _KINDS[kind].fields(value))]

    try:
        return msgspec.msgpack.encode(fields(state, _DEPTH))
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: a lone surrogate
        raise TypeError(
            f"the state of {name!r} can't be saved: {error}. It may hold tensors, numbers, "
            f"strings, NumPy arrays, and lists, tuples, sets and dicts of them"
        ) from error


def decoded(data: bytes, tensor: Callable[[int], Any]) -> Any:
    """Decode a state from the bytes of ``encoded``.

    Args:
        tensor: function from a tensor's number to the value that replaces it.

    Raises:
        ValueError: the bytes are no encoded state.
    """

    def value(item: Any, depth: int) -> Any:
        """Invert `fields` of ``encoded``, with checks."""
        if type(item) is not list:
            return _checked(item, (*_PLAIN, int))
        if not item or not depth:
            raise ValueError("an empty array, or too many within each other")
        name, *fields = item
        if name == _TENSOR:
            return tensor(_only(fields, int))
        if type(name) is not str or name not in _KINDS:
            raise ValueError(f"it has a {name!r:.40}, which no checkpoint has")
        return _KINDS[name].make([value(field, depth - 1) for field in fields])

    try:
        return value(msgspec.msgpack.decode(data), _DEPTH)
    except (TypeError, LookupError, RuntimeError, OverflowError, msgspec.DecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
