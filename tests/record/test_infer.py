"""Kernels whose results lie otherwise than their meta kernels say: workers tell, clients learn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lazygt
from lazygt.errors import ProtocolError
from lazygt.graph.shapes import meta_kernels
from lazygt.runtime.messages import Relaid
from lazygt.submit.submission import Submitter

ROWS, TURNED = (3, 1), (1, 2)


@pytest.fixture(scope="module")
def ops() -> Iterator[object]:
    """``turned(x)``: a copy of which only the kernel says that it is column-major.

    ``moody(x)``: column-major if its first element is above 0.
    """
    library = torch.library.Library("relaid", "DEF")
    library.define("turned(Tensor x) -> Tensor")
    library.define("moody(Tensor x) -> Tensor")

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    library.impl("turned", turned, "CPU")
    library.impl("turned", torch.empty_like, "Meta")
    library.impl("moody", lambda x: turned(x) if x[0, 0] > 0 else x.clone(), "CPU")
    library.impl("moody", torch.empty_like, "Meta")
    yield torch.ops.relaid
    library._destroy()


def test_strides_are_the_kernels_once_a_worker_has_made_them(ops: object) -> None:
    found = []
    with lazygt.session(launcher="inline") as s:
        x = torch.arange(6.0).reshape(2, 3)
        s.flush()
        for _ in range(4):
            y = torch.ops.relaid.turned(x)
            flat = y.as_strided((6,), (1,)) * 2
            found.append((y.stride(), flat.tolist()))
        stats = s.stats()
    # what was recorded with the strides promised is computed with those
    assert found[0] == (ROWS, [0, 2, 4, 6, 8, 10])
    assert found[1:] == [(TURNED, [0, 6, 2, 8, 4, 10])] * 3
    assert (stats["plans_built"], stats["plan_hits"]) == (3, 2)


def _summed(device: str) -> list[torch.Tensor]:
    """Sums over a result that gradient and input lay out otherwise, and views of it."""
    torch.manual_seed(0)
    grad, x = torch.randn(2, 16, 32).to(device), torch.randn(2, 32, 16).to(device)
    made = torch.ops.aten.softplus_backward(grad, x.transpose(1, 2), 1, 20)
    made.transpose(1, 2)[0].add_(1)
    flat = (made * 3).transpose(1, 2).flatten(1)  # a view of the recorded layout alone
    return [made.sum(-1), (made * 2).sum((0, 2)), flat, made]


@pytest.mark.parametrize("code", ["auto", "python"])
def test_first_run_sums_in_the_order_of_the_kernels_strides(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.delitem(meta_kernels._EVERYWHERE, "aten.softplus_backward.default")
    monkeypatch.setattr(Submitter, "_learn_layouts", lambda submitter: None)
    expected = _summed("cpu")
    with lazygt.session(launcher="inline", compile=lazygt.Compile("off", plan_code=code)) as s:
        s.flush()
        for _ in range(3):  # checked, then as code
            found = _summed("lazygt")
            assert found[-1].stride() == (512, 1, 16)
            for mine, theirs in zip([t.cpu() for t in found], expected, strict=True):
                assert torch.equal(mine, theirs)
        assert s.stats()["plan_hits"] == 4  # of the upload and of the sums, twice each


def test_relaid_result_is_viewable_as_in_eager_torch(ops: object) -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.arange(6.0).reshape(2, 3)
        torch.ops.relaid.turned(x).tolist()
        y = torch.ops.relaid.turned(x)
        assert y.t().view(-1).tolist() == [0, 3, 1, 4, 2, 5]
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            y.view(-1)
        assert s.stats()["plans_built"] == 2


def test_a_layout_that_depends_on_values_is_learnt_once(ops: object) -> None:
    found = []
    with lazygt.session(launcher="inline") as s:
        x = torch.arange(6.0).reshape(2, 3)
        s.flush()
        for n in (1.0, 0.0, 1.0, -2.0, 3.0):
            y = torch.ops.relaid.moody(x + n) - n
            found.append((y.stride(), y.as_strided((6,), (1,)).tolist()))
        assert s.stats()["plans_built"] == 3
    assert found == [(ROWS, [0, 1, 2, 3, 4, 5])] + [(TURNED, [0, 3, 1, 4, 2, 5])] * 4


def test_a_report_of_a_result_that_a_plan_does_not_have_is_nonsense() -> None:
    with lazygt.session(launcher="inline") as s:
        (torch.ones(2, 3) + 1).tolist()
        (entry,) = s.entries()
        for row in ((99, 0, (1,)), (0, 9, (1,)), (0, 0, (1,))):
            with pytest.raises(ProtocolError, match="has no result"):
                s._client._relaid(0, Relaid(entry.name(0), (row,)))
        assert s._client.unexpected_strides == []


def test_workers_in_processes_of_their_own_tell_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(meta_kernels._EVERYWHERE, "aten.pow.Scalar")
    found = []
    with lazygt.session(workers=1, compile="off") as s:
        x = torch.arange(6.0).reshape(3, 2).t()
        s.flush()
        for _ in range(3):
            y = 2.0**x
            found.append(y.stride())
            assert y.tolist() == [[1, 4, 16], [2, 8, 32]]
        assert s.stats()["plan_hits"] == 1
    assert found == [TURNED, ROWS, ROWS]
