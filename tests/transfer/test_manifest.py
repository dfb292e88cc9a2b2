"""Manifests: what they hold, what they refuse, and how they differ."""

from __future__ import annotations

import pytest
import torch
from msgspec import msgpack

from lazygt.errors import ProtocolError
from lazygt.transfer import Manifest, ParamSpec
from lazygt.transfer.manifest import ALIGNMENT, DTYPES, difference

TIED = Manifest(
    (
        ParamSpec("embed", "F32", (3, 5)),
        ParamSpec("norm", "BF16", (7,)),
        ParamSpec("head", "F32", (3, 5), alias_of="embed"),
        ParamSpec("step", "I64", ()),
    )
)


def test_sizes_and_places() -> None:
    assert TIED.nbytes == 60 + 14 + 8
    assert TIED.places == (0, ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT)
    assert TIED.extent == 3 * ALIGNMENT


def test_tensors_are_views_of_one_buffer() -> None:
    flat = torch.zeros(TIED.extent, dtype=torch.uint8)
    made = TIED.tensors(flat)
    made["embed"].fill_(1.0)
    made["step"].fill_(9)
    assert made["head"] is made["embed"]
    assert (made["norm"].dtype, tuple(made["norm"].shape)) == (torch.bfloat16, (7,))
    again = TIED.tensors(flat)
    assert again["head"].tolist() == [[1.0] * 5] * 3
    assert again["step"].item() == 9


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_has_its_size(name: str) -> None:
    spec = ParamSpec("p", name, (3,))
    assert spec.nbytes == 3 * torch.empty(1, dtype=DTYPES[name]).element_size()
    flat = torch.zeros(Manifest((spec,)).extent, dtype=torch.uint8)
    assert Manifest((spec,)).tensors(flat)["p"].dtype == DTYPES[name]


def test_a_manifest_survives_the_wire() -> None:
    back = Manifest.unpack(TIED.packed)
    assert back == TIED
    assert back.digest == TIED.digest
    assert difference(TIED, back) is None


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3, 2), (0, 1, 2)])
def test_the_digest_sees_order_and_absence(order: tuple[int, ...]) -> None:
    other = Manifest(tuple(TIED.params[k] for k in order))
    assert other.digest != TIED.digest
    assert difference(TIED, other) is not None


def test_the_digest_sees_ties() -> None:
    untied = ParamSpec("head", "F32", (3, 5))
    other = Manifest((*TIED.params[:2], untied, TIED.params[3]))
    assert other.digest != TIED.digest
    assert difference(TIED, other) is not None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ((ParamSpec("a", "F32", ()), ParamSpec("a", "F32", ())), "names 'a' twice"),
        ((ParamSpec("b", "F32", (), "a"),), "'b' is tied to 'a', which is no earlier"),
        ((ParamSpec("a", "F32", (2,)), ParamSpec("b", "F32", (3,), "a")), "same dtype and shape"),
        ((ParamSpec("a", "F16", (2,)), ParamSpec("b", "F32", (2,), "a")), "same dtype and shape"),
    ],
)
def test_a_manifest_must_make_sense(params: tuple[ParamSpec, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Manifest(params)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"\xc1",
        7,
        [["a", "F32"]],
        [["a", "F32", [1]]],
        [["a", "F33", [1], None]],
        [["a", "F32\n", [1], None]],
        [[1, "F32", [1], None]],
        [["a", "F32", [-1], None]],
        [["a", "F32", ["1"], None]],
        [["a", "F32", [1], 5]],
        [["a", "F32", [1], "b"]],
    ],
)
def test_garbage_is_no_manifest(given: object) -> None:
    with pytest.raises(ProtocolError, match="this is no manifest"):
        Manifest.unpack(given if isinstance(given, bytes) else msgpack.encode(given))


def test_long_differences_are_cut() -> None:
    many = Manifest(tuple(ParamSpec(f"p{k}", "F32", ()) for k in range(9)))
    assert difference(many, Manifest(())) == "missing: p0, p1, p2, p3 and 5 more"
