"""Every strategy compares manifests before a byte moves, and checks what extractors yield."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

import lazygt
from lazygt.transfer import (
    Chunk,
    Manifest,
    ManifestMismatch,
    ModuleExtractor,
    ParamSpec,
    TransferError,
)
from tests.transfer.child import RECEIVERS, Accident, checksums, weights
from tests.transfer.conftest import Stage

pytestmark = pytest.mark.timeout(60)

MakeStage = Callable[[str], Stage]


def changed(model: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """The model with one thing about its manifest wrong."""
    if case == "missing":
        del model["layer.0.bias"]
    elif case == "extra":
        model["layer.9.weight"] = torch.ones(3)
    elif case == "reordered":
        model["layer.0.weight"] = model.pop("layer.0.weight")
    elif case == "shape":
        model["layer.2.weight"] = torch.ones(18, dtype=torch.float16)
    elif case == "dtype":
        model["layer.2.weight"] = model["layer.2.weight"].float()
    elif case == "untied":
        model["head.weight"] = model["head.weight"].clone()
    return model


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("missing", "missing: layer.0.bias"),
        ("extra", "unexpected: layer.9.weight"),
        ("reordered", "the order differs, first at layer.0.bias where layer.0.weight belongs"),
        ("shape", r"layer.2.weight \(expected F16\[17\], offered F16\[18\]\)"),
        ("dtype", r"layer.2.weight \(expected F16\[17\], offered F32\[17\]\)"),
        ("untied", r"expected F32\[50, 64\] tied to embed.weight, offered F32\[50, 64\]"),
    ],
)
def test_another_manifest_is_refused(stage: MakeStage, strategy: str, case: str, says: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    never = Accident(2, 0, lambda: pytest.fail("a chunk was read"))
    never._inner = ModuleExtractor(changed(weights(2), case))
    with pytest.raises(ManifestMismatch, match=says):
        sender.send(never, timeout=20.0)
    assert reader.ask("checksums") == (1, checksums(weights(1)))
    assert lazygt.transfer_weights(weights(2), sender, timeout=20.0).version == 2
    assert reader.ask("checksums") == (2, checksums(weights(2)))


@pytest.mark.parametrize("stale", [1, 2])
def test_a_stale_version_is_refused(stage: MakeStage, strategy: str, stale: int) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, version=2, timeout=20.0)
    with pytest.raises(ManifestMismatch, match=f"has version 2, not older than {stale}"):
        lazygt.transfer_weights(weights(3), sender, version=stale, timeout=20.0)
    assert reader.ask("checksums") == (2, checksums(weights(1)))


def test_receiver_refuses_unexpected_manifest(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    expect = Manifest((ParamSpec("only", "F32", (3,)),))
    with RECEIVERS[strategy](sender.address, name="strict", expect=expect) as receiver:
        sender.wait_for_receivers(1, 10.0)
        with pytest.raises(ManifestMismatch, match=r"'strict' can't take this.*missing: only"):
            lazygt.transfer_weights(weights(1), sender, timeout=20.0)
        lazygt.transfer_weights({"only": torch.ones(3)}, sender, timeout=20.0)
        with receiver.reading() as (version, params):
            assert version == 1
            assert params["only"].tolist() == [1, 1, 1]


class Wrong:
    """An extractor that does not yield what its manifest announces."""

    def __init__(self, version: int, case: str) -> None:
        self._inner, self._case = ModuleExtractor(weights(version)), case

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def chunks(self) -> Iterator[Chunk]:
        chunks = list(self._inner.chunks())
        (spec, tensor), *rest = chunks[1].params
        if self._case == "left out":
            chunks[1] = chunks[1]._replace(params=rest)
        elif self._case == "twice":
            chunks.append(chunks[1])
        elif self._case == "renamed":
            other = dataclasses.replace(spec, name="other")
            chunks[1] = chunks[1]._replace(params=[(other, tensor), *rest])
        elif self._case == "too short":
            chunks[1] = chunks[1]._replace(params=[(spec, tensor[:3]), *rest])
        yield from chunks


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("left out", r"incomplete: layer.0.weight \(0 of 2304 bytes\)"),
        ("twice", r"layer.0.weight"),
        ("renamed", "yielded other as .* announced nothing of that name"),
        ("too short", r"tensor of shape \[3, 24\], but its manifest announced F32\[24, 24\]"),
    ],
)
def test_a_lying_extractor_changes_nothing(
    stage: MakeStage, strategy: str, case: str, says: str
) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    with pytest.raises(TransferError, match=says):
        sender.send(Wrong(2, case), timeout=20.0)
    assert reader.ask("checksums") == (1, checksums(weights(1)))
    lazygt.transfer_weights(weights(3), sender, timeout=20.0)
    assert reader.ask("checksums") == (2, checksums(weights(3)))
