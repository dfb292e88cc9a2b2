"""Decomposition of an op into simpler ops, traced on meta tensors.

A sample value stands for a run-time number (``Param``). Python arithmetic on such a number becomes
a 0-d tensor. A decomposition that depends on the number's value, as in a comparison, is rejected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref, map_arg, params_in, ref
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, overload, undispatched
from lazygt.passes.cse import DeadCode
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.extra_decompositions import FORMULAS

#: Two samples of the first run-time number; no decomposition contains them as constants.
_SAMPLES = (0.618033988749, 0.414213562373)
_STEP = 0.00731
#: Ops with a torch decomposition that differs from the kernel (torch 2.13).
_INEXACT = frozenset(
    {
        "aten.linspace.default",  # other rounding than the kernel
        "aten.linspace.out",
        "aten.logspace.default",
        "aten.logspace.out",
        # counts class 0 as a target if the targets of a sample end with -1
        "aten.multilabel_margin_loss_forward.default",
    }
)
#: Identity ops, which matter to autograd only.
_ALIASES = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})
#: Arguments that concern a tensor's memory, not its contents.
_MEMORY_ARGUMENTS = frozenset({"layout", "pin_memory", "non_blocking"})


class _Refused(Exception):
    """Decomposition that depends on run-time values, or has effects that a graph cannot express."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Graph of the inner ops that replace an op."""

    operands: int  # number of operands of the op; a tensor that is passed twice counts twice
    nodes: tuple[Node, ...]  # inner nodes on numbered values; the first values are the operands
    metas: tuple[TensorMeta | None, ...]  # meta of every value
    #: value number of each result of the op; None: the result is undefined
    outputs: tuple[int | None, ...]

    def read(self) -> set[int]:
        """Return the numbers of the values that are used by a node or are results."""
        values = {value for node in self.nodes for value in node.refs()}
        return values | {value for value in self.outputs if value is not None}

    def numbered(self) -> Iterator[tuple[Node, range]]:
        """Yield each node with the value numbers of its results."""
        start = self.operands
        for node in self.nodes:
            stop = start + len(node.results)
            yield node, range(start, stop)
            start = stop


def alone(node: Node) -> Node:
    """Return the node as a graph of its own, with values and run-time numbers renumbered from 0.

    A value that is passed several times gets a separate number for each occurrence.
    """
    values: list[int] = []
    params: list[int] = []

    def leaf(arg: Arg) -> Arg:
        if type(arg) is Ref:
            values.append(arg.index)
            return ref(len(values) - 1)
        if type(arg) is Param:
            params.append(arg.index)
            return Param(len(params) - 1)
        return arg

    args = map_arg(node.args, leaf)
    kwargs = tuple([(name, map_arg(arg, leaf)) for name, arg in node.kwargs])
    writes = tuple([values.index(value) for value in node.writes])
    return Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)


def params_of(node: Node) -> list[Param]:
    """Return the run-time numbers among a node's arguments, in order."""
    return list(map(Param, params_in((node.args, tuple([arg for _, arg in node.kwargs])))))


@cache
def is_composite(op: str) -> bool:
    """Return whether an op has a decomposition; False for random ops, dynamic ops and views."""
    if op.startswith("lazygt.") or "@" in op:
        return False
    f = facts(overload(op))
    return not (f.random or f.dynamic or f.views) and _decomposition_function(op) is not None


@lru_cache(maxsize=4096)
def decomposition(node: Node, operands: tuple[TensorMeta, ...]) -> Decomposition | None:
    """Return the decomposition of a node; None if it has none for these arguments.

    Args:
        node: renumbered by ``alone``.
        operands: the meta of each of its values.
    """
    if not is_composite(node.op) or any(meta.conj or meta.neg for meta in operands):
        return None
    try:
        traced = _trace(node, operands, _SAMPLES[0])
        if params_of(node):
            retraced = _trace(node, operands, _SAMPLES[1])
            return traced if retraced == traced else None
    except Exception:  # noqa: BLE001  torch's own: there is no decomposition for such arguments
        return None
    return traced


def _decomposition_function(op: str) -> Callable[..., Any] | None:
    """Return the decomposition function of an op: from ``FORMULAS``, else torch's own."""
    formula: Callable[..., Any] | None = FORMULAS.get(op)
    if formula is None and op not in _INEXACT:
        formula = decomposition_table.get(overload(op))
    return formula


def _trace(node: Node, operands: Sequence[TensorMeta], sample: float) -> Decomposition:
    """Trace the decomposition of a node on meta tensors.

    Args:
        sample: value of the first run-time number.
    """
    samples = [sample + _STEP * n for n in range(len(params_of(node)))]
    build = Builder(operands, ["float"] * len(samples), axis="", parts=1, index=0)
    tensors = [meta.empty("meta") for meta in operands]
    recorder = _Note(build, tensors, samples)

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return tensors[arg.index]
        if type(arg) is Param:
            return _Number(samples[arg.index])
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return torch.device("meta") if arg is DEVICE else arg

    function = _decomposition_function(node.op)
    assert function is not None
    args, kwargs = [leaf(arg) for arg in node.args], {name: leaf(arg) for name, arg in node.kwargs}
    with undispatched(), torch.no_grad(), recorder:
        returned = _flattened(function(*args, **kwargs))[: len(node.fresh)]
        new_outputs = [_as_expected(t, meta) for t, meta in zip(returned, node.fresh, strict=True)]
    if any(recorder.at[id(t)] != ref(n) for n, t in enumerate(tensors) if n not in node.writes):
        raise _Refused(f"{node.op}: its decomposition writes an operand that the op does not write")
    results = [*new_outputs, *(tensors[value_number] for value_number in node.writes)]
    outputs = [None if t is None else recorder.at[id(t)].index for t in results]
    _check(node, [None if number is None else build.metas[number] for number in outputs])
    return _without_dead_code(build, outputs)


def _without_dead_code(build: Builder, outputs: Sequence[int | None]) -> Decomposition:
    """Return the decomposition without the nodes that no result needs."""
    defined = [number for number in outputs if number is not None]
    graph = DeadCode().run(build.graph(list(map(ref, defined))))
    renumbering = dict(zip(defined, graph.outputs, strict=True))
    renumbered = [None if number is None else renumbering[number] for number in outputs]
    return Decomposition(len(graph.inputs), graph.nodes, graph.values, tuple(renumbered))


def _check(node: Node, results: Sequence[TensorMeta | None]) -> None:
    """Raise ``_Refused`` unless the results have the shapes and dtypes of the op's results."""
    for meta, expected in zip(results, node.results, strict=True):
        if (meta and (meta.shape, meta.dtype)) != (expected and (expected.shape, expected.dtype)):
            raise _Refused(f"{node.op}: its decomposition gives {meta} instead of {expected}")


def _as_expected(t: torch.Tensor | None, meta: TensorMeta | None) -> torch.Tensor | None:
    """Cast a result to the op's dtype; an empty result also gets the op's shape."""
    if t is None or meta is None:
        return None
    if meta.numel == 0 and t.shape != meta.shape:
        return torch.zeros(meta.shape, dtype=meta.dtype, device="meta")
    return t if t.dtype == meta.dtype else t.to(meta.dtype)


def _flattened(returned: Any) -> list[torch.Tensor | None]:
    """Flatten nested lists and tuples of tensors."""
    if isinstance(returned, (list, tuple)):
        return [t for item in returned for t in _flattened(item)]
    return [returned]


class _Number(float):
    """Sample of a run-time number.

    Python arithmetic returns a 0-d tensor, comparison and conversion raise ``_Refused``. torch's
    ops accept the sample as a float.
    """

    __slots__ = ()

    def _tensor(self) -> torch.Tensor:
        """Return the number as a 0-d tensor."""
        return torch.full((), float(self), dtype=torch.float64, device="meta")

    def _refuse(self, *others: object) -> Any:
        """Raise ``_Refused``: the result would depend on the number's value."""
        raise _Refused("a decomposition depends on a run-time number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = _refuse
    __hash__ = float.__hash__


def _arithmetic_method(calculate: Callable[[Any, Any], Any], reflected: bool) -> Callable[..., Any]:
    """Return a ``_Number`` method that calculates on a 0-d tensor of the number."""

    def method(self: _Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented  # torch's ops accept the number
        return calculate(other, self._tensor()) if reflected else calculate(self._tensor(), other)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _mark in ("", "r"):
        _method = _arithmetic_method(getattr(operator, _name), reflected=bool(_mark))
        setattr(_Number, f"__{_mark}{_name}__", _method)


class _Note(TorchDispatchMode):
    """Dispatch mode that records ops on meta tensors as nodes of a graph.

    Attributes:
        at: id of a tensor -> reference of its value in the graph.
    """

    def __init__(
        self, build: Builder, tensors: Sequence[torch.Tensor], samples: Sequence[float]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._build = build
        self._samples = {sample: Param(number) for number, sample in enumerate(samples)}
        self.at = {id(t): ref(number) for number, t in enumerate(tensors)}
        self._tensors = list(tensors)  # keeps the ids unique
        #: ids of tensors that share memory with others
        self._aliased: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, so dynamo needs no notification per op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, op = kwargs or {}, str(func)
        if op.startswith("prims."):
            with self:
                return FORMULAS.get(op, func.impl_aten)(*args, **kwargs)
        if op in _ALIASES:
            return self._tensor(self.at[id(args[0])])
        return self._record(facts(func), args, kwargs)

    def _record(self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op as a node; return its results as meta tensors."""
        written = [args[position] for position in f.writes] + [
            kwargs[name] for name in f.writes_named
        ]
        if (
            f.random
            or f.dynamic
            or f.name in UNDECLARED_WRITES
            or not self._share_no_memory(written)
        ):
            raise _Refused(f"a decomposition runs {f.name}")
        named = [
            (name, self._arg(arg)) for name, arg in kwargs.items() if name not in _MEMORY_ARGUMENTS
        ]
        refs = iter(self._build.node(f.name, tuple(map(self._arg, args)), tuple(named)))
        tensors = [t for arg in (*args, *kwargs.values()) for t in _flattened(arg)]
        count = len(self._build.nodes[-1].fresh)
        new_outputs = [None if at is None else self._tensor(at) for at in islice(refs, count)]
        for t, at in zip(written, refs, strict=True):
            assert at is not None
            self.at[id(t)] = at
        if f.aliases:
            self._aliased.update(map(id, (*tensors, *new_outputs)))
        return _returned(f, new_outputs, written)

    def _share_no_memory(self, written: Sequence[Any]) -> bool:
        """Return whether the written tensors share no memory with other tensors."""
        return all(isinstance(t, torch.Tensor) and id(t) not in self._aliased for t in written)

    def _tensor(self, at: Ref) -> torch.Tensor:
        """Create the meta tensor of a value, and register the tensor's id."""
        tensor = self._build.meta(at).empty("meta")
        self._tensors.append(tensor)
        self.at[id(tensor)] = at
        return tensor

    def _arg(self, arg: Any) -> Arg:
        """Convert an argument of an op to an argument of a node."""
        if isinstance(arg, torch.Tensor):
            return self.at[id(arg)]
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._arg, arg))
        if isinstance(arg, float):
            return self._samples.get(float(arg), arg)
        return DEVICE if isinstance(arg, torch.device) else arg


def _returned(
    f: OpFacts, new_outputs: Sequence[torch.Tensor | None], written: Sequence[Any]
) -> Any:
    """Return results in the structure of the op's schema: a list, a tuple or one tensor."""
    if f.outputs in (("fl",), ("vl",)):
        return list(new_outputs)
    next_new, next_written = iter(new_outputs), iter(written)
    results = tuple(next(next_new if letter in "fv" else next_written) for letter in f.outputs)
    return results[0] if len(results) == 1 else results
