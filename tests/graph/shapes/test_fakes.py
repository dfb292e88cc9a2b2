"""Fake tensors of GPUs, for which nothing is opened there."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lazygt
from lazygt.graph.shapes import meta_run


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices on which torch was to open a context."""
    opened: list[torch.device] = []
    monkeypatch.setattr(meta_run, "_create_context", opened.append)
    return opened


def test_recording_for_gpus_opens_no_context(contexts: list[torch.device]) -> None:
    with lazygt.session(launcher="dry", device="cuda"):
        x = torch.ones(4, 4)
        torch.linalg.svdvals(x)
        torch.nn.functional.layer_norm(x, [4])
        lazygt.apply(lambda t: t * 2, x)
    assert not contexts


def test_only_foreign_fake_tensors_open_cuda_context(contexts: list[torch.device]) -> None:
    with meta_run.fake_tensors(fallback=False), FakeTensorMode():
        torch.empty(2, device="cuda")
    assert not contexts
    with FakeTensorMode():
        torch.empty(2, device="cuda")
    assert {device.type for device in contexts} == {"cuda"}
