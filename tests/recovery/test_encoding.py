"""States as bytes: every type that checkpoints have comes back, and nothing else comes at all."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazygt.recovery.checkpoint import encoding
from lazygt.recovery.checkpoint.encoding import decoded, encoded
from lazygt.recovery.checkpoint.states import Leaf, tensor_of

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False) | st.just(torch.bfloat16)
)  # fmt: skip
KEYS = st.integers() | st.text() | st.tuples(st.booleans(), st.integers())
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict) | st.lists(inner).map(deque)
    ),
    max_leaves=12,
)  # fmt: skip
OTHERS = [
    {1, 2}, frozenset({"a"}), slice(1, None, 2), range(3, 9, 2), bytearray(b"x"), int, dict,
    Counter("aab"), defaultdict(list, {"a": [1]}), defaultdict(None, {}), deque([1, 2], 2),
    torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu"), torch.strided,
    torch.channels_last, np.dtype("<i4"), np.float32(1.5), np.int64(-1), np.bool_(True),
    np.datetime64("2026-11-24"), np.str_("ab"), -(1 << 200), (1 << 63), float("inf"), -0.0,
]  # fmt: skip


def again(value: Any) -> Any:
    return decoded(encoded("it", value, lambda t: 0), lambda number: number)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


@given(TREES)
def test_trees_come_back_with_their_types(tree: Any) -> None:
    assert same(again(tree), tree)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_value_of_each_kind_comes_back(value: Any) -> None:
    assert same(again(value), value)


def test_every_kind_is_tried() -> None:
    values = [*OTHERS, [], (), {}, OrderedDict(), 1j, torch.float32, np.ones(2)]
    assert {encoding._name_of(v) for v in values if type(v) not in encoding._PLAIN} == set(
        encoding._KINDS
    )


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.ones((0, 3), "c16"),
     np.array(3, ">i2"), np.array(["a", "bc"]), np.arange(9)[::2], np.array([b"x"], "V1")],
    ids=lambda a: f"{a.dtype.str}{a.shape}",
)  # fmt: skip
def test_array_comes_back_with_dtype_and_order(array: np.ndarray) -> None:
    read = again(array)
    assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert read.flags.f_contiguous == (array.flags.f_contiguous or array.ndim < 2)
    assert read.flags.writeable


class Named(tuple[Any, ...]):
    """A subclass: its class would have to be found by name."""


@pytest.mark.parametrize(
    "value",
    [object(), Path("x"), len, Named(), np.array([object()]), np.zeros(1, "i4,f4"), np.ma.ones(1),
     "\ud800", Path, torch.nn.Linear],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_value_of_no_kind_is_refused_at_the_mark(value: Any) -> None:
    with pytest.raises(TypeError, match="the state of 'it' can't be saved"):
        again([value])


def test_container_in_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="containers within containers, more than 100"):
        again(loop)


#: A state as the msgpack package packs it.
PACKED = (
    b"\xdc\x00\x19\xa4dict\xa4step\x07\xa2lr\x94\xa4list\xcb?\xb9\x99\x99\x99\x99\x99\x9a\xcb\x80"
    b"\x00\x00\x00\x00\x00\x00\x00\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00\xa5betas\x93\xa5tuple\xcb?"
    b"\xec\xcc\xcc\xcc\xcc\xcc\xcd\xcb?\xef\xf7\xce\xd9\x16\x87+\xa4text\xa2\xc3\xa9\xa3raw\xc4\x02"
    b"\x00\xff\xa3big\x92\xa3int\xc4\t\x00\x00\x00\x00\x00\x00\x00\x00@\xa3low\xd3\x80\x00\x00\x00\x00"
    b"\x00\x00\x00\xa4none\xc0\xa4flag\xc3\xa5dtype\x92\xa5torch\xaetorch.bfloat16\xa1o\x93\xabOrdered"
    b"Dict\xa1a\x01\xa1n\x93\xa6scalar\xa3<i8\xc4\x08\xff\xff\xff\xff\xff\xff\xff\xff"
)


def test_bytes_of_another_packer_are_read_and_written() -> None:
    state = {
        "step": 7, "lr": [0.1, -0.0, float("inf")], "betas": (0.9, 0.999), "text": "é",
        "raw": b"\x00\xff", "big": 1 << 70, "low": -(1 << 63), "none": None, "flag": True,
        "dtype": torch.bfloat16, "o": OrderedDict(a=1), "n": np.int64(-1),
    }  # fmt: skip
    assert same(decoded(PACKED, lambda number: number), state)
    assert encoded("it", state, lambda t: 0) == PACKED


HOSTILE: dict[str, Any] = {
    "attribute of torch": ["torch", "torch._import_dotted_name"],
    "unknown kind": ["os.system", "exit 1"],
    "kind that is no text": [["list"], 1],
    "object dtype": ["array", "|O", "C", ["tuple", 1], bytes(8)],
    "dtype with fields": ["dtype", "i4,O"],
    "array larger than its bytes": ["array", "<f8", "C", ["tuple", 1 << 40], bytes(8)],
    "negative size": ["array", "<f8", "C", ["tuple", -1], bytes(8)],
    "factory that is no type": ["defaultdict", "list"],
    "type of another name": ["type", "eval"],
    "device of another name": ["device", "privateuseone", None],
    "list as a key": ["dict", ["list"], 1],
    "odd number of fields": ["dict", 1],
    "no fields": [],
    "a map": {"a": 1},
    "an extension": msgspec.msgpack.Ext(3, b"x"),
    "tensor without a number": ["tensor", "x"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_of_no_state_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decoded(msgspec.msgpack.encode(HOSTILE[name]), lambda number: number)


@pytest.mark.parametrize(
    ("leaf", "nbytes"),
    [
        (Leaf("float32", (1 << 40,), (1,)), 4),
        (Leaf("float32", (1 << 40,), (1,)), 0),
        (Leaf("float32", (2,), (1 << 40,)), 8),
        (Leaf("float32", (4,), (0,)), 16),
        (Leaf("float32", (2,), ()), 8),
        (Leaf("load", (2,), (1,)), 8),
        (Leaf("_import_dotted_name", (2,), (1,)), 8),
    ],
)
def test_tensor_that_does_not_fit_its_bytes_is_refused(leaf: Leaf, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"does not take|is not a torch dtype"):
        tensor_of(leaf, memoryview(bytearray(nbytes)))
