"""fold: constant folding, and removal of ops that change nothing.

Bit for bit, and therefore conservative: ``x + 0`` goes away for whole numbers, but not for floats,
where it turns -0.0 into 0.0, and ``x * 1`` not for 16-bit floats, where it changes a NaN's bits.
Python numbers are known only at run time, so only numbers that torch itself put into the program
are folded (``ones_like`` at the start of a backward pass).

- a view equal to an earlier view in its chain: ``t(t(x))``, ``view(view(x))``
- a view of a view of contiguous memory: one view
- a write through a view of all of a value, as gradients are added up through ``t(t(x))``
- ``x + 0``, ``x - 0``, ``x * 1``, ``x / 1``, ``-(-x)``, with a literal or a tensor of one number
- a cast there and back, and a cast through a dtype that loses nothing; a copy that is never written
- arithmetic on constants: a constant

A value replaces a copy of it only if its memory is neither written nor larger than the copy: the
copy may be there to free the larger memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazygt.graph.alias import WRITE_BACK, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref, params_in, ref
from lazygt.graph.ops import overload
from lazygt.passes.base import Placed, placed, rebuild, view_source, written_through
from lazygt.passes.questions import ask, row_major

#: A value that stands for the node's result, a node in its stead, or None: leave it.
Folded = int | Node | None
Number = bool | int | float

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
#: Views that their schema does not declare.
_UNDECLARED_VIEWS = ("aten._unsafe_view.default", "aten._reshape_alias.default",
                     "aten.lift.default", "aten.lift_fresh.default")  # fmt: skip
#: Dtypes with a kernel for all arithmetic. For any other the worker reports a missing kernel.
_COMPUTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
             torch.int16, torch.int8, torch.uint8, torch.bool)  # fmt: skip
_FILLED = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
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
    """Return whether results surely lie in the operand's memory (in ``view_source`` maybe)."""
    f = op_facts(node)
    return f is not None and not node.writes and (f.views or node.op in _UNDECLARED_VIEWS)


class Fold:
    """One walk from the first node to the last; each rule sees its operands already folded."""

    name = "fold"

    def run(self, graph: Graph) -> Graph:
        return _Fold(graph).run()


class _Fold:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.metas = graph.values
        self.written = written_through(graph)
        self.same: dict[int, int] = {}
        #: value -> the node that makes it, with folded operands
        self.makers: dict[int, Node] = {}
        #: view -> the first value of its chain
        self.roots: dict[int, int] = {}
        #: value -> the common number of all its elements
        self.numbers: dict[int, Number] = {}

    def run(self) -> Graph:
        rows = []
        changed = False
        for row in placed(self.graph):
            folded = self._folded(row)
            if type(folded) is int:
                self.same[row.results[0]] = folded
                changed = True
                continue
            node = folded if isinstance(folded, Node) else row.node
            self._learn_root(node, row)
            changed = changed or node is not row.node
            if len(row.results) == 1:
                self.makers[row.results[0]] = node
            rows.append(Placed(node, row.results, row.source))
        return rebuild(self.graph, rows, self.same) if changed else self.graph

    def _folded(self, row: Placed) -> Folded:
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
        self._learn_number(node, result)
        rule = _RULES.get(node.op)
        return rule(self, node, result) if rule is not None else None

    def value(self, arg: Arg) -> int | None:
        """Return the value that an argument names, after folding; None if it is no tensor."""
        return self.same.get(arg.index, arg.index) if type(arg) is Ref else None

    def number(self, arg: Arg) -> Number | None:
        """Return the common number of all elements of an argument; None if it is not known."""
        if type(arg) in (bool, int, float):
            return arg  # type: ignore[no-any-return]
        value = self.value(arg)
        return None if value is None else self.numbers.get(value)

    def stands_for(self, value: int | None, result: int) -> int | None:
        """Return ``value`` if it can replace ``result``, which has memory of its own; else None."""
        if value is None or self.metas[value] != self.metas[result] or not self.may_stay(value):
            return None
        return value

    def may_stay(self, value: int) -> bool:
        """Return whether a later read of ``value`` costs no copy at a write, and no memory."""
        root = self.roots.get(value, value)
        meta, whole = self.metas[value], self.metas[root]
        if root in self.written or meta is None or whole is None:
            return False
        return whole is meta or ask(_no_larger, whole, meta)

    def _learn_root(self, node: Node, row: Placed) -> None:
        source = view_source(node)
        if source is not None:
            root = self.same.get(source, source)
            self.roots.update(dict.fromkeys(row.results, self.roots.get(root, root)))

    def _write_back(self, node: Node) -> Folded:
        """Return a view that shows all of its base in its layout: it is the base's new version."""
        base, value = self.value(node.args[0]), self.value(node.args[1])
        assert base is not None
        alike = value is not None and self.metas[base] == self.metas[value]
        return value if alike and not params_in(node.args) else None

    # -- views ---------------------------------------------------------------------------

    def _view(self, node: Node, result: int) -> Folded:
        source = view_source(node)
        assert source is not None
        source = self.same.get(source, source)
        if source in self.numbers and _same_bits(self.metas[source], self.metas[result]):
            self.numbers[result] = self.numbers[source]
        above: int | None = source
        while above is not None:
            if above not in self.written and self.metas[above] == self.metas[result]:
                return above
            maker = self.makers.get(above)
            parent = view_source(maker) if maker is not None and is_view(maker) else None
            above = self.same.get(parent, parent) if parent is not None else None
        return self._view_of_view(node, source, result)

    def _view_of_view(self, node: Node, source: int, result: int) -> Folded:
        maker = self.makers.get(source)
        if maker is None or node.op not in _VIEWS or maker.op not in _VIEWS:
            return None
        root = self.value(maker.args[0])
        meta, result_meta = self.metas[root] if root is not None else None, self.metas[result]
        if root is None or root in self.written or meta is None or result_meta is None:
            return None
        if meta.dtype != result_meta.dtype or not ask(row_major, meta):
            return None
        return Node(node.op, (ref(root), *node.args[1:]), node.kwargs, node.fresh)

    # -- constants -----------------------------------------------------------------------

    def _learn_number(self, node: Node, result: int) -> None:
        name = node.op.split(".")[1]
        meta = self.metas[result]
        if name in _FILLED:
            self.numbers[result] = _FILLED[name]
        elif node.op == "aten.full.default" and type(node.args[1]) in (bool, int, float) and meta:
            self.numbers[result] = torch.full((), node.args[1], dtype=meta.dtype).item()

    def constant(self, node: Node, result: int) -> Folded:
        """Fold arithmetic on known operands: it is computed here, with torch's own kernel."""
        meta = self.metas[result]
        assert meta is not None
        if not ask(row_major, meta) or meta.offset or meta.dtype not in _COMPUTED:
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
        if type(arg) in (bool, int, float):
            return arg
        value = self.value(arg)
        number = None if value is None else self.numbers.get(value)
        meta = None if value is None else self.metas[value]
        if number is None or meta is None or meta.dtype not in _COMPUTED:
            return None
        # one element, in as many dimensions: type promotion asks for them
        return torch.full((1,) * len(meta.shape), number, dtype=meta.dtype, device="cpu")


def _no_larger(meta: TensorMeta, other: TensorMeta) -> bool:
    """Return whether a tensor has at most the bytes of another."""
    return meta.nbytes <= other.nbytes


def _same_bits(a: TensorMeta | None, b: TensorMeta | None) -> bool:
    """Return whether a view shows its base's numbers as they are."""
    if a is None or b is None:
        return False
    return (a.dtype, a.conj, a.neg) == (b.dtype, b.conj, b.neg)


# -- the rules of single ops ----------------------------------------------------------------


def _neutral(neutral: Callable[[Number, TensorMeta], bool], both: bool) -> Rule:
    """Return a rule that drops an op with its neutral number, on the right or on either side."""

    def rule(fold: _Fold, node: Node, result: int) -> Folded:
        meta = fold.metas[result]
        assert meta is not None
        alpha = dict(node.kwargs).get("alpha", 1)
        for kept, other in ((0, 1), (1, 0)) if both else ((0, 1),):
            number = fold.number(node.args[other])
            known = number is not None and not isinstance(alpha, Param) and alpha == 1
            if known and neutral(number, meta):  # type: ignore[arg-type]
                value = fold.stands_for(fold.value(node.args[kept]), result)
                if value is not None:
                    return value
        return fold.constant(node, result)

    return rule


def _adds_nothing(number: Number, meta: TensorMeta) -> bool:
    return number == 0 and (_whole(meta) or (_real(meta) and str(number) == "-0.0"))


def _takes_nothing(number: Number, meta: TensorMeta) -> bool:
    return number == 0 and _real(meta) and str(number) != "-0.0"


def _is_one(number: Number, meta: TensorMeta) -> bool:
    return number == 1 and _real(meta)


def _real(meta: TensorMeta) -> bool:
    return not meta.dtype.is_complex and not _rounded(meta)


def _rounded(meta: TensorMeta) -> bool:
    """Return whether kernels compute in float32 and round: a NaN's bits then vary by kernel."""
    return meta.dtype.is_floating_point and meta.dtype.itemsize < 4


def _whole(meta: TensorMeta) -> bool:
    return not (meta.dtype.is_complex or meta.dtype.is_floating_point)


def _negation(fold: _Fold, node: Node, result: int) -> Folded:
    value = fold.value(node.args[0])
    maker = fold.makers.get(value) if value is not None else None
    meta = fold.metas[result]
    if maker is None or maker.op != node.op or meta is None or _rounded(meta):
        return fold.constant(node, result)
    return fold.stands_for(fold.value(maker.args[0]), result)


def _cast(fold: _Fold, node: Node, result: int) -> Folded:
    """Fold a cast to the operand's own dtype, or by way of a dtype that holds it exactly."""
    if any(name not in ("dtype", "device", "layout", "memory_format") for name, _ in node.kwargs):
        return None
    value = fold.value(node.args[0])
    source = fold.stands_for(value, result)
    if source is not None or value is None:
        return source
    maker = fold.makers.get(value)
    if maker is None or maker.op != node.op or node.op != "aten._to_copy.default":
        return None
    root = fold.value(maker.args[0])
    if root is None or not fold.may_stay(root):
        return None
    before, between, after = fold.metas[root], fold.metas[value], fold.metas[result]
    if before is None or between is None or after is None or before.stride != between.stride:
        return None
    # the result for a float out of a whole number's range depends on the route
    if between.dtype not in _WIDER.get(before.dtype, ()) or (_whole(after) and not _whole(before)):
        return None
    if _rounded(after) and not _whole(before):
        return None
    source = fold.stands_for(root, result)
    if source is not None:
        return source
    return Node(node.op, (ref(root), *node.args[1:]), node.kwargs, node.fresh)


Rule = Callable[[_Fold, Node, int], Folded]
_RULES: dict[str, Rule] = {
    "aten.add.Tensor": _neutral(_adds_nothing, both=True),
    "aten.sub.Tensor": _neutral(_takes_nothing, both=False),
    "aten.mul.Tensor": _neutral(_is_one, both=True),
    "aten.div.Tensor": _neutral(_is_one, both=False),
    "aten.neg.default": _negation,
    "aten._to_copy.default": _cast,
    "aten.clone.default": _cast,
}
