"""Strides inferred for aten's own overloads, backward and horizontal ones among them.

Every overload that makes new tensors of several ones is called with operands in mixed layouts, and
what its CPU kernel gives has the strides that both recorders infer. Calls that the kernel refuses
are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Ref
from lazygt.graph.ops import OPAQUE_RESULTS, OpFacts, facts
from lazygt.record.infer import Inference
from tests.conformance.layouts import LAYOUTS
from tests.support.timeouts import DEEP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

#: Calls of an overload, for each shape.
CALLS = 12 if DEEP else 3
SHAPES = [(2, 4, 3, 5), (3, 4, 5)]
if DEEP:
    SHAPES += [(4, 6), (1, 4, 3, 5), (2, 1, 3, 3), (2, 3, 2, 4, 3), (4,)]

#: Families with kernels for other devices or classes of tensors, and ops that take memory as it is.
ELSEWHERE = ("cudnn", "miopen", "mkldnn", "sparse", "quant", "fbgemm", "nested", "_nnpack", "_cslt",
             "_pin_memory", "sym_constrain", "_test", "_assert", "_dir", "name")  # fmt: skip
#: Kernels that trust their callers: arguments at random end the process, or mean nothing.
TRUSTING = frozenset({
    "_batch_norm_no_update", "_batch_norm_with_update", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "batch_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "_log_softmax_backward_data",
    "_softmax_backward_data", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_weight_norm_interface",
})  # fmt: skip
#: Strides that the recorder takes for others; the worker's kernels keep theirs.
KNOWN = {
    "aten.index.Tensor": "index tensors in several layouts",
    "aten._unsafe_index.Tensor": "index tensors in several layouts",
    "aten.max_pool3d_with_indices.default": "channels-last without a batch",
    "aten._convolution.default": "the deprecated overload, by its public name",
    "aten.roll.default": "all dims of a channels-last tensor rolled, or none named",
    "aten.rrelu_with_noise_backward.default": "evaluation, which hands back its slope",
}

#: Names of torch's dispatcher; others are TorchScript's alone.
REGISTERED = frozenset(torch._C._dispatch_get_all_op_names())


def overloads() -> Iterator[Any]:
    """Functional overloads that take tensors and make new ones, as backends are called with."""
    for name in dir(torch.ops.aten):
        if name.startswith("__") or name in TRUSTING or any(part in name for part in ELSEWHERE):
            continue
        packet = getattr(torch.ops.aten, name)
        yield from filter(_fits, (getattr(packet, overload) for overload in packet.overloads()))


def _fits(op: Any) -> bool:
    arguments = op._schema.arguments
    if op._schema.is_mutable or str(op) in KNOWN or op.name() not in REGISTERED:
        return False
    if not any("Tensor" in str(a.type) for a in arguments):
        return False
    if any(a.kwarg_only and not a.has_default_value() for a in arguments):
        return False
    f = facts(op)
    made = bool(f.outputs) and {"f", "fl"}.issuperset(f.outputs)
    return made and not (f.dynamic or f.random) and not _is_composite(op)


def _is_composite(op: Any) -> bool:
    """Whether torch makes other ops of it before a backend is asked."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def operand(draw: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Floats between 0 and 1, in one of many layouts."""
    return draw.choice(LAYOUTS)(torch.rand(shape) * 0.8 + 0.1, draw.randrange(2))


def argument(draw: random.Random, a: Any, shape: tuple[int, ...]) -> Any:
    """An argument of the type that a schema names."""
    kind = str(a.type)
    if kind == "Tensor" or (kind == "Optional[Tensor]" and draw.random() < 0.5):
        return operand(draw, shape)
    if kind == "List[Tensor]":
        return [operand(draw, shape) for _ in range(2)]
    if a.has_default_value():
        return a.default_value
    choices: dict[str, list[Any]] = {
        "number": [1.0, 0.5], "float": [1.0, 0.5], "int": [0, 1], "bool": [False, True],
        "List[int]": [[1, 1], [2, 2], [0], [1], list(shape), [0, 1]], "List[number]": [[1.0, 0.5]],
        "List[bool]": [[True] * 3], "str": ["none"],
    }  # fmt: skip
    return draw.choice(choices.get(kind, [None]))


def inferred(f: OpFacts, args: list[Any]) -> list[TensorMeta | None]:
    """The metas that a recorder would show of the results."""
    metas: dict[int, TensorMeta] = {}

    def leaf(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            metas[len(metas)] = TensorMeta.of(arg)
            return Ref(len(metas) - 1)
        return tuple(map(leaf, arg)) if isinstance(arg, (list, tuple)) else arg

    results = Inference("cpu").results(f, tuple(map(leaf, args)), (), metas, [])
    return [] if results is None else list(results.fresh)


def flat(returned: Any) -> list[Any]:
    """The tensors that an op returned."""
    if isinstance(returned, (list, tuple)):
        return [t for item in returned for t in flat(item)]
    return [returned]


def wrong(op: Any, args: list[Any]) -> tuple[bool, str]:
    """Whether the kernel takes a call, and what of its results is inferred to lie otherwise."""
    try:
        returned = op(*args)
    except Exception:  # noqa: BLE001 - whatever it says to arguments at random
        return False, ""
    f = facts(op)
    pairs = zip(flat(returned), inferred(f, args), strict=False)
    for number, (made, meta) in enumerate(pairs):
        if number in OPAQUE_RESULTS.get(f.name, ()) or made is None or meta is None:
            continue
        assert tuple(made.shape) == meta.shape, f"{f.name}: {meta} for {made.shape}"
        if made.numel() > 1 and not meta.has_same_layout(made.stride()):
            operands = [str(TensorMeta.of(t)) for t in flat(args) if isinstance(t, torch.Tensor)]
            return True, f"{f.name} of {operands}: {meta} for {made.stride()}"
    return True, ""


def test_inferred_strides_of_mixed_operands_are_the_kernels() -> None:
    found, taken = [], 0
    torch.manual_seed(0)
    for op in overloads():
        draw = random.Random(str(op))
        with torch.no_grad():
            calls = [
                wrong(
                    op, [argument(draw, a, shape) for a in op._schema.arguments if not a.kwarg_only]
                )
                for shape in SHAPES
                for _ in range(CALLS)
            ]
        taken += any(accepted for accepted, _ in calls)
        found += [line for _, line in calls if line][:1]
    assert not found, "\n".join(found)
    assert taken > 300
