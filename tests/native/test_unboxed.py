"""Ops with a kernel for C++ arguments: a call without boxes finds the step of a boxed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt import native
from lazygt.record.bridge import NativeRecorder
from lazygt.record.tensor import NATIVE

pytestmark = pytest.mark.skipif(
    native.choice().recorder != "native",
    reason="the native recorder is not chosen: make test-native",
)


class Inputs:
    """The tensors of a call, on the device of the session."""

    def __init__(self) -> None:
        self.x, self.y = torch.ones(4, 4), torch.full((4, 4), 0.5)
        self.b, self.c = torch.ones(4), torch.ones(2, 4, 4)
        self.n, self.i = torch.ones(()) + 1, torch.tensor([0, 1, 2, 3])
        self.heads = torch.ones(1, 2, 4, 4)
        self.some = [torch.ones(4), torch.ones(2, 3)]
        self.others = [torch.ones(4), torch.ones(2, 3)]


Call = Callable[[Inputs], tuple[Any, ...]]


def alike(names: str, call: Call) -> dict[str, list[Call]]:
    return {name: [call] for name in names.split()}


def attention(i: Inputs) -> tuple[Any, ...]:
    q = i.heads
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
    return q, q, q, q, out, sums, 0.0, False


def normed(i: Inputs) -> tuple[Any, ...]:
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(i.x, [4], i.b, i.b, 1e-5)
    return i.x, i.y, [4], mean, rstd, i.b, i.b, [True, False, True]


def loss(i: Inputs) -> tuple[Any, ...]:
    return i.n, i.x, i.i, None, 1, -100, i.n


#: Calls of each op that has such a kernel: arguments, and a dict of named ones at the end.
CALLS: dict[str, list[Call]] = {
    **alike("add.Tensor sub.Tensor add_.Tensor sub_.Tensor", lambda i: (i.x, i.y)),
    **alike("mul.Tensor div.Tensor mul_.Tensor div_.Tensor", lambda i: (i.x, i.y)),
    **alike("mul.Scalar div.Scalar add.Scalar mul_.Scalar div_.Scalar", lambda i: (i.x, 0.5)),
    **alike("neg exp log sqrt rsqrt reciprocal abs sin cos tanh", lambda i: (i.x,)),
    **alike("sigmoid relu silu gelu neg_ exp_ sqrt_ relu_ zero_", lambda i: (i.x,)),
    **alike("fill_.Scalar pow.Tensor_Scalar threshold_backward", lambda i: (i.x, 2)),
    "threshold_backward": [lambda i: (i.x, i.y, 0)],
    "clamp": [lambda i: (i.x, 0.0), lambda i: (i.x, None, 1), lambda i: (i.x, 0, 1.0)],
    "where.self": [lambda i: (i.x > 0, i.x, i.y)],
    **alike("tanh_backward sigmoid_backward silu_backward", lambda i: (i.x, i.y)),
    "gelu_backward": [lambda i: (i.x, i.y), lambda i: (i.x, i.y, {"approximate": "tanh"})],
    **alike("addcmul_ addcdiv_", lambda i: (i.x, i.y, i.y, {"value": 0.5})),
    "lerp_.Scalar": [lambda i: (i.x, i.y, 0.1)],
    "lerp_.Tensor": [lambda i: (i.x, i.y, i.y)],
    **alike("eq.Scalar ne.Scalar lt.Scalar gt.Scalar", lambda i: (i.x, 0)),
    "eq.Tensor": [lambda i: (i.x, i.y)],
    "mm": [lambda i: (i.x, i.y)],
    "bmm": [lambda i: (i.c, i.c)],
    "addmm": [lambda i: (i.b, i.x, i.y), lambda i: (i.b, i.x, i.y, {"alpha": 2, "beta": 0.5})],
    **alike("sum mean max", lambda i: (i.x,)),
    "sum.dim_IntList": [lambda i: (i.x, [0]), lambda i: (i.x, None, True), lambda i: (i.x, [1, 0])],
    "mean.dim": [lambda i: (i.x, [1], True), lambda i: (i.x, [1], {"dtype": torch.float64})],
    "amax": [lambda i: (i.x,), lambda i: (i.x, [0, 1]), lambda i: (i.x, [1], True)],
    "argmax": [lambda i: (i.x,), lambda i: (i.x, 1, True)],
    "embedding": [lambda i: (i.x, i.i), lambda i: (i.x, i.i, 3)],
    "embedding_dense_backward": [lambda i: (i.x, i.i, 4, -1, False)],
    "native_layer_norm": [
        lambda i: (i.x, [4], i.b, i.b, 1e-5), lambda i: (i.x, [4], None, None, 1e-6)],
    "native_layer_norm_backward": [normed],
    **alike("_softmax _log_softmax", lambda i: (i.x, -1, False)),
    **alike("_softmax_backward_data _log_softmax_backward_data",
            lambda i: (i.x, i.y, 1, torch.float32)),
    "nll_loss_forward": [lambda i: (i.x, i.i, None, 1, -100)],
    "nll_loss_backward": [loss],
    "bernoulli_.float": [lambda i: (i.x, 0.25)],
    "_scaled_dot_product_flash_attention_for_cpu": [
        lambda i: (i.heads, i.heads, i.heads),
        lambda i: (i.heads, i.heads, i.heads, 0.0, True, {"scale": 0.3})],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [attention],
    **alike("clone ones_like zeros_like empty_like", lambda i: (i.x.t(),)),
    "copy_": [lambda i: (i.x, i.y)],
    "_to_copy": [lambda i: (i.x, {"dtype": torch.float64}), lambda i: (i.x,)],
    "cat": [lambda i: ([i.x, i.y], 1), lambda i: ([i.x],)],
    "stack": [lambda i: ([i.x, i.y],), lambda i: ([i.x, i.y], -1)],
    "view": [lambda i: (i.x, [2, 8]), lambda i: (i.x, [-1]), lambda i: (i.x, [4, 4])],
    "t": [lambda i: (i.x,)],
    "transpose.int": [lambda i: (i.c, 0, -1)],
    "permute": [lambda i: (i.c, [2, 0, 1])],
    "expand": [lambda i: (i.b, [3, 4]), lambda i: (i.b, [3, 4], {"implicit": True})],
    "select.int": [lambda i: (i.x, 0, 1)],
    "slice.Tensor": [lambda i: (i.x,), lambda i: (i.x, 1, 1, 3), lambda i: (i.x, 0, 0, 4, 2)],
    **alike("unsqueeze squeeze.dim", lambda i: (i.x, 0)),
    "_unsafe_view": [lambda i: (i.x, [16])],
    **alike("detach alias", lambda i: (i.x,)),
    "unbind.int": [lambda i: (i.c,), lambda i: (i.c, 1)],
    "split.Tensor": [lambda i: (i.c, 3, 2)],
    "select_backward": [lambda i: (i.b, [4, 4], 0, 2)],
    "slice_backward": [lambda i: (i.x, [8, 4], 0, 1, 5, 1)],
    "_foreach_add_.Scalar": [lambda i: (i.some, 1)],
    "_foreach_add_.List": [
        lambda i: (i.some, i.others), lambda i: (i.some, i.others, {"alpha": 0.5})],
    **alike("_foreach_mul_.Scalar _foreach_div_.Scalar _foreach_add.Scalar",
            lambda i: (i.some, 0.5)),
    "_foreach_mul_.Tensor": [lambda i: (i.some, i.n)],
    "_foreach_lerp_.Scalar": [lambda i: (i.some, i.others, 0.1)],
    **alike("_foreach_addcmul_.Scalar _foreach_addcdiv_.Scalar",
            lambda i: (i.some, i.others, i.others, 0.5)),
    "_foreach_addcdiv_.ScalarList": [lambda i: (i.some, i.others, i.others, [0.5, 1])],
    "_foreach_sqrt": [lambda i: (i.some,)],
    "_foreach_div_.ScalarList": [lambda i: (i.some, [0.5, 2.0])],
    "_foreach_div_.List": [lambda i: (i.some, i.others)],
    "_foreach_norm.Scalar": [lambda i: (i.some,), lambda i: (i.some, 1)],
}  # fmt: skip


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session, torch.no_grad():
        yield session


def test_every_op_of_the_list_is_called_here() -> None:
    assert set(NATIVE.unboxed_ops()) == CALLS.keys()


@pytest.mark.parametrize("boxed_first", [False, True], ids=["unboxed first", "boxed first"])
@pytest.mark.parametrize("name", CALLS)
def test_boxed_and_unboxed_calls_find_one_step(
    session: lazygt.Session, ops_in_python: list[str], name: str, boxed_first: bool
) -> None:
    op, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, op), overload or "default")

    def boxed(*args: Any, **kwargs: Any) -> Any:
        return NATIVE.record_boxed(f"aten::{op}", overload, *args, **kwargs)

    for call in CALLS[name]:
        steps, results = [], []
        for record in (boxed, func) if boxed_first else (func, boxed):
            torch.manual_seed(0)
            *args, last = call(Inputs())
            named = last if isinstance(last, dict) else {}
            args += [] if named else [last]
            torch.rand(1)  # the workers have the random stream
            ops_in_python.clear()
            results.append(record(*args, **named))
            if steps:
                assert not ops_in_python
            steps.append(session.recorder.trace.step)
            session.flush()
        assert steps[0] is steps[1]
        assert name == "empty_like" or values(results[0]) == values(results[1])


def values(result: Any) -> Any:
    """What a result shows, to be compared."""
    if isinstance(result, torch.Tensor):
        return result.stride(), str(result.tolist())
    return [values(item) for item in result or ()]


def test_a_call_without_boxes_asks_python_nothing(
    session: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> None:
        x = torch.empty(4, 4).fill_(1.0)
        x = torch.nn.functional.dropout(x @ x.t() + torch.zeros(4), 0.5)
        del x

    torch.rand(1)  # takes the random stream to the workers
    session.flush()
    step()
    session.flush()
    for name in ("record", "_record", "step_for", "results"):
        monkeypatch.setattr(NativeRecorder, name, None)
    step()
