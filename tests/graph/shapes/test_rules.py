"""Shapes by rule are those that torch's own meta kernels find, over drawn shapes and layouts."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazygt
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Param, Ref
from lazygt.graph.ops import facts, overload
from lazygt.graph.shapes import RULES, WRITING_RULES, Shapes
from lazygt.graph.shapes.rules import Results
from lazygt.record.infer import Inference
from lazygt.runtime.executors.lowering import _code_of_source
from tests.support.versions import TORCH

Draw = Callable[[st.SearchStrategy[Any]], Any]
Call = tuple[list[Any], dict[str, Any]]

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = st.integers(1, 5)
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
DTYPES = st.sampled_from([*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])


class Number(float):
    """A number that the recorder makes a run-time parameter."""


# -- one call, by rule and by meta kernel ----------------------------------------------------


class Recorded:
    """An op's arguments as the recorder hands them on."""

    def __init__(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.metas: dict[int, TensorMeta] = {}
        self.params: list[Any] = []
        self.call = (
            facts(overload(name)),
            tuple(map(self._arg, args)),
            tuple((key, self._arg(arg)) for key, arg in kwargs.items()),
            self.metas,
            self.params,
        )

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, TensorMeta):
            self.metas[len(self.metas)] = arg
            return Ref(len(self.metas) - 1)
        if isinstance(arg, Number):
            self.params.append(float(arg))
            return Param(len(self.params) - 1)
        return tuple(map(self._arg, arg)) if isinstance(arg, (list, tuple)) else arg


def torchs(recorded: Recorded) -> Results | Exception | None:
    """What torch's meta kernel finds or raises, with no rule asked."""
    try:
        return Inference("cpu")._run(*recorded.call)
    except Exception as error:  # noqa: BLE001 - any of torch's own will do
        return error


def agrees(shapes: Shapes, name: str, call: Call) -> bool:
    """Whether a rule answered; if so, its answer is torch's."""
    recorded = Recorded(name, *call)
    quick = shapes.results(*recorded.call)
    if quick is None:
        return False
    assert quick == torchs(recorded), f"{name}{call}"
    return True


# -- tensors of many layouts -----------------------------------------------------------------


def contiguous(shape: Any, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def laid(draw: Draw, shape: Any, dtype: torch.dtype = torch.float32) -> TensorMeta:
    """A tensor of this shape: row-major three times out of four, else in one of many layouts."""
    shape = tuple(shape)
    layout = draw(st.sampled_from(["rows"] * 9 + ["permuted", "offset", "spaced", "ones"]))
    if layout == "permuted":
        order = draw(st.permutations(range(len(shape))))
        back = [order.index(d) for d in range(len(shape))]
        whole = torch.empty([shape[d] for d in order], dtype=dtype, device="meta")
        return TensorMeta.of(whole.permute(back))
    if layout == "offset":
        return TensorMeta.of(torch.empty((2, *shape), dtype=dtype, device="meta")[1])
    if layout == "spaced" and shape:
        whole = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype, device="meta")
        return TensorMeta.of(whole[..., ::2])
    if layout == "ones":
        stride = [
            draw(st.integers(1, 9)) if size == 1 else step
            for size, step in zip(shape, contiguous(shape).stride, strict=True)
        ]
        return TensorMeta.of(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    return contiguous(shape, dtype)


def tensor(draw: Draw) -> TensorMeta:
    return laid(draw, draw(SHAPES), draw(DTYPES))


def floats(draw: Draw) -> TensorMeta:
    return laid(draw, draw(SHAPES), draw(st.sampled_from(FLOATS)))


def dim_of(draw: Draw, meta: TensorMeta, extra: int = 0) -> int:
    """A dimension, now and then one too far."""
    rank = len(meta.shape) + extra
    return int(draw(st.integers(-rank - (rank > 3), max(rank - 1, 0))))


def perhaps(draw: Draw, usual: Any, other: Any) -> Any:
    """``usual`` most of the time."""
    return other if draw(st.integers(0, 7)) == 7 else usual


def near(draw: Draw, shape: Any) -> tuple[int, ...]:
    """The shape, or one that broadcasts to it, or (rarely) any."""
    kind = draw(st.sampled_from(["same", "same", "ones", "short", "any"]))
    if kind == "ones":
        return tuple(size if draw(st.booleans()) else 1 for size in shape)
    if kind == "short":
        return tuple(shape[draw(st.integers(0, len(shape))) :])
    return tuple(draw(SHAPES)) if kind == "any" else tuple(shape)


# -- a call of each op -----------------------------------------------------------------------


def mm(draw: Draw) -> Call:
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    dtype = draw(st.sampled_from(FLOATS))
    other = perhaps(draw, dtype, torch.float64)
    return [laid(draw, (m, k), dtype), laid(draw, (perhaps(draw, k, 3), n), other)], {}


def addmm(draw: Draw) -> Call:
    (a, b), _ = mm(draw)
    bias = near(draw, (a.shape[0], b.shape[1]))
    return [laid(draw, bias, a.dtype), a, b], {}


def bmm(draw: Draw) -> Call:
    (a, b), _ = mm(draw)
    batch = draw(SIZES)
    pair = laid(draw, (batch, *a.shape), a.dtype), laid(draw, (batch, *b.shape), b.dtype)
    return list(pair), {}


def square(draw: Draw) -> Call:
    return [laid(draw, (draw(SIZES), draw(SIZES)), draw(DTYPES))], {}


def transpose(draw: Draw) -> Call:
    t = tensor(draw)
    return [t, dim_of(draw, t), dim_of(draw, t)], {}


def permute(draw: Draw) -> Call:
    t = tensor(draw)
    order = draw(st.permutations(range(len(t.shape))))
    return [t, tuple(perhaps(draw, d, d - len(order)) for d in order)], {}


def view(draw: Draw) -> Call:
    t = tensor(draw)
    shape = list(draw(st.one_of(st.just(t.shape), st.permutations(t.shape))))
    if len(shape) > 1 and draw(st.booleans()):
        shape[:2] = [shape[0] * shape[1]]
    if shape and draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = perhaps(draw, -1, 7)
    return [t, tuple(shape + [1] * draw(st.integers(0, 1)))], {}


def expand(draw: Draw) -> Call:
    t = tensor(draw)
    shape = [perhaps(draw, draw(SIZES) if size == 1 else size, -1) for size in t.shape]
    return [t, (*draw(st.lists(SIZES, max_size=2)), *shape)], {}


def slicing(draw: Draw) -> Call:
    t = tensor(draw)
    ends = st.one_of(st.none(), st.integers(-7, 7), st.just(2**63 - 1))
    bounds = [perhaps(draw, 0, draw(ends)), draw(ends), perhaps(draw, 1, draw(st.integers(-1, 3)))]
    return [t, dim_of(draw, t), *bounds[: draw(st.integers(0, 3))]], {}


def narrow(draw: Draw) -> Call:
    t = tensor(draw)
    return [
        t,
        dim_of(draw, t),
        perhaps(draw, 0, draw(st.integers(-1, 3))),
        draw(st.integers(0, 2)),
    ], {}


def select(draw: Draw) -> Call:
    t = tensor(draw)
    return [t, dim_of(draw, t), draw(st.integers(-3, 3))], {}


def one_dim(draw: Draw) -> Call:
    t = tensor(draw)
    return [t, dim_of(draw, t)], {}


def unsqueeze(draw: Draw) -> Call:
    t = tensor(draw)
    return [t, dim_of(draw, t, extra=1)], {}


def dims_of(draw: Draw, t: TensorMeta) -> tuple[int, ...]:
    found = draw(st.lists(st.integers(-len(t.shape), max(len(t.shape) - 1, 0)), max_size=3))
    return tuple(found)


def squeeze_dims(draw: Draw) -> Call:
    t = tensor(draw)
    return [t, dims_of(draw, t)], {}


def alone(draw: Draw) -> Call:
    return [tensor(draw)], {}


MEMORY = [None, torch.preserve_format, torch.contiguous_format, torch.channels_last]


def cloned(draw: Draw) -> Call:
    kept = draw(st.sampled_from(MEMORY))
    return [tensor(draw)], {} if kept is None else {"memory_format": kept}


def like(draw: Draw) -> Call:
    (t,), kwargs = cloned(draw)
    if draw(st.booleans()):
        kwargs |= {"dtype": draw(DTYPES), "device": DEVICE, "pin_memory": False}
    return [t], kwargs


def full_like(draw: Draw) -> Call:
    (t,), kwargs = like(draw)
    return [t, Number(2.0)], kwargs


def joined(draw: Draw) -> Call:
    t = tensor(draw)
    at = dim_of(draw, t)
    parts = [t]
    for _ in range(draw(st.integers(0, 2))):
        shape = [
            draw(SIZES) if d == at % max(len(t.shape), 1) else n for d, n in enumerate(t.shape)
        ]
        parts.append(laid(draw, shape, perhaps(draw, t.dtype, torch.float64)))
    return [parts, at], {}


def isin(draw: Draw) -> Call:
    whole = st.sampled_from([torch.int64, torch.int32])
    elements = laid(draw, draw(SHAPES), perhaps(draw, draw(whole), draw(DTYPES)))
    flags = perhaps(draw, {}, {"assume_unique": True, "invert": True})
    return [elements, laid(draw, draw(SHAPES), draw(whole))], flags


def attention(draw: Draw) -> Call:
    batch, heads, length, others, size = (draw(SIZES) for _ in range(5))
    dtype = perhaps(draw, torch.float32, torch.float64)
    shared = heads * draw(st.integers(1, 2))
    query = laid(draw, (batch, perhaps(draw, shared, 5), length, perhaps(draw, size, 3)), dtype)
    pair = [laid(draw, (batch, heads, perhaps(draw, others, 2), size), dtype) for _ in range(2)]
    mask = near(draw, (batch, shared, length, others))
    kind = draw(st.sampled_from([torch.bool, torch.float32]))
    kwargs = {"attn_mask": laid(draw, mask, kind)} if draw(st.booleans()) else {}
    return [query, *pair, *perhaps(draw, [], [0.0, True])], kwargs


def attention_backward(draw: Draw) -> Call:
    (query, key, value, *_), kwargs = attention(draw)
    output = laid(draw, perhaps(draw, query.shape, (2, 2)), query.dtype)
    grad = laid(draw, perhaps(draw, query.shape, (1, 2, 3, 4)), query.dtype)
    logsumexp = laid(draw, query.shape[:3], query.dtype)
    rest = [logsumexp, 0.0, perhaps(draw, False, True)]
    return [grad, query, key, value, output, *rest], kwargs


def mse(draw: Draw) -> Call:
    t = floats(draw)
    target = laid(draw, near(draw, t.shape), perhaps(draw, t.dtype, torch.float64))
    return [t, target, *perhaps(draw, [], [draw(st.integers(0, 2))])], {}


def mse_backward(draw: Draw) -> Call:
    (t, target, *_), _ = mse(draw)
    reduction = draw(st.integers(0, 2))
    grad = contiguous(perhaps(draw, () if reduction else t.shape, t.shape), t.dtype)
    return [grad, t, target, reduction], {}


def select_backward(draw: Draw) -> Call:
    t, size = tensor(draw), draw(SIZES)
    dim = dim_of(draw, t, extra=1)
    at = dim % (len(t.shape) + 1)
    shape = (*t.shape[:at], size, *t.shape[at:])
    return [t, perhaps(draw, shape, (2, 3)), dim, draw(st.integers(-size, size - 1))], {}


def stacked(draw: Draw) -> Call:
    t = tensor(draw)
    shapes = [perhaps(draw, t.shape, (2,)) for _ in range(draw(st.integers(0, 2)))]
    return [[t, *(laid(draw, shape, t.dtype) for shape in shapes)], dim_of(draw, t, extra=1)], {}


def reduced(draw: Draw) -> Call:
    t = floats(draw) if draw(st.booleans()) else tensor(draw)
    kwargs = perhaps(draw, {}, {"dtype": torch.float64})
    dims = perhaps(draw, dims_of(draw, t), None)
    return [t, dims, draw(st.booleans())][: draw(st.integers(2, 3))], kwargs


def reduced_whole(draw: Draw) -> Call:
    return [floats(draw)], {}


def softmax(draw: Draw) -> Call:
    t = floats(draw)
    return [t, dim_of(draw, t), perhaps(draw, False, True)], {}


def softmax_backward(draw: Draw) -> Call:
    t = floats(draw)
    output = laid(draw, perhaps(draw, t.shape, (2, 2)), t.dtype)
    return [t, output, dim_of(draw, t), perhaps(draw, t.dtype, torch.float16)], {}


def nll(draw: Draw) -> Call:
    n, classes = draw(SIZES), draw(SIZES)
    dtype = draw(st.sampled_from(FLOATS))
    source, target = (
        laid(draw, (n, classes), dtype),
        contiguous((perhaps(draw, n, 3),), torch.int64),
    )
    weight = perhaps(draw, None, contiguous((classes,), dtype))
    return [source, target, weight, perhaps(draw, 1, draw(st.integers(0, 3))), -100], {}


def nll_backward(draw: Draw) -> Call:
    (source, target, weight, reduction, ignored), _ = nll(draw)
    grad = contiguous(target.shape if reduction == 0 else (), source.dtype)
    grad = perhaps(draw, grad, contiguous((2,), source.dtype))
    return [grad, source, target, weight, reduction, ignored, contiguous((), source.dtype)], {}


def layer_norm(draw: Draw) -> Call:
    inner = tuple(draw(st.lists(SIZES, min_size=1, max_size=2)))
    dtype = perhaps(draw, torch.float32, torch.float64)
    source = laid(draw, (*draw(SHAPES), *inner), dtype)
    weight = perhaps(draw, laid(draw, inner, dtype), None)
    bias = perhaps(draw, contiguous(perhaps(draw, inner, (7,)), dtype), None)
    return [source, inner, weight, bias, Number(1e-5)], {}


def layer_norm_backward(draw: Draw) -> Call:
    (source, inner, weight, bias, _), _ = layer_norm(draw)
    outer = len(source.shape) - len(inner)
    statistics = contiguous((*source.shape[:outer], *[1] * len(inner)), source.dtype)
    grad = laid(draw, perhaps(draw, source.shape, (3, 3)), source.dtype)
    mask = (draw(st.booleans()), perhaps(draw, weight is not None, True), bias is not None)
    return [grad, source, inner, statistics, statistics, weight, bias, mask], {}


def embedding(draw: Draw) -> Call:
    weight = laid(draw, (draw(SIZES), draw(SIZES)), draw(st.sampled_from(FLOATS)))
    indices = laid(draw, draw(SHAPES), perhaps(draw, torch.int64, draw(DTYPES)))
    return [weight, indices, *perhaps(draw, [], [1, False, False])], {}


def embedding_backward(draw: Draw) -> Call:
    indices = laid(draw, draw(SHAPES), perhaps(draw, torch.int64, draw(DTYPES)))
    grad = laid(draw, (*perhaps(draw, indices.shape, (2,)), draw(SIZES)))
    return [grad, indices, draw(SIZES), -1, False], {}


def copied_into(draw: Draw) -> Call:
    target = tensor(draw)
    return [target, laid(draw, near(draw, target.shape), draw(DTYPES))], {}


def filled(draw: Draw) -> Call:
    return [tensor(draw), Number(0.5)], {}


def drawn(draw: Draw) -> Call:
    return [tensor(draw), Number(0.0), Number(1.0)], {}


CALLS: dict[str, Callable[[Draw], Call]] = {
    "aten.mm.default": mm,
    "aten.addmm.default": addmm,
    "aten.bmm.default": bmm,
    "aten.t.default": square,
    "aten.transpose.int": transpose,
    "aten.permute.default": permute,
    "aten.view.default": view,
    "aten._unsafe_view.default": view,
    "aten.expand.default": expand,
    "aten.slice.Tensor": slicing,
    "aten.narrow.default": narrow,
    "aten.select.int": select,
    "aten.unbind.int": one_dim,
    "aten.unsqueeze.default": unsqueeze,
    "aten.squeeze.default": alone,
    "aten.squeeze.dim": one_dim,
    "aten.squeeze.dims": squeeze_dims,
    "aten.detach.default": alone,
    "aten.clone.default": cloned,
    "aten.empty_like.default": like,
    "aten.zeros_like.default": like,
    "aten.ones_like.default": like,
    "aten.full_like.default": full_like,
    "aten.cat.default": joined,
    "aten.stack.default": stacked,
    "aten.isin.Tensor_Tensor": isin,
    "aten.sum.dim_IntList": reduced,
    "aten.sum.default": reduced_whole,
    "aten.mean.dim": reduced,
    "aten.mean.default": reduced_whole,
    "aten._softmax.default": softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax.default": softmax,
    "aten._log_softmax_backward_data.default": softmax_backward,
    "aten.nll_loss_forward.default": nll,
    "aten.nll_loss_backward.default": nll_backward,
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
    "aten.mse_loss.default": mse,
    "aten.mse_loss_backward.default": mse_backward,
    "aten.select_backward.default": select_backward,
    "aten.copy_.default": copied_into,
    "aten.zero_.default": alone,
    "aten.fill_.Scalar": filled,
    "aten.normal_.default": drawn,
    "aten.uniform_.default": drawn,
}


def test_every_rule_is_tested() -> None:
    assert set(CALLS) == {*RULES, *WRITING_RULES}


@pytest.mark.parametrize("name", CALLS)
def test_rule_agrees_with_torch(name: str) -> None:
    answers: list[bool] = []

    @given(st.data())
    def compare(data: st.DataObject) -> None:
        answers.append(agrees(Shapes(), name, CALLS[name](data.draw)))

    compare()
    assert 4 * sum(answers) >= len(answers), f"{sum(answers)} of {len(answers)} were quick"


# -- pointwise ops: learned ------------------------------------------------------------------

POINTWISE: dict[str, tuple[Any, ...]] = {
    "aten.add.Tensor": ("t", "t"),
    "aten.sub.Tensor": ("t", Number(1.5)),
    "aten.mul.Tensor": ("t", "t"),
    "aten.div.Tensor": ("t", "t"),
    "aten.pow.Tensor_Scalar": ("t", Number(2.0)),
    "aten.relu.default": ("t",),
    "aten.gelu.default": ("t",),
    "aten.gelu_backward.default": ("t", "t"),
    "aten.threshold_backward.default": ("t", "t", Number(0.0)),
    "aten.tanh.default": ("t",),
    "aten.eq.Tensor": ("t", "t"),
    "aten.logical_and.default": ("t", "t"),
    "aten.maximum.default": ("t", "t"),
    "aten.where.self": ("b", "t", "t"),
    "aten.addcmul.default": ("t", "t", "t"),
    "aten.lerp.Scalar": ("t", "t", Number(0.5)),
    "aten.add_.Tensor": ("t", "t"),
    "aten.mul_.Tensor": ("t", Number(0.5)),
    "aten.addcdiv_.default": ("t", "t", "t"),
}


def resized(draw: Draw, first: list[Any]) -> list[Any]:
    """The same operands in other sizes: same ranks, same dtypes."""
    rank = max((len(a.shape) for a in first if isinstance(a, TensorMeta)), default=0)
    common = tuple(draw(SIZES) for _ in range(rank))
    made = []
    for a in first:
        if isinstance(a, TensorMeta):
            tail = common[rank - len(a.shape) :]
            shape = tuple(perhaps(draw, size, draw(SIZES)) for size in tail)
            made.append(laid(draw, perhaps(draw, tail, shape), a.dtype))
        else:
            made.append(a)
    return made


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_is_learned(name: str) -> None:
    answers: list[bool] = []

    def operand(draw: Draw, kind: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if isinstance(kind, Number):
            return kind
        dtype = torch.bool if kind == "b" else perhaps(draw, dtype, draw(DTYPES))
        return contiguous(perhaps(draw, shape, near(draw, shape)), dtype)

    @given(st.data())
    def compare(data: st.DataObject) -> None:
        shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(FLOATS))
        first = [operand(data.draw, kind, shape, dtype) for kind in POINTWISE[name]]
        shapes, recorded = Shapes(), Recorded(name, first, {})
        found = torchs(recorded)
        if not isinstance(found, tuple):
            assert shapes.results(*recorded.call) is None
            return
        shapes.learn(*recorded.call, found)
        answers.append(agrees(shapes, name, (resized(data.draw, first), {})))

    compare()
    assert 3 * sum(answers) >= len(answers) > 20, f"{sum(answers)} of {len(answers)} were quick"


@pytest.mark.parametrize("name", POINTWISE)
def test_a_sample_of_a_pointwise_op_agrees_with_torch(name: str) -> None:
    answers: list[bool] = []

    @given(st.data())
    def compare(data: st.DataObject) -> None:
        shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
        operands: list[Any] = []
        for kind in POINTWISE[name]:
            own = torch.bool if kind == "b" else perhaps(data.draw, dtype, data.draw(DTYPES))
            shaped = perhaps(data.draw, shape, near(data.draw, shape))
            operands.append(kind if isinstance(kind, Number) else contiguous(shaped, own))
        answers.append(agrees(Shapes(), name, (operands, {})))

    compare()
    assert 3 * sum(answers) >= len(answers) > 20, f"{sum(answers)} of {len(answers)} were quick"


def test_a_result_that_is_not_row_major_is_no_sample() -> None:
    turned = TensorMeta((2, 3), (1, 2), torch.float32)
    assert Shapes().results(*Recorded("aten.relu.default", [turned], {}).call) is None


@pytest.mark.anew
def test_the_first_pointwise_op_loads_neither_dynamo_nor_sympy() -> None:
    """They take a second, and torch's meta kernels of pointwise ops load both."""
    program = """
import sys
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Ref
from lazygt.graph.ops import facts, overload
from lazygt.record.infer import Inference
import torch
meta = TensorMeta((2, 3), (3, 1), torch.float32)
args = facts(overload("aten.add.Tensor")), (Ref(0), Ref(1)), (), {0: meta, 1: meta}, []
assert Inference("cpu").results(*args).fresh == (meta,)
sys.exit(not {"sympy", "torch._dynamo"}.isdisjoint(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_learned_dtypes_keep_kinds_of_numbers_apart() -> None:
    shapes = Shapes()
    whole, halves = contiguous((2, 3), torch.int64), contiguous((2, 3), torch.float32)
    for number, expected in ((2, whole), (2.0, halves), (True, whole), (2, whole)):
        recorded = Recorded("aten.mul.Tensor", [whole, number], {})
        assert shapes.results(*recorded.call) == Results((expected,))


def test_a_layout_that_no_rule_foresees_is_not_learned() -> None:
    shapes, recorded = Shapes(), Recorded("aten.relu.default", [contiguous((2, 3))], {})
    turned = TensorMeta((2, 3), (1, 2), torch.float32)
    shapes.learn(*recorded.call, Results((turned,)))
    assert shapes.results(*recorded.call) is None


# -- what rules leave to torch ---------------------------------------------------------------

ODD: dict[str, Call] = {
    "aten.mm.default": ([contiguous((2, 3)), contiguous((4, 5))], {}),
    "aten.addmm.default": ([contiguous((4,)), contiguous((2, 3)), contiguous((3, 5))], {}),
    "aten.view.default": ([contiguous((2, 3)), (4, 2)], {}),
    "aten.expand.default": ([contiguous((2, 3)), (3, 3)], {}),
    "aten.permute.default": ([contiguous((2, 3)), (0, 0)], {}),
    "aten.transpose.int": ([contiguous((2, 3)), 0, 2], {}),
    "aten.t.default": ([contiguous((2, 3, 4))], {}),
    "aten.select.int": ([contiguous((2, 3)), 0, 2], {}),
    "aten.slice.Tensor": ([contiguous((2, 3)), 5], {}),
    "aten.narrow.default": ([contiguous((2, 3)), 0, 1, 2], {}),
    "aten.unsqueeze.default": ([contiguous((2, 3)), 4], {}),
    "aten.cat.default": ([[contiguous((2, 3)), contiguous((2, 4))]], {}),
    "aten.stack.default": ([[contiguous((2, 3)), contiguous((2, 4))]], {}),
    "aten.sum.dim_IntList": ([contiguous((2, 3)), (0, 0)], {}),
    "aten.mean.dim": ([contiguous((2, 3), torch.int64), (0,)], {}),
    "aten._log_softmax.default": ([contiguous((2, 3)), 2, False], {}),
    "aten.nll_loss_forward.default": (
        [contiguous((2, 3)), contiguous((4,), torch.int64), None, 1, -100],
        {},
    ),
    "aten.native_layer_norm.default": ([contiguous((2, 3)), (4,), None, None, Number(1e-5)], {}),
    "aten.embedding.default": ([contiguous((2, 3)), contiguous((4,))], {}),
    "aten.copy_.default": ([contiguous((2, 3)), contiguous((4,))], {}),
}


@pytest.mark.parametrize("name", ODD)
def test_errors_are_torchs_own(name: str) -> None:
    """A rule stays silent, and inference as a whole raises what torch raises."""
    if name == "aten.embedding.default" and TORCH < (2, 13):
        pytest.skip("the meta kernel of this torch takes indices of any dtype")
    recorded = Recorded(name, *ODD[name])
    expected = torchs(recorded)
    assert Shapes().results(*recorded.call) is None
    assert isinstance(expected, Exception)
    with pytest.raises(type(expected)) as raised:
        Inference("cpu").results(*recorded.call)
    lines = [str(error).partition("\n  at ")[0] for error in (raised.value, expected)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta((2, 0), (1, 1), torch.float32),
        TensorMeta((2, 2), (2, 1), torch.complex64, conj=True),
        TensorMeta((2, 2), (2, 1), torch.float32, neg=True),
    ],
    ids=str,
)
def test_tensors_without_elements_and_with_lazy_bits_are_torchs(meta: TensorMeta) -> None:
    shapes = Shapes()
    for name in ("aten.t.default", "aten.clone.default", "aten.zero_.default"):
        assert shapes.results(*Recorded(name, [meta], {}).call) is None


def test_inference_counts_quick_answers_and_runs() -> None:
    inference = Inference("cpu")
    for width in (3, 4, 5):
        for name in ("aten.relu.default", "aten.t.default", "aten.cumsum.default"):
            given = [contiguous((2, width)), *([0] if "cumsum" in name else [])]
            inference.results(*Recorded(name, given, {}).call)
    assert (inference.quick, inference.runs) == (6, 3)


# -- what a new shape costs the worker -------------------------------------------------------


def test_plans_that_differ_in_sizes_share_their_code() -> None:
    def run(width: int) -> torch.Tensor:
        x = torch.arange(6.0 * width, device="lazygt").view(6, width)
        for _ in range(3):
            got = (x[1 : width + 1].reshape(-1) * 2).cpu()
        return got

    with lazygt.session(launcher="inline", compile=lazygt.Compile(plan_code="python")):
        run(2)
        before = _code_of_source.cache_info()
        got = run(4)
        after = _code_of_source.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits
    assert torch.equal(got, torch.arange(4.0, 20.0) * 2)
