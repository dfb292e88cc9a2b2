"""Shape rules: metas of an op's results without a meta kernel, exact and much faster.

A rule answers only where its result is certain; errors and unusual calls are left to torch's meta
kernels, so every error is torch's own. A rule, one small function for each op, has the parameters
of its op, tensors as metas, and returns None for an unusual call; no rule is called for tensors
with lazy bits or without elements. There are rules for the ops of common training steps. Pointwise
ops need no rule: their results' dtypes are learned, from a sample of the op or from the first meta
kernel that ran for the same operands in other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern, typed_key
from lazygt.graph.node import DEVICE, Arg, Param, Ref
from lazygt.graph.ops import OpFacts, undispatched
from lazygt.graph.shapes.layers import LAYERS
from lazygt.graph.shapes.meta_kernels import iterated_strides
from lazygt.graph.shapes.rules import (
    TENSORS,
    VIEWS,
    WRITING,
    Metas,
    Results,
    Rule,
    Shape,
    broadcast,
    contiguous,
    is_contiguous,
)

# -- sampled dtypes of pointwise ops ---------------------------------------------------------------
# torch's meta kernels of pointwise ops are written in Python, and load sympy and dynamo: a second
# or more, in every process that needs one of them.

#: A sample has at most two elements along each dim.
_MAX_DIMS = 8


def sampled_dtype(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
) -> torch.dtype | None:
    """Return the dtype of a pointwise result by running the op on small CPU tensors.

    None where the op raises, has operands of several dtypes, or gives a result that is not
    row-major.
    """

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return _sample(metas[arg.index])
        return params[arg.index] if type(arg) is Param else arg

    # of several dtypes torch's kernels and their meta kernels do not always make the same
    condition = {torch.bool} if f.name == "aten.where.self" else set()
    mixed_dtypes = len({meta.dtype for meta in metas.values()} - condition) > 1
    names_device = DEVICE in (*args, *[arg for _, arg in kwargs])
    if mixed_dtypes or names_device or any(len(meta.shape) > _MAX_DIMS for meta in metas.values()):
        return None
    try:
        with undispatched(), torch.no_grad():
            result = f.func(*map(leaf, args), **{name: leaf(arg) for name, arg in kwargs})
    except Exception:  # noqa: BLE001 - the meta kernel raises it on the user's line
        return None
    if result.device.type != "cpu" or result.stride() != contiguous_stride(tuple(result.shape)):
        return None
    dtype: torch.dtype = result.dtype
    return dtype


def _sample(meta: TensorMeta) -> torch.Tensor:
    """Return ones with sizes of at most 2: larger sizes do not change the order of strides."""
    return torch.ones([min(size, 2) for size in meta.shape], dtype=meta.dtype, device="cpu")


# -- shape rules -----------------------------------------------------------------------------------

Named = tuple[tuple[str, Arg], ...]

#: Op -> rule for its new tensors.
RULES = VIEWS | TENSORS | LAYERS
#: Op -> rule for its first argument, which it writes and returns.
WRITING_RULES = WRITING

_LEARNED_LIMIT = 10_000


class Shapes:
    """The rules, and the dtypes of pointwise results learned so far."""

    def __init__(self) -> None:
        #: key of a pointwise call -> dtype; None: the meta kernel differs from ``_pointwise``
        self._learned: dict[Any, torch.dtype | None] = {}

    def results(
        self,
        f: OpFacts,
        args: tuple[Arg, ...],
        kwargs: Named,
        metas: dict[int, TensorMeta],
        params: list[Any],
    ) -> Results | None:
        """Return the metas of fresh results and written tensors; None when no rule is sure.

        Raises nothing.

        Args:
            args, kwargs: with Ref for tensors and Param for run-time numbers.
            metas: the meta of every Ref.
            params: the value of every Param.
        """
        for meta in metas.values():
            if meta.conj or meta.neg or 0 in meta.shape:
                return None
        rule = RULES.get(f.name)
        if rule is not None:
            answer = _apply_rule(rule, args, kwargs, metas, params)
            return None if answer is None else Results(answer)
        rule = WRITING_RULES.get(f.name)
        if rule is not None:
            answer = _apply_rule(rule, args, kwargs, metas, params)
            return None if answer is None else Results((), answer)  # type: ignore[arg-type]
        key = _pointwise_key(f, args, kwargs, metas, params)
        if key is None:
            return None
        dtype = self._learned.get(key)
        if dtype is None and key not in self._learned:
            dtype = sampled_dtype(f, args, kwargs, metas, params)
            if dtype is not None and len(self._learned) < _LEARNED_LIMIT:
                self._learned[key] = dtype
        return None if dtype is None else _pointwise(f, args, metas, dtype)

    def learn(
        self,
        f: OpFacts,
        args: tuple[Arg, ...],
        kwargs: Named,
        metas: dict[int, TensorMeta],
        params: list[Any],
        results: Results,
    ) -> None:
        """Store the result dtype that a meta kernel gave for a pointwise op, for later calls."""
        if f.name in RULES or f.name in WRITING_RULES or len(self._learned) >= _LEARNED_LIMIT:
            return
        key = _pointwise_key(f, args, kwargs, metas, params)
        if key is None or key in self._learned:
            return
        result = (results.fresh or results.written)[0]
        is_pointwise = result is not None and _pointwise(f, args, metas, result.dtype) == results
        self._learned[key] = result.dtype if result is not None and is_pointwise else None


def _apply_rule(
    rule: Rule,
    args: tuple[Arg, ...],
    kwargs: Named,
    metas: dict[int, TensorMeta],
    params: list[Any],
) -> Metas | None:
    """Return a rule's metas for a call."""
    operands = [
        metas[arg.index] if type(arg) is Ref else _resolved(arg, metas, params) for arg in args
    ]
    named = {name: metas[arg.index] if type(arg) is Ref else arg for name, arg in kwargs}
    return rule(*operands, **named)


def _resolved(arg: Arg, metas: dict[int, TensorMeta], params: list[Any]) -> Any:
    """Return an argument as a rule takes it: a Param's value, the metas of a list of Refs.

    Any other argument is returned unchanged; a single Ref is the caller's.
    """
    kind = type(arg)
    if kind is Param:
        return params[arg.index]
    if kind is tuple and arg and type(arg[0]) is Ref:
        return tuple([metas[item.index] for item in arg])
    return arg


@cache
def _one_result(f: OpFacts) -> bool:
    """Return whether a pointwise op has one result: a new one, or its written first argument."""
    plain = f.pointwise and not f.writes_named
    return plain and (f.outputs, f.writes) in ((("f",), ()), (("w",), (0,)))


#: Pointwise ops whose results have TensorIterator's strides on every device.
_ITERATED = frozenset(
    f"aten.{name}.Tensor"
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
)


def _pointwise_key(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: Named,
    metas: dict[int, TensorMeta],
    params: list[Any],
) -> tuple[Any, ...] | None:
    """Return the key of all that a pointwise result's dtype depends on; None for unusual calls."""
    if not _one_result(f):
        return None
    key: list[Any] = [f]
    for arg in args:
        kind = type(arg)
        if kind is Ref:
            meta = metas[arg.index]
            row_major = is_contiguous(meta)
            if not row_major and f.name not in _ITERATED:
                return None
            key += (meta.dtype, len(meta.shape), row_major)
        elif kind is Param:
            key.append(type(params[arg.index]))
        elif kind is tuple:
            return None
        else:
            key.append(typed_key(arg))
    for name, arg in kwargs:
        kind = type(arg)
        if kind is Ref or kind is tuple:
            return None
        key += (name, type(params[arg.index]) if kind is Param else typed_key(arg))
    return tuple(key)


@lru_cache(maxsize=4096)
def _iterated(operands: tuple[TensorMeta, ...], shape: Shape) -> Shape:
    """Return the strides that TensorIterator gives a result of this shape."""
    with undispatched(), torch.no_grad():
        return iterated_strides([meta.empty("meta") for meta in operands], shape)


def _pointwise(
    f: OpFacts, args: tuple[Arg, ...], metas: dict[int, TensorMeta], dtype: torch.dtype
) -> Results | None:
    """Return the result of a pointwise op."""
    operands = [metas[arg.index] for arg in args if type(arg) is Ref]
    shape = broadcast([meta.shape for meta in operands])
    if shape is None:
        return None
    if f.outputs == ("f",):
        if all(map(is_contiguous, operands)):
            return Results((contiguous(shape, dtype),))
        if f.name not in _ITERATED or not shape:
            return None
        return Results((intern(shape, _iterated(tuple(operands), shape), dtype),))
    target = metas[args[0].index]
    return Results((), (target,)) if target.shape == shape else None
