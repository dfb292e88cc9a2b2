"""Sharding rules as text: a map from the dims of an op's operands to those of its results.

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

Before a result's dims: ``max``, ``min`` or ``prod``, its partial reduction instead of a sum.

A dim of size 1 that is larger elsewhere is broadcast: whole in an operand, summed over in a result.
Where sizes differ otherwise, as of query heads that share a key's, ranks must have as many each. A
tensor with fewer dims than letters has the last of them; such a result without elements was not
asked for, and is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, NoReturn

import torch

from lazygt.graph.node import Node
from lazygt.graph.ops import overload
from lazygt.graph.placement import Partial, Placement
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    table,
    zeros_when_empty,
)
from lazygt.passes.sharding.rules.views import PARTIALS, sized

# -- grammar and parser of sharding rules as text, see ``factors`` ---------------------------------

OPERAND_MARKS = ("*", "+", "=")
RESULT_MARKS = ("max", "min", "prod")
_TOKEN = re.compile(r"->|,|(?:(?!->)[^\s,])+")
_DIM = re.compile(r"(?P<whole>!?)(?:(?P<letter>[a-z])|\.\.\.(?:@(?P<argument>\w+))?)")


@dataclass(frozen=True, slots=True)
class Dims:
    """Dims of one tensor.

    Attributes:
        before, after: the letters on both sides of ``...``; all are ``after`` where it has none.
        rest: whether it has ``...``.
        rest_whole: whether that is ``!...``.
        argument: of ``...@argument``.
        mark: of OPERAND_MARKS or RESULT_MARKS, or nothing.
        whole: ``_``.
    """

    before: str = ""
    after: str = ""
    rest: bool = False
    rest_whole: bool = False
    argument: str = ""
    mark: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Parsed text; equal to itself alone.

    Attributes:
        kept: the letters that stay whole.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kept: frozenset[str]


class _Token(NamedTuple):
    text: str
    at: int


@lru_cache(maxsize=1024)
def parse(text: str, ops: str = "") -> Text:
    """Parse a text.

    Args:
        ops: the ops with this rule, for errors.

    Raises:
        ValueError: the text does not fit the grammar; the message says where.
    """
    return _Parser(text, ops).parse()


@dataclass
class _Parser:
    text: str
    ops: str
    #: the first place of each letter that may be split, and of each that stays whole
    split: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    def parse(self) -> Text:
        tokens = [_Token(found[0], found.start()) for found in _TOKEN.finditer(self.text)]
        arrows = [number for number, token in enumerate(tokens) if token.text == "->"]
        if len(arrows) != 1:
            at = tokens[arrows[1]].at if arrows else len(self.text)
            self.fail("one '->' stands between operands and results", at)
        operands = [self.dims(part, OPERAND_MARKS) for part in _parts(tokens[: arrows[0]])]
        known = {*self.split, *self.kept}
        results = [self.dims(part, RESULT_MARKS) for part in _parts(tokens[arrows[0] + 1 :])]
        for letter, at in self.split.items():
            if letter not in known:
                self.fail(
                    f"no operand has {letter!r}; a dim of results alone is whole: '!{letter}'", at
                )
            if letter in self.kept:
                self.fail(f"{letter!r} stays whole elsewhere: write '!{letter}' here too", at)
        if any(d.rest and not d.rest_whole for d in results) and not any(d.rest for d in operands):
            self.fail("no operand has '...'", self.text.rindex("..."))
        return Text(tuple(operands), tuple(results), frozenset(self.kept))

    def dims(self, tokens: Sequence[_Token], marks: Sequence[str]) -> Dims:
        """Parse the dims of one tensor."""
        mark = tokens[0].text if tokens and tokens[0].text in marks else ""
        tokens = tokens[1:] if mark else tokens
        if [token.text for token in tokens] == ["_"]:
            return Dims(mark=mark, whole=True)
        before, letters, rest = "", "", None
        for token in tokens:
            dim = _DIM.fullmatch(token.text)
            if dim is None:
                known = f"a letter, '...' or '...@argument', '!' before; marks: {' '.join(marks)}"
                self.fail(f"{token.text!r} is no dim ({known})", token.at)
            if dim["letter"]:
                self.letter(dim, token.at, before + letters)
                letters += dim["letter"]
            elif rest is not None:
                self.fail("a second '...'", token.at)
            else:
                before, letters, rest = letters, "", dim
        if rest is None:
            return Dims(after=letters, mark=mark)
        return Dims(before, letters, True, bool(rest["whole"]), rest["argument"] or "", mark)

    def letter(self, dim: re.Match[str], at: int, others: str) -> None:
        """Note a letter, which may stand twice in a tensor if it stays whole."""
        if not dim["whole"] and dim["letter"] in others:
            self.fail(f"a second {dim['letter']!r} in one tensor: only whole dims may be alike", at)
        (self.kept if dim["whole"] else self.split).setdefault(dim["letter"], at)

    def fail(self, what: str, at: int) -> NoReturn:
        """Raise an error, with a caret under its place."""
        whose = f"sharding rule of {self.ops}" if self.ops else "sharding rule"
        raise ValueError(f"{whose}: {what}\n  {self.text}\n  {' ' * at}^")


def _parts(tokens: Sequence[_Token]) -> Iterator[Sequence[_Token]]:
    """Yield the tokens between commas."""
    start = 0
    for number, token in enumerate(tokens):
        if token.text == ",":
            yield tokens[start:number]
            start = number + 1
    yield tokens[start:]


# -- sharding rules as text: a map from the dims of an op's operands to those of its results -------

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
    """Return one rule, by a text, for several ops.

    Args:
        ops: names without ``aten.``, separated by spaces.
        no_empty: the kernel takes no empty block: a rank with one gives zeros.
        sizes: the argument with the sizes of the first result; it gets those of a block.
        keeping: the letters that stay whole in a call, besides those of the text.

    Raises:
        ValueError: the text does not fit the grammar, or these ops.
    """
    parsed = parse(text, ops)
    for op in ops.split():
        _check(op, parsed, text, sizes)
    return table(ops, _rule(parsed, no_empty, sizes, keeping))


def strategies_by(call: Call, text: str, *, no_empty: bool = False) -> list[Strategy]:
    """Return the strategies of one call by a text that depends on it."""
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
    asked = {sizes, *(dims.argument for dims in (*text.operands, *text.results))} - {""}
    unknown = asked - {a.name for a in schema.arguments}
    if unknown:
        wrong = f"it has no argument {' or '.join(sorted(unknown))}"
    if wrong:
        raise ValueError(f"sharding rule of {op}: {wrong}\n  {written}")


_TENSORS = ("Tensor", "Optional[Tensor]")


@lru_cache(maxsize=1024)
def _tensor_arguments(op: str) -> tuple[str, ...]:
    arguments = overload(op)._schema.arguments
    return tuple([a.name for a in arguments if str(a.type) in _TENSORS])


class _Place(NamedTuple):
    """Dims of a factor in a call.

    Attributes:
        operands: their names, and the dim of each that has it.
        results: the dim in each; -1: it lacks it, so it is summed over; None: it is whole.
    """

    factor: Factor
    operands: tuple[tuple[str, int], ...]
    results: tuple[int | None, ...]


class _Match:
    """Text laid over a call."""

    def __init__(self, call: Call, text: Text, kept: str = "") -> None:
        self.call, self.text, self.kept = call, text, frozenset(kept)
        names = _tensor_arguments(call.node.op)
        self.operands = {
            name: dims for name, dims in zip(names, text.operands, strict=False) if call.has(name)
        }
        self.shapes = {name: call.shape(name) for name in self.operands}
        self.added = [name for name, dims in self.operands.items() if dims.mark == "+"]

    def strategies(self, no_empty: bool = False, sizes: str = "") -> list[Strategy]:
        """Return a strategy for each factor, and those with partial operands."""
        strategies = []
        for place in self._places():
            if place.factor in self.kept or not self._fits(place):
                continue
            strategy = self._split(place)
            strategy = strategy.by(sized(tuple(self.call[sizes]), sizes)) if sizes else strategy
            strategies.append(zeros_when_empty(self.call, strategy) if no_empty else strategy)
        return strategies + self._of_partials()

    def _places(self) -> tuple[_Place, ...]:
        ranks = tuple([(name, len(shape)) for name, shape in self.shapes.items()])
        results = tuple(
            [-1 if meta is None else _rank(meta.shape, dims)
             for meta, dims in zip(self.call.node.results, self.text.results, strict=False)]
        )  # fmt: skip
        keeps = bool(self.call.args.get("keepdim", True))
        return _places(self.text, self.call.node.op, ranks, results, self._along(), keeps)

    def _along(self) -> frozenset[int]:
        """Return the dims of "..." that an argument names, from the right."""
        for name, dims in self.operands.items():
            if dims.argument:
                lead = len(self.shapes[name]) - len(dims.before) - len(dims.after)
                given = self.call[dims.argument]
                given = given if type(given) is tuple else () if given is None else (given,)
                named = [dim % lead for dim in given] if lead else []
                return frozenset(lead - 1 - dim for dim in named or range(lead))
        return frozenset()

    def _fits(self, place: _Place) -> bool:
        """Return whether some operand is split, and ranks have the same of every tensor."""
        sizes = {self.shapes[name][dim] for name, dim in place.operands}
        if max(sizes, default=0) < 2:
            return False
        for meta, dim in zip(self.call.node.results, place.results, strict=False):
            if meta is not None and dim is not None and dim >= 0:
                sizes.add(meta.shape[dim])
        sizes -= {0, 1}
        return len(sizes) == 1 or all(size % self.call.parts == 0 for size in sizes)

    def _split(self, place: _Place) -> Strategy:
        results = self.call.node.results
        outputs: list[Placement] = [R] * len(results)
        for number, dim in enumerate(place.results):
            meta = results[number]
            if dim is not None and meta is not None:
                split = dim >= 0 and meta.shape[dim] > 1
                reduced = self.text.results[number].mark or "sum"
                outputs[number] = S(dim) if split else Partial(reduced)
        placements: dict[str, Placement] = {
            name: S(dim) for name, dim in place.operands if self.shapes[name][dim] > 1
        }
        if self.added and isinstance(outputs[0], Partial):
            placements = dict.fromkeys(self.added, outputs[0]) | placements
        return self.call.strategy(outputs, **placements)

    def _of_partials(self) -> list[Strategy]:
        moved = [name for name, dims in self.operands.items() if dims.mark == "="]
        linear = [name for name, dims in self.operands.items() if dims.mark == "*"]
        wanted: list[tuple[list[str], Placement]] = [([name, *self.added], P) for name in linear]
        wanted += [(moved, placement) for placement in PARTIALS if moved]
        return [
            self.call.strategy(self._outputs(placement), **dict.fromkeys(names, placement))
            for names, placement in wanted
        ]

    def _outputs(self, placement: Placement) -> list[Placement]:
        """Return the placement for all results that the text has."""
        results = self.text.results
        count = len(self.call.node.results)
        return [
            placement if number < len(results) and not results[number].whole else R
            for number in range(count)
        ]


def _rank(shape: tuple[int, ...], dims: Dims) -> int:
    """Return the number of dims of a result; -1: it was not asked for."""
    rank = len(shape)
    return -1 if rank < len(dims.before) + len(dims.after) and 0 in shape else rank


@lru_cache(maxsize=4096)
def _places(
    text: Text,
    op: str,
    operands: tuple[tuple[str, int], ...],
    results: tuple[int, ...],
    along: frozenset[int],
    keeps: bool,
) -> tuple[_Place, ...]:
    """Return the places of each factor that may be split.

    In the order of the results' dims, then of the operands'.

    Args:
        operands: those that a call has, with their ranks.
        results: their ranks; -1: whole.
        along: dims of "..." that are not split.
        keeps: whether results have those too.
    """
    texts = dict(zip(_tensor_arguments(op), text.operands, strict=False))
    taken = {name: _laid(texts[name], rank, frozenset()) for name, rank in operands}
    gone: frozenset[int] = frozenset() if keeps else along
    given = [
        None if rank < 0 or dims.whole else _laid(dims, rank, gone)
        for dims, rank in zip(text.results, results, strict=False)
    ]
    kept = {None, *text.kept, *along}
    every = [factors for factors in (*given, *taken.values()) if factors is not None]
    return tuple(
        _Place(
            factor,
            tuple([(name, f.index(factor)) for name, f in taken.items() if factor in f]),
            tuple([None if f is None else _at(factor, f) for f in given]),
        )
        for factor in dict.fromkeys(chain.from_iterable(every))
        if factor is not None and factor not in kept
    )


def _at(factor: Factor, factors: Sequence[Factor | None]) -> int:
    return factors.index(factor) if factor in factors else -1


def _laid(dims: Dims, rank: int, gone: frozenset[int]) -> tuple[Factor | None, ...]:
    """Return the factor of each dim of a tensor; None: it is whole.

    Args:
        gone: dims that "..." does not have here, though others have them.
    """
    if dims.whole:
        return (None,) * rank
    lead = max(rank - len(dims.before) - len(dims.after), 0)
    gone = gone if dims.argument else frozenset()
    rest = [dim for dim in range(lead + len(gone))[::-1] if dim not in gone]
    middle = rest if dims.rest and not dims.rest_whole else [None] * lead
    factors: tuple[Factor | None, ...] = (*dims.before, *middle, *dims.after)
    return factors[len(factors) - rank :]
