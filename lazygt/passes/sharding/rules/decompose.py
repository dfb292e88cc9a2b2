"""Decomposition of an op into simpler ones, traced on meta tensors.

A sample stands for a run-time number. Arithmetic of Python on such a number becomes a tensor of one
element; a decomposition that would have to know the number is refused.
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
from lazygt.passes.sharding.builder import Builder
from lazygt.passes.sharding.rules.decompositions import FORMULAS

#: Two samples of each run-time number: numbers that no decomposition writes down.
_SAMPLES = (0.618033988749, 0.414213562373)
_STEP = 0.00731
#: Torch's decompositions that compute something else than the op: this one counts class 0 among the
#: targets wherever a sample ends with -1 (torch 2.13).
_WRONG = frozenset(
    {
        "aten.linspace.default",  # rounds otherwise than the kernel does
        "aten.linspace.out",
        "aten.logspace.default",
        "aten.logspace.out",
        "aten.multilabel_margin_loss_forward.default",
    }
)
#: The same tensor again, for autograd.
_ALIASES = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})
#: Arguments of a tensor's place, not of its contents.
_PLACES = frozenset({"layout", "pin_memory", "non_blocking"})


class _Refused(Exception):
    """Decomposition that depends on run-time values, or has effects that no graph can say."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Ops that an op is made of.

    Attributes:
        operands: number of values of the op itself: one a place where it takes a tensor.
        nodes: on numbered values, of which the operands are the first.
        metas: of every value.
        outputs: for each result of the op the number of its value; None where it is undefined.
    """

    operands: int
    nodes: tuple[Node, ...]
    metas: tuple[TensorMeta | None, ...]
    outputs: tuple[int | None, ...]

    def read(self) -> set[int]:
        """Return the values that a node takes, or that are results."""
        values = {value for node in self.nodes for value in node.refs()}
        return values | {value for value in self.outputs if value is not None}

    def numbered(self) -> Iterator[tuple[Node, range]]:
        """Yield the nodes with the numbers of their results."""
        start = self.operands
        for node in self.nodes:
            stop = start + len(node.results)
            yield node, range(start, stop)
            start = stop


def alone(node: Node) -> Node:
    """Return the node by itself, with values and run-time numbers numbered from 0.

    Every place where it takes a value has a number of its own.
    """
    places: list[int] = []
    params: list[int] = []

    def leaf(arg: Arg) -> Arg:
        if type(arg) is Ref:
            places.append(arg.index)
            return ref(len(places) - 1)
        if type(arg) is Param:
            params.append(arg.index)
            return Param(len(params) - 1)
        return arg

    args = map_arg(node.args, leaf)
    kwargs = tuple([(name, map_arg(arg, leaf)) for name, arg in node.kwargs])
    writes = tuple([places.index(value) for value in node.writes])
    return Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)


def params_of(node: Node) -> list[Param]:
    """Return the run-time numbers among a node's arguments, in order."""
    return list(map(Param, params_in((node.args, tuple([arg for _, arg in node.kwargs])))))


@cache
def is_composite(op: str) -> bool:
    """Return whether an op has a decomposition.

    False for random and dynamic ops, and for views.
    """
    if op.startswith("lazygt.") or "@" in op:
        return False
    f = facts(overload(op))
    return not (f.random or f.dynamic or f.views) and _function(op) is not None


@lru_cache(maxsize=4096)
def decomposition(node: Node, operands: tuple[TensorMeta, ...]) -> Decomposition | None:
    """Return the ops that a node is made of; None where it cannot be taken apart.

    Args:
        node: see ``alone``.
        operands: the meta of each of its values.
    """
    if not is_composite(node.op) or any(meta.conj or meta.neg for meta in operands):
        return None
    try:
        traced = _trace(node, operands, _SAMPLES[0])
        if params_of(node):
            again = _trace(node, operands, _SAMPLES[1])
            return traced if again == traced else None
    except Exception:  # noqa: BLE001  torch's own: there is no decomposition for such arguments
        return None
    return traced


def _function(op: str) -> Callable[..., Any] | None:
    """Return the decomposition of an op: a formula of ours, or torch's own."""
    formula: Callable[..., Any] | None = FORMULAS.get(op)
    if formula is None and op not in _WRONG:
        formula = decomposition_table.get(overload(op))
    return formula


def _trace(node: Node, operands: Sequence[TensorMeta], sample: float) -> Decomposition:
    """Trace the decomposition of a node."""
    samples = [sample + _STEP * n for n in range(len(params_of(node)))]
    build = Builder(operands, ["float"] * len(samples), axis="", parts=1, index=0)
    tensors = [meta.empty("meta") for meta in operands]
    note = _Note(build, tensors, samples)

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return tensors[arg.index]
        if type(arg) is Param:
            return _Number(samples[arg.index])
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return torch.device("meta") if arg is DEVICE else arg

    function = _function(node.op)
    assert function is not None
    args, kwargs = [leaf(arg) for arg in node.args], {name: leaf(arg) for name, arg in node.kwargs}
    with undispatched(), torch.no_grad(), note:
        returned = _flat(function(*args, **kwargs))[: len(node.fresh)]
        fresh = [_as_there(t, meta) for t, meta in zip(returned, node.fresh, strict=True)]
    if any(note.at[id(t)] != ref(n) for n, t in enumerate(tensors) if n not in node.writes):
        raise _Refused(f"{node.op}: its decomposition writes what the op does not")
    results = [*fresh, *(tensors[place] for place in node.writes)]
    outputs = [None if t is None else note.at[id(t)].index for t in results]
    _check(node, [None if number is None else build.metas[number] for number in outputs])
    return _needed(build, outputs)


def _needed(build: Builder, outputs: Sequence[int | None]) -> Decomposition:
    """Drop the nodes that no result needs."""
    there = [number for number in outputs if number is not None]
    graph = DeadCode().run(build.graph(list(map(ref, there))))
    moved = dict(zip(there, graph.outputs, strict=True))
    renumbered = [None if number is None else moved[number] for number in outputs]
    return Decomposition(len(graph.inputs), graph.nodes, graph.values, tuple(renumbered))


def _check(node: Node, results: Sequence[TensorMeta | None]) -> None:
    """Raise unless the results have the shapes and dtypes of the op's."""
    for meta, wanted in zip(results, node.results, strict=True):
        if (meta and (meta.shape, meta.dtype)) != (wanted and (wanted.shape, wanted.dtype)):
            raise _Refused(f"{node.op}: its decomposition gives {meta} instead of {wanted}")


def _as_there(t: torch.Tensor | None, meta: TensorMeta | None) -> torch.Tensor | None:
    """Return a result with the dtype that the op gives on workers, and its shape if empty."""
    if t is None or meta is None:
        return None
    if meta.numel == 0 and t.shape != meta.shape:
        return torch.zeros(meta.shape, dtype=meta.dtype, device="meta")
    return t if t.dtype == meta.dtype else t.to(meta.dtype)


def _flat(returned: Any) -> list[torch.Tensor | None]:
    if isinstance(returned, (list, tuple)):
        return [t for item in returned for t in _flat(item)]
    return [returned]


class _Number(float):
    """Sample of a run-time number: arithmetic makes a tensor of it, comparison is refused.

    torch's ops take it as the number that it is.
    """

    __slots__ = ()

    def _tensor(self) -> torch.Tensor:
        return torch.full((), float(self), dtype=torch.float64, device="meta")

    def _refuse(self, *others: object) -> Any:
        raise _Refused("a decomposition depends on a run-time number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = _refuse
    __hash__ = float.__hash__


def _calculated(calculate: Callable[[Any, Any], Any], reflected: bool) -> Callable[..., Any]:
    def method(self: _Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented  # torch takes the number as it is
        return calculate(other, self._tensor()) if reflected else calculate(self._tensor(), other)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _mark in ("", "r"):
        _method = _calculated(getattr(operator, _name), reflected=bool(_mark))
        setattr(_Number, f"__{_mark}{_name}__", _method)


class _Note(TorchDispatchMode):
    """Dispatch mode that records ops on meta tensors as nodes.

    Attributes:
        at: id of a tensor -> its value.
    """

    def __init__(
        self, build: Builder, tensors: Sequence[torch.Tensor], samples: Sequence[float]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._build = build
        self._samples = {sample: Param(number) for number, sample in enumerate(samples)}
        self.at = {id(t): ref(number) for number, t in enumerate(tensors)}
        self._kept = list(tensors)  # so that no other tensor gets the id of one
        #: ids of tensors that share memory with others
        self._shared: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, so dynamo need not be told at each op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if name.startswith("prims."):
            with self:
                return FORMULAS.get(name, func.impl_aten)(*args, **kwargs)
        if name in _ALIASES:
            return self._tensor(self.at[id(args[0])])
        return self._noted(facts(func), args, kwargs)

    def _noted(self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [args[place] for place in f.writes] + [kwargs[name] for name in f.writes_named]
        if f.random or f.dynamic or f.name in UNDECLARED_WRITES or not self._are_apart(written):
            raise _Refused(f"a decomposition runs {f.name}")
        named = [(name, self._arg(arg)) for name, arg in kwargs.items() if name not in _PLACES]
        refs = iter(self._build.node(f.name, tuple(map(self._arg, args)), tuple(named)))
        tensors = [t for arg in (*args, *kwargs.values()) for t in _flat(arg)]
        count = len(self._build.nodes[-1].fresh)
        fresh = [None if at is None else self._tensor(at) for at in islice(refs, count)]
        for t, at in zip(written, refs, strict=True):
            assert at is not None
            self.at[id(t)] = at
        if f.aliases:
            self._shared.update(map(id, (*tensors, *fresh)))
        return _returned(f, fresh, written)

    def _are_apart(self, written: Sequence[Any]) -> bool:
        """Return whether no other tensor shares memory with the written ones."""
        return all(isinstance(t, torch.Tensor) and id(t) not in self._shared for t in written)

    def _tensor(self, at: Ref) -> torch.Tensor:
        made = self._build.meta(at).empty("meta")
        self._kept.append(made)
        self.at[id(made)] = at
        return made

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            return self.at[id(arg)]
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._arg, arg))
        if isinstance(arg, float):
            return self._samples.get(float(arg), arg)
        return DEVICE if isinstance(arg, torch.device) else arg


def _returned(f: OpFacts, fresh: Sequence[torch.Tensor | None], written: Sequence[Any]) -> Any:
    """Return results in the form that the op's schema says."""
    if f.outputs in (("fl",), ("vl",)):
        return list(fresh)
    new, old = iter(fresh), iter(written)
    made = tuple(next(new if kind in "fv" else old) for kind in f.outputs)
    return made[0] if len(made) == 1 else made
