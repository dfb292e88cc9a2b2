"""Sharding rules as text: what each dim of an op's operands becomes in its results.

    rule("mm.default", "* i k, * k j -> i j")

A text names the dims of the tensor arguments in the order of the op's schema, then those of its
results. Dims of one name are one *factor*: split together they are one way to run the op on the
ranks of an axis, so one strategy. Operands and results that a text does not reach stay whole.

Dims, separated by spaces:

- ``i``: a letter is a dim. A letter that a result lacks is summed over: it is left partial.
- ``...``: the dims that the letters leave over, none or many; they are aligned from the right.
- ``!i``, ``!...``: stays whole. Only such a letter may be of results alone, or twice in a tensor.
- ``...@dim``: among these dims is the one that the op's argument ``dim`` names, or those of a list
  (all, where it names none), counted within ``...``; they stay whole. With ``keepdim=False`` a
  result does not have them.
- ``_``: all dims stay whole, of any number.

Before an operand's dims:

- ``*``: the op is linear in it while the others are whole: of partial sums it gives partial sums.
- ``+``: it is added to the result, and so partial where that is.
- ``=``: its elements are only moved: any partial passes.

Before a result's dims: ``max``, ``min`` or ``prod``, what it is left partial in instead of a sum.

A dim of size 1 that is larger elsewhere is broadcast: whole in an operand, summed over in a result.
Where sizes differ otherwise, as of query heads that share a key's, ranks must have as many each. A
tensor with fewer dims than letters has the last of them; such a result without elements was not
asked for, and is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from lazygt.graph.node import Node
from lazygt.graph.ops import overload
from lazygt.graph.placement import Partial, Placement
from lazygt.passes.sharding.rules.base import Call, Metas, P, R, Rule, S, Strategy, zeros_when_empty
from lazygt.passes.sharding.rules.text import Dims, Text, parse
from lazygt.passes.sharding.rules.views import PARTIALS, sized

#: A letter, or a dim of "...", counted from its right.
Factor = str | int


def rule(
    ops: str,
    text: str,
    *,
    no_empty: bool = False,
    sizes: str = "",
    keeping: Callable[[Call], str] | None = None,
) -> Mapping[str, Rule]:
    """One text for several ops.

    Args:
        ops: names without ``aten.``, separated by spaces.
        no_empty: the kernel takes no empty block: a rank with one gives zeros.
        sizes: the argument with the sizes of the first result; it gets those of a block.
        keeping: the letters that stay whole in a call, besides those of the text.

    Raises:
        ValueError: the text is none, or not one for these ops.
    """
    parsed = parse(text, ops)
    for op in ops.split():
        _check(op, parsed, text, sizes)
    made = _rule(parsed, no_empty, sizes, keeping)
    return {f"aten.{op}": made for op in ops.split()}


def strategies_by(call: Call, text: str, *, no_empty: bool = False) -> list[Strategy]:
    """The strategies of one call by a text that depends on it."""
    return _Match(call, parse(text, call.node.op)).strategies(no_empty)


def _rule(text: Text, no_empty: bool, sizes: str, keeping: Callable[[Call], str] | None) -> Rule:
    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        match = _Match(call, text, keeping(call) if keeping else "")
        return match.strategies(no_empty, sizes)

    return strategies


def _check(op: str, text: Text, written: str, sizes: str) -> None:
    """Raise where an op has fewer tensors or other arguments than its text says."""
    name, _, which = op.partition(".")
    try:
        schema = torch._C._get_schema(f"aten::{name}", which.replace("default", ""))
    except RuntimeError:
        return  # another torch's op: tests ask that there is one
    tensors = sum(str(a.type) in _TENSORS for a in schema.arguments)
    wrong = ""
    if len(text.operands) > tensors:
        wrong = f"it has {tensors} tensor arguments, not {len(text.operands)}"
    if len(text.results) > len(schema.returns):
        wrong = f"it has {len(schema.returns)} results, not {len(text.results)}"
    asked = [sizes, *(dims.argument for dims in (*text.operands, *text.results))]
    unknown = {name for name in asked if name} - {a.name for a in schema.arguments}
    if unknown:
        wrong = f"it has no argument {' or '.join(sorted(unknown))}"
    if wrong:
        raise ValueError(f"sharding rule of {op}: {wrong}\n  {written}")


_TENSORS = ("Tensor", "Optional[Tensor]")


@lru_cache(maxsize=1024)
def _tensor_arguments(op: str) -> tuple[str, ...]:
    arguments = overload(op)._schema.arguments
    return tuple([a.name for a in arguments if str(a.type) in _TENSORS])


class _Tensor(NamedTuple):
    """An operand or result: its text, its shape, and the factor of each dim; None: whole."""

    dims: Dims
    shape: tuple[int, ...]
    factors: tuple[Factor | None, ...]

    def dim(self, factor: Factor) -> int:
        """Where the factor is split; -1: the tensor does not have it, or in size 1."""
        if factor not in self.factors:
            return -1
        dim = self.factors.index(factor)
        return dim if self.shape[dim] > 1 else -1


class _Match:
    """A text laid over a call: which factors there are, in which dims and sizes."""

    def __init__(self, call: Call, text: Text, kept: str = "") -> None:
        self.call, self.kept = call, text.kept.union(kept)
        names = zip(_tensor_arguments(call.node.op), text.operands, strict=False)
        self.along: set[Factor] = set()  # what arguments name
        self.operands = {
            name: self._operand(dims, call.shape(name)) for name, dims in names if call.has(name)
        }
        metas = call.node.results
        self.results = [
            self._result(dims, meta.shape) if meta is not None else None
            for dims, meta in zip(text.results, metas, strict=False)
        ]
        self.results += [None] * (len(metas) - len(self.results))

    def strategies(self, no_empty: bool = False, sizes: str = "") -> list[Strategy]:
        """A strategy a factor, and those with partial operands."""
        found = []
        for factor in self._factors():
            strategy = self._split(factor)
            strategy = strategy.by(sized(tuple(self.call[sizes]), sizes)) if sizes else strategy
            found.append(zeros_when_empty(self.call, strategy) if no_empty else strategy)
        return found + self._partial_strategies()

    def _operand(self, dims: Dims, shape: tuple[int, ...]) -> _Tensor:
        if dims.whole:
            return _Tensor(dims, shape, (None,) * len(shape))
        lead = len(shape) - len(dims.before) - len(dims.after)
        self.along |= {lead - 1 - dim for dim in self._named(dims, lead)}
        return _Tensor(dims, shape, _laid(dims, range(lead)[::-1], len(shape)))

    def _result(self, dims: Dims, shape: tuple[int, ...]) -> _Tensor | None:
        letters = len(dims.before) + len(dims.after)
        if dims.whole or (len(shape) < letters and 0 in shape):
            return None
        rest: Sequence[int] = range(max(len(shape) - letters, 0))[::-1]
        if dims.argument and not self.call.args.get("keepdim", True):
            every = range(len(rest) + len(self.along))[::-1]
            rest = [dim for dim in every if dim not in self.along]
        return _Tensor(dims, shape, _laid(dims, rest, len(shape)))

    def _named(self, dims: Dims, lead: int) -> Sequence[int]:
        """The dims of "..." that an argument names, from the front."""
        if not dims.argument or lead < 1:
            return ()
        given = self.call[dims.argument]
        if given is None or given == ():
            return range(lead)
        return [dim % lead for dim in (given if type(given) is tuple else (given,))]

    def _factors(self) -> list[Factor]:
        """Those that can be split, in the order of the results' dims, then of the operands'."""
        tensors = [*(made for made in self.results if made), *self.operands.values()]
        sizes: dict[Factor, set[int]] = {}
        for tensor in tensors:
            for factor, size in zip(tensor.factors, tensor.shape, strict=True):
                if factor is not None:
                    sizes.setdefault(factor, set()).update({size} - {0, 1})
        return [factor for factor, have in sizes.items() if self._splits(factor, have)]

    def _splits(self, factor: Factor, sizes: set[int]) -> bool:
        """Whether some operand is split, and ranks have the same of every tensor."""
        if factor in self.kept or factor in self.along:
            return False
        alike = len(sizes) == 1 or all(size % self.call.parts == 0 for size in sizes)
        return alike and any(tensor.dim(factor) >= 0 for tensor in self.operands.values())

    def _split(self, factor: Factor) -> Strategy:
        outputs = [_of_result(tensor, factor) for tensor in self.results]
        placements = {
            name: _of_operand(tensor, factor, outputs[0]) for name, tensor in self.operands.items()
        }
        return self.call.strategy(outputs, **placements)

    def _partial_strategies(self) -> list[Strategy]:
        marked = {mark: [name for name, tensor in self.operands.items() if tensor.dims.mark == mark]
                  for mark in "*+="}  # fmt: skip
        wanted: list[tuple[list[str], Placement]] = [
            ([name, *marked["+"]], P) for name in marked["*"]
        ]
        wanted += [(marked["="], placement) for placement in PARTIALS if marked["="]]
        return [
            self.call.strategy(
                [placement if made else R for made in self.results],
                **dict.fromkeys(names, placement),
            )
            for names, placement in wanted
        ]


def _laid(dims: Dims, rest: Sequence[int], rank: int) -> tuple[Factor | None, ...]:
    """The factors of all dims; the last ones where there are fewer than letters."""
    middle = [None] * len(rest) if dims.rest_whole or not dims.rest else rest
    factors = (*dims.before, *middle, *dims.after)
    more = rank - len(factors)
    return (None,) * more + factors if more > 0 else factors[-more:]


def _of_operand(tensor: _Tensor, factor: Factor, output: Placement) -> Placement:
    dim = tensor.dim(factor)
    if dim >= 0:
        return S(dim)
    return output if tensor.dims.mark == "+" and isinstance(output, Partial) else R


def _of_result(tensor: _Tensor | None, factor: Factor) -> Placement:
    if tensor is None:
        return R
    dim = tensor.dim(factor)
    return S(dim) if dim >= 0 else Partial(tensor.dims.mark or "sum")
