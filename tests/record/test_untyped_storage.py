"""Lazy tensors have storages by which libraries see who shares what: safetensors, for one."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


def test_storage_address_identifies_shared_storage(s: lazygt.Session) -> None:
    x, y = torch.zeros(4, 3), torch.zeros(4, 3)
    column = x[:, 1]
    storages = [t.untyped_storage() for t in (x, x.detach(), column, y)]
    addresses = [storage.data_ptr() for storage in storages]
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
    assert [storage._cdata for storage in storages] == addresses
    assert {storage.nbytes() for storage in storages} == {48}
    assert {storage.device for storage in storages} == {torch.device("lazygt", 0)}
    assert x.data_ptr() == addresses[0]
    assert column.data_ptr() - x.data_ptr() == x[:, 1].storage_offset() * 4 == 4
    assert s.stats()["flushes"] == {}


def test_ranges_of_addresses_do_not_overlap(s: lazygt.Session) -> None:
    big, small = torch.zeros(1000), torch.zeros(1)
    start, other = big.data_ptr(), small.data_ptr()
    assert not start <= other < start + 4000
    assert big.data_ptr() == start
    big.add_(1)
    assert big.data_ptr() == start
    big.data = torch.zeros(1000)
    assert big.data_ptr() not in (start, other)


def test_empty_tensors_have_no_address(s: lazygt.Session) -> None:
    assert torch.zeros(0).data_ptr() == 0
    assert torch.zeros(0, 3).untyped_storage().data_ptr() == 0


def test_unsupported_storage_call_names_remedy(s: lazygt.Session) -> None:
    x = torch.zeros(2)
    with pytest.raises(NotImplementedError, match=r"give the tensor another value with .data"):
        x.untyped_storage().resize_(0)
    with pytest.raises(NotImplementedError, match="as_strided"):
        torch.zeros(0).set_(x.untyped_storage())
    file = io.BytesIO()
    torch.save(x, file)  # looks at no storage


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    return model


def test_safetensors_saves_and_loads(s: lazygt.Session, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "tensors"
    x, y = torch.randn(3, 2), torch.arange(5)
    safetensors.save_file({"x": x, "y": y}, path)
    for loaded in (safetensors.load_file(path), safetensors.load_file(path, device=0)):
        assert torch.equal(loaded["x"].cpu(), x.cpu())
        assert torch.equal(loaded["y"].cpu(), y.cpu())
    assert loaded["x"].device.type == "lazygt"
    halves = x[:1], x[1:]
    safetensors.save_file({"above": halves[0], "below": halves[1]}, path)
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file({"x": x, "same": x.detach()}, path)


def test_safetensors_saves_a_tied_weight_once(s: lazygt.Session, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model"
    model, other = tied(), tied()
    safetensors.save_model(model, path)
    assert len(safetensors.load_file(path)) == len(model.state_dict()) - 1
    safetensors.load_model(other, path)
    assert other[0].weight is other[1].weight
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def test_a_storage_of_the_workers_is_not_copied(s: lazygt.Session) -> None:
    storage = torch.zeros(2).untyped_storage()
    with pytest.raises(NotImplementedError, match="clone the tensor that shows it"):
        storage.clone()
    with pytest.raises(NotImplementedError, match="clone the tensor that shows it"):
        copy.deepcopy(storage)


def test_strides_over_the_storage_of_a_view_of_another_dtype(s: lazygt.Session) -> None:
    x = torch.arange(12.0)
    v = x[2:].view(torch.int32)
    every_other = v.as_strided((4,), (2,)).view(torch.float32)
    assert every_other.tolist() == [2, 4, 6, 8]
    v.as_strided((2, 3), (3, 1), 1).zero_()
    assert x.tolist() == [0, 0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11]
