"""A worker on a GPU, by what it asks of torch.cuda."""

from __future__ import annotations

import pytest
import torch

from lazygt.runtime.worker.worker import Worker


class Cuda:
    """torch.cuda's state: it has no generators before it is initialized, as in a new process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.current: int | None = None
        self._monkeypatch, self._count = monkeypatch, count
        monkeypatch.setattr(torch.cuda, "default_generators", ())
        monkeypatch.setattr(torch.cuda, "init", self.init)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)

    def init(self) -> None:
        generators = tuple(torch.Generator().manual_seed(i) for i in range(self._count))
        self._monkeypatch.setattr(torch.cuda, "default_generators", generators)

    def set_device(self, device: int) -> None:
        assert torch.cuda.default_generators, "before torch.cuda.init()"
        self.current = device


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_worker_creates_context_before_reading_generator(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch, 2)
    worker = Worker(device)
    assert cuda.current == index
    assert worker._random.state.equal(torch.cuda.default_generators[index].get_state())
    worker.close()
