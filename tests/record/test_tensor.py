"""A storage says where its value is."""

import pytest
import torch

import lazygt
from lazygt.record.tensor import NATIVE, State, is_lazy, storage_of


def state(t: torch.Tensor) -> State:
    assert is_lazy(t)
    return storage_of(t).state


def test_a_storage_says_where_its_value_is() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(4)
        assert state(x) is State.RECORDED
        s.flush()
        assert state(x) is State.REMOTE
        y = x + 1
        assert (state(x), state(y)) == (State.REMOTE, State.RECORDED), "x has only entered"
        x.mul_(2)
        assert state(x) is State.RECORDED
        assert state(x[1:]) is State.RECORDED, "a view is where its storage is"
        assert state(torch.empty(3)) is State.BLANK
        assert state(torch.empty(3).fill_(1)) is State.RECORDED
        number = torch.tensor(2.0)
        assert state(number) is State.HOST
        assert (number * x).tolist() == [4.0] * 4
        assert state(number) is State.REMOTE, "it has met worker data"
        assert (state(x), state(y)) == (State.REMOTE, State.REMOTE)
    assert (state(x), state(number)) == (State.CLOSED, State.CLOSED)


def test_a_value_that_was_never_shipped_is_lost_and_says_so() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(4)
        s.flush()
        y = x + 1
        s.recorder.next_trace()  # as when Ctrl-C ends a flush
        assert (state(x), state(y)) == (State.REMOTE, State.LOST)
        with pytest.raises(lazygt.LazyGTError, match="the flush that shipped it was interrupted"):
            y.tolist()
        with pytest.raises(lazygt.LazyGTError, match="the flush that shipped it was interrupted"):
            y + 1
        y.data = x * 3
        assert y.tolist() == [3.0] * 4


def test_a_tensor_of_another_session_is_refused() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.ones(4)
        refused = pytest.raises(lazygt.NoSession, match="belongs to another session")
        with lazygt.session(launcher="inline"), refused:
            x + 1
        assert (x + 1).tolist() == [2.0] * 4


@pytest.mark.skipif(NATIVE is None, reason="torch copies to its subclasses by an op of its own")
def test_a_tensor_that_comes_to_the_device_as_it_is_is_copied_once() -> None:
    with lazygt.session(workers=1) as s:
        x = torch.rand(1 << 20, device="cpu")
        s.synchronize()
        with torch.profiler.profile() as profile:
            x.to("lazygt")
        names = [event.name for event in profile.events()]
        assert names.count("aten::copy_") == 1, "into the shared memory where it lies from then on"
        assert "aten::empty_strided" not in names


@pytest.mark.parametrize("form", [torch.preserve_format, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["dense", "transposed", "strided", "expanded"])
def test_a_tensor_has_eager_torchs_strides_on_the_device(
    kind: str, dtype: torch.dtype, form: torch.memory_format
) -> None:
    with lazygt.session(launcher="inline"):
        x = torch.rand(2, 3, 4, 6, device="cpu")
        shown = {
            "dense": x.contiguous(memory_format=torch.channels_last),
            "transposed": x.transpose(1, 2),
            "strided": x[:, ::2, :, 1::3],
            "expanded": x[:, :1].expand(-1, 5, -1, -1),
        }[kind]
        eager = torch.ops.aten._to_copy.default(shown, dtype=dtype, memory_format=form)
        there = shown.to("lazygt", dtype=dtype, memory_format=form)
        assert there.stride() == eager.stride()
        assert torch.equal(there.cpu(), eager)
