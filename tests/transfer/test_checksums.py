"""Bytes of tensors: aliases where possible, checksums, and copies by several threads."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from lazygt.transfer.copier import (
    CHECKSUMS,
    Copy,
    CopyPool,
    as_bytes,
    checksum_named,
    crc32,
    needs_no_conversion,
    sha256,
    wire_bytes,
    xor64,
)


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    made = CopyPool(3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("tensor", "dtype", "aliases"),
    [
        (torch.randn(5, 3), torch.float32, True),
        (torch.tensor(2.0), torch.float32, True),
        (torch.randn(5, 3), torch.bfloat16, False),
        (torch.randn(5, 3).t(), torch.float32, False),
        (torch.randn(3, dtype=torch.complex64).conj(), torch.complex64, False),
        (torch.randn(3, dtype=torch.complex64).conj().imag, torch.float32, False),
        (torch.randn(3, requires_grad=True), torch.float32, True),
    ],
)
def test_bytes_on_the_wire(tensor: torch.Tensor, dtype: torch.dtype, aliases: bool) -> None:
    found = wire_bytes(tensor, dtype)
    expected = tensor.detach().to(dtype).resolve_conj().resolve_neg().contiguous()
    assert torch.equal(found.view(dtype).view(tensor.shape), expected)
    assert (found.data_ptr() == tensor.data_ptr()) == aliases == needs_no_conversion(tensor, dtype)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_checksums_see_every_byte(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    raw = bytes(data.tolist())
    assert crc32(data) == zlib.crc32(raw)
    words = [int.from_bytes(raw[k : k + 8], "little") for k in range(0, size, 8)]
    folded = 0
    for word in words:
        folded ^= word
    assert xor64(data) == folded
    for name in ("crc32", "xor64"):
        check = CHECKSUMS[name]
        assert check is not None
        for position in range(0, size, 37):
            changed = data.clone()
            changed[position] ^= 1
            assert check(changed) != check(data)
    assert len(sha256(data)) == 32


@pytest.mark.parametrize("begin", range(9))
def test_xor64_of_a_piece_that_begins_anywhere(begin: int) -> None:
    data = torch.randint(0, 256, (64,), dtype=torch.uint8)[begin : begin + 43]
    assert xor64(data) == xor64(data.clone())


def test_an_unknown_checksum_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of none, crc32, xor64"):
        checksum_named("md5")


def test_a_pool_copies_casts_and_sums_in_order(pool: CopyPool) -> None:
    sources = [torch.randn(size) for size in (3, 1_000_000, 0, 700_000, 5)]
    raw = [torch.zeros_like(as_bytes(source)) for source in sources]
    halves = [torch.zeros(len(source), dtype=torch.bfloat16) for source in sources]
    plain = pool.copy([Copy(as_bytes(s), t) for s, t in zip(sources, raw, strict=True)], crc32)
    cast = pool.copy([Copy(s, t) for s, t in zip(sources, halves, strict=True)], crc32)
    assert plain == [crc32(as_bytes(source)) for source in sources]
    assert cast == [crc32(as_bytes(source.bfloat16())) for source in sources]
    for source, target, half in zip(sources, raw, halves, strict=True):
        assert torch.equal(target.view(torch.float32), source)
        assert torch.equal(half, source.bfloat16())
    assert pool.check([as_bytes(source) for source in sources], crc32) == plain


def test_a_failed_copy_is_told(pool: CopyPool) -> None:
    fits = Copy(torch.ones(1_000_000), torch.zeros(1_000_000))
    with pytest.raises(RuntimeError):
        pool.copy([Copy(torch.ones(3), torch.ones(4, dtype=torch.float16)), fits], None)


@pytest.mark.parametrize("size", [0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 800_001])
def test_the_checksum_of_a_copy_is_that_of_all_its_blocks(pool: CopyPool, size: int) -> None:
    source = torch.randint(256, (size,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    assert pool.copy([Copy(source, target)], crc32) == [zlib.crc32(source.numpy())]
    assert torch.equal(source, target)
