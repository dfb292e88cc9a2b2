"""fold: constant folding, and removal of ops without effect.

Results do not change by a bit, so the rules are conservative: ``x + 0`` is removed for integers,
but not for floats, where it turns -0.0 into 0.0, and ``x * 1`` not for 16-bit floats, where it
changes a NaN's bits. Python numbers are known only at run time, so only numbers that torch itself
put into the program are folded (``ones_like`` at the start of a backward pass).

- a view equal to an earlier view in its chain: ``t(t(x))``, ``view(view(x))``
- a view of a view of contiguous memory, merged to one view
- a write through a view of all of a value, as in gradient accumulation through ``t(t(x))``
- ``x + 0``, ``x - 0``, ``x * 1``, ``x / 1``, ``-(-x)``, with a literal or a constant tensor
- a cast and its inverse, and a cast through a wider dtype; a copy that is never written
- arithmetic on constants, replaced by its result

A value replaces a copy of itself only if its memory is neither written nor larger than the copy:
the copy may be there to free the larger memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazygt.graph.alias import WRITE_BACK, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref, params_in, ref
from lazygt.graph.ops import overload
from lazygt.passes.base import NodeRow, rebuild, rows_of, view_source, written_through
from lazygt.passes.guards import guard, row_major

#: The value that replaces the node's result, the node that replaces the node, or None: no change.
Folded = int | Node | None
Number = bool | int | float

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
#: Ops with results that are views although their schemas do not say so.
_UNDECLARED_VIEWS = ("aten._unsafe_view.default", "aten._reshape_alias.default",
                     "aten.lift.default", "aten.lift_fresh.default")  # fmt: skip
#: Dtypes with a kernel for all arithmetic. Other dtypes are left to the worker, which reports a
#: missing kernel.
_COMPUTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
             torch.int16, torch.int8, torch.uint8, torch.bool)  # fmt: skip
#: Ops that fill a tensor with a number -> the number.
_FILLED = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
#: Dtype -> dtypes that represent all of its values.
_WIDER = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.int8: (torch.int16, torch.int32, torch.int64),
    torch.uint8: (torch.int16, torch.int32, torch.int64),
    torch.int16: (torch.int32, torch.int64),
    torch.int32: (torch.int64,),
}


def is_view(node: Node) -> bool:
    """Return whether a node's results are always views; ``view_source`` counts possible ones."""
    f = op_facts(node)
    return f is not None and not node.writes and (f.views or node.op in _UNDECLARED_VIEWS)


class Fold:
    """Constant folding in one walk from the first node to the last; operands are folded first."""

    name = "fold"

    def run(self, graph: Graph) -> Graph:
        return _Fold(graph).run()


class _Fold:
    """State of the walk: replaced values, and facts about values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.metas = graph.values
        #: values that some node writes
        self.written = written_through(graph)
        #: folded value -> the value that replaces it
        self.replaced: dict[int, int] = {}
        #: value -> its producer, with folded operands
        self.producers: dict[int, Node] = {}
        #: view -> the first value of its chain
        self.roots: dict[int, int] = {}
        #: constant value -> the number that all its elements have
        self.numbers: dict[int, Number] = {}

    def run(self) -> Graph:
        """Return the folded graph; the given one if nothing is folded."""
        rows = []
        changed = False
        for row in rows_of(self.graph):
            folded = self._folded(row)
            if type(folded) is int:
                self.replaced[row.results[0]] = folded
                changed = True
                continue
            node = folded if isinstance(folded, Node) else row.node
            self._record_root(node, row)
            changed = changed or node is not row.node
            if len(row.results) == 1:
                self.producers[row.results[0]] = node
            rows.append(NodeRow(node, row.results, row.source))
        return rebuild(self.graph, rows, self.replaced) if changed else self.graph

    def _folded(self, row: NodeRow) -> Folded:
        """Apply the rules to a node."""
        node = row.node
        if len(row.results) != 1 or node.writes or node.dynamic or not node.fresh[0]:
            return None
        if node.op == WRITE_BACK:
            return self._write_back(node)
        result = row.results[0]
        if result in self.written:
            return None
        if is_view(node):
            return self._view(node, result)
        self._record_number(node, result)
        rule = _RULES.get(node.op)
        return rule(self, node, result) if rule is not None else None

    def value(self, arg: Arg) -> int | None:
        """Return the number of an argument's value after folding; None if it is no tensor."""
        return self.replaced.get(arg.index, arg.index) if type(arg) is Ref else None

    def number(self, arg: Arg) -> Number | None:
        """Return the number that all elements of an argument have; None for other arguments."""
        if type(arg) in (bool, int, float):
            return arg  # type: ignore[no-any-return]
        value = self.value(arg)
        return None if value is None else self.numbers.get(value)

    def replacement(self, value: int | None, result: int) -> int | None:
        """Return ``value`` if it can replace ``result``, a copy in other memory; else None."""
        if value is None or self.metas[value] != self.metas[result] or not self.may_stay(value):
            return None
        return value

    def may_stay(self, value: int) -> bool:
        """Return whether keeping ``value`` alive costs neither a copy on write nor memory."""
        root = self.roots.get(value, value)
        meta, root_meta = self.metas[value], self.metas[root]
        if root in self.written or meta is None or root_meta is None:
            return False
        return root_meta is meta or guard(_no_larger, root_meta, meta)

    def _record_root(self, node: Node, row: NodeRow) -> None:
        """Record the base of a view's results."""
        source = view_source(node)
        if source is not None:
            root = self.replaced.get(source, source)
            self.roots.update(dict.fromkeys(row.results, self.roots.get(root, root)))

    def _write_back(self, node: Node) -> Folded:
        """Fold a write through a view with the meta of its base: the view replaces the base."""
        base, value = self.value(node.args[0]), self.value(node.args[1])
        assert base is not None
        has_same_meta = value is not None and self.metas[base] == self.metas[value]
        return value if has_same_meta and not params_in(node.args) else None

    # -- views ---------------------------------------------------------------------------

    def _view(self, node: Node, result: int) -> Folded:
        """Fold a view that equals an earlier value of its chain, else a view of a view."""
        source = view_source(node)
        assert source is not None
        source = self.replaced.get(source, source)
        if source in self.numbers and _same_bits(self.metas[source], self.metas[result]):
            self.numbers[result] = self.numbers[source]
        ancestor: int | None = source
        while ancestor is not None:
            if ancestor not in self.written and self.metas[ancestor] == self.metas[result]:
                return ancestor
            producer = self.producers.get(ancestor)
            parent = view_source(producer) if producer is not None and is_view(producer) else None
            ancestor = self.replaced.get(parent, parent) if parent is not None else None
        return self._view_of_view(node, source, result)

    def _view_of_view(self, node: Node, source: int, result: int) -> Folded:
        """Fold a ``view`` of a ``view`` of contiguous memory to one ``view``."""
        producer = self.producers.get(source)
        if producer is None or node.op not in _VIEWS or producer.op not in _VIEWS:
            return None
        root = self.value(producer.args[0])
        meta, result_meta = self.metas[root] if root is not None else None, self.metas[result]
        if root is None or root in self.written or meta is None or result_meta is None:
            return None
        if meta.dtype != result_meta.dtype or not guard(row_major, meta):
            return None
        return Node(node.op, (ref(root), *node.args[1:]), node.kwargs, node.fresh)

    # -- constants -----------------------------------------------------------------------

    def _record_number(self, node: Node, result: int) -> None:
        """Record the number that fills the result of ``zeros``, ``ones``, ``full`` and the like."""
        name = node.op.split(".")[1]
        meta = self.metas[result]
        if name in _FILLED:
            self.numbers[result] = _FILLED[name]
        elif node.op == "aten.full.default" and type(node.args[1]) in (bool, int, float) and meta:
            self.numbers[result] = torch.full((), node.args[1], dtype=meta.dtype).item()

    def constant(self, node: Node, result: int) -> Folded:
        """Fold arithmetic on constants; torch's own kernel computes the result."""
        meta = self.metas[result]
        assert meta is not None
        if not guard(row_major, meta) or meta.offset or meta.dtype not in _COMPUTED:
            return None
        operands = [self._constant_operand(arg) for arg in node.args]
        tensors = any(isinstance(operand, torch.Tensor) for operand in operands)
        if node.kwargs or not tensors or any(operand is None for operand in operands):
            return None
        value = overload(node.op)(*operands)
        number = value.item()
        if value.dtype != meta.dtype or number != number:  # a NaN does not even equal itself
            return None
        self.numbers[result] = number
        return Node("aten.full.default", (meta.shape, number),
                    (("dtype", meta.dtype), ("device", DEVICE)), node.fresh)  # fmt: skip

    def _constant_operand(self, arg: Arg) -> Any:
        """Return an argument as a number or a tensor of one element; None if it is not constant."""
        if type(arg) in (bool, int, float):
            return arg
        value = self.value(arg)
        number = None if value is None else self.numbers.get(value)
        meta = None if value is None else self.metas[value]
        if number is None or meta is None or meta.dtype not in _COMPUTED:
            return None
        # one element, in the same number of dimensions, on which type promotion depends
        return torch.full((1,) * len(meta.shape), number, dtype=meta.dtype, device="cpu")


def _no_larger(meta: TensorMeta, other: TensorMeta) -> bool:
    """Return whether a tensor has at most the bytes of another."""
    return meta.nbytes <= other.nbytes


def _same_bits(a: TensorMeta | None, b: TensorMeta | None) -> bool:
    """Return whether a view reads its base's bits as the same numbers."""
    if a is None or b is None:
        return False
    return (a.dtype, a.conj, a.neg) == (b.dtype, b.conj, b.neg)


# -- the rules of single ops ----------------------------------------------------------------


def _identity_rule(is_identity: Callable[[Number, TensorMeta], bool], both: bool) -> Rule:
    """Return a rule that removes an op with its identity element, and else folds constants.

    Args:
        is_identity: predicate of the identity element.
        both: also look for the identity element on the left.
    """

    def rule(fold: _Fold, node: Node, result: int) -> Folded:
        meta = fold.metas[result]
        assert meta is not None
        alpha = dict(node.kwargs).get("alpha", 1)
        for operand, identity in ((0, 1), (1, 0)) if both else ((0, 1),):
            number = fold.number(node.args[identity])
            is_known = number is not None and not isinstance(alpha, Param) and alpha == 1
            if is_known and is_identity(number, meta):  # type: ignore[arg-type]
                value = fold.replacement(fold.value(node.args[operand]), result)
                if value is not None:
                    return value
        return fold.constant(node, result)

    return rule


def _is_additive_identity(number: Number, meta: TensorMeta) -> bool:
    return number == 0 and (_is_integer(meta) or (_is_exact(meta) and str(number) == "-0.0"))


def _is_subtractive_identity(number: Number, meta: TensorMeta) -> bool:
    return number == 0 and _is_exact(meta) and str(number) != "-0.0"


def _is_multiplicative_identity(number: Number, meta: TensorMeta) -> bool:
    return number == 1 and _is_exact(meta)


def _is_exact(meta: TensorMeta) -> bool:
    """Return whether an op with its identity element keeps every bit in this dtype."""
    return not meta.dtype.is_complex and not _is_rounded(meta)


def _is_rounded(meta: TensorMeta) -> bool:
    """Return whether kernels compute in float32 and round, so that a NaN's bits vary by kernel."""
    return meta.dtype.is_floating_point and meta.dtype.itemsize < 4


def _is_integer(meta: TensorMeta) -> bool:
    return not (meta.dtype.is_complex or meta.dtype.is_floating_point)


def _negation(fold: _Fold, node: Node, result: int) -> Folded:
    """Fold a negation of a negation, or of a constant."""
    value = fold.value(node.args[0])
    producer = fold.producers.get(value) if value is not None else None
    meta = fold.metas[result]
    if producer is None or producer.op != node.op or meta is None or _is_rounded(meta):
        return fold.constant(node, result)
    return fold.replacement(fold.value(producer.args[0]), result)


def _cast(fold: _Fold, node: Node, result: int) -> Folded:
    """Fold a cast to the operand's own dtype, or two casts through a wider dtype."""
    if any(name not in ("dtype", "device", "layout", "memory_format") for name, _ in node.kwargs):
        return None
    value = fold.value(node.args[0])
    source = fold.replacement(value, result)
    if source is not None or value is None:
        return source
    producer = fold.producers.get(value)
    if producer is None or producer.op != node.op or node.op != "aten._to_copy.default":
        return None
    root = fold.value(producer.args[0])
    if root is None or not fold.may_stay(root):
        return None
    before, between, after = fold.metas[root], fold.metas[value], fold.metas[result]
    if before is None or between is None or after is None or before.stride != between.stride:
        return None
    # the result for a float outside of an integer's range depends on the intermediate dtype
    if between.dtype not in _WIDER.get(before.dtype, ()) or (
        _is_integer(after) and not _is_integer(before)
    ):
        return None
    if _is_rounded(after) and not _is_integer(before):
        return None
    source = fold.replacement(root, result)
    if source is not None:
        return source
    return Node(node.op, (ref(root), *node.args[1:]), node.kwargs, node.fresh)


Rule = Callable[[_Fold, Node, int], Folded]
_RULES: dict[str, Rule] = {
    "aten.add.Tensor": _identity_rule(_is_additive_identity, both=True),
    "aten.sub.Tensor": _identity_rule(_is_subtractive_identity, both=False),
    "aten.mul.Tensor": _identity_rule(_is_multiplicative_identity, both=True),
    "aten.div.Tensor": _identity_rule(_is_multiplicative_identity, both=False),
    "aten.neg.default": _negation,
    "aten._to_copy.default": _cast,
    "aten.clone.default": _cast,
}
