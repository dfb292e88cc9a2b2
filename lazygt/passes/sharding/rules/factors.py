"""Sharding rules in einsum-like notation: dims of an op's operands -> dims of its results.

    rule("mm.default", "* i k, * k j -> i j")

A text names the dims of the tensor arguments in the order of the op's schema, then the dims of the
results. All dims of one name form a *factor*. Sharding a factor shards all of its dims, and gives
one strategy. Operands and results that a text omits are replicated.

Dims, separated by spaces:

- ``i``: a letter is a dim. A letter that a result lacks is summed over: the result is partial.
- ``...``: the remaining dims, any number of them, aligned from the right.
- ``!i``, ``!...``: never sharded. Only an unsharded letter may occur in results alone, or twice in
  one tensor.
- ``...@dim``: like ``...``, but the dims that the op's argument ``dim`` names (one, a list, or None
  for all), counted within ``...``, are never sharded. With ``keepdim=False`` a result lacks them.
- ``_``: any number of dims, none of them sharded.

Marks before an operand's dims:

- ``*``: the op is linear in the operand while the other operands are replicated: partial sums give
  partial sums.
- ``+``: the operand is added to the result, and is partial if the result is.
- ``=``: the op only moves the operand's elements: any partial placement passes through.

Marks before a result's dims: ``max``, ``min`` or ``prod``, the partial reduction instead of a sum.

A dim of size 1 that is larger elsewhere is broadcast: replicated in an operand, summed over in a
result. Other different sizes of one factor, as of query heads in grouped-query attention, must be
divisible by the axis size. A tensor with fewer dims than letters has the last letters. A result
with fewer dims and no elements was not requested, and is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, NoReturn

import torch

from lazygt.graph.ops import overload
from lazygt.graph.placement import Partial, Placement
from lazygt.passes.sharding.rules.strategy import (
    PARTIALS,
    Call,
    P,
    R,
    Rule,
    S,
    Strategy,
    sized,
    table,
    zeros_when_empty,
)

# -- grammar and parser ----------------------------------------------------------------------------

OPERAND_MARKS = ("*", "+", "=")
RESULT_MARKS = ("max", "min", "prod")
_TOKEN = re.compile(r"->|,|(?:(?!->)[^\s,])+")
_DIM = re.compile(r"(?P<whole>!?)(?:(?P<letter>[a-z])|\.\.\.(?:@(?P<argument>\w+))?)")


@dataclass(frozen=True, slots=True)
class Dims:
    """Dims of one tensor."""

    #: before, after: letters on both sides of ``...``; without ``...`` all letters are ``after``
    before: str = ""
    after: str = ""
    rest: bool = False  # whether the text has ``...``
    rest_whole: bool = False  # whether the text has ``!...``
    argument: str = ""  # name of the argument in ``...@argument``
    mark: str = ""  # one of OPERAND_MARKS or RESULT_MARKS, or empty
    whole: bool = False  # whether the text is ``_``


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Parsed rule text, compared by identity."""

    operands: tuple[Dims, ...]  # operands, results: dims of each tensor
    results: tuple[Dims, ...]
    unsharded: frozenset[str]  # letters that are never sharded


class _Token(NamedTuple):
    """Token of a rule text, with its position."""

    text: str
    at: int


@lru_cache(maxsize=1024)
def parse(text: str, ops: str = "") -> Text:
    """Parse a rule text.

    Args:
        ops: names of the ops with this rule, for error messages.

    Raises:
        ValueError: the text does not fit the grammar; the message marks the position.
    """
    return _Parser(text, ops).parse()


@dataclass
class _Parser:
    """Recursive-descent parser of a rule text."""

    text: str
    ops: str
    #: position of the first occurrence of each shardable, and of each unsharded letter
    sharded: dict[str, int] = field(default_factory=dict)
    unsharded: dict[str, int] = field(default_factory=dict)

    def parse(self) -> Text:
        """Parse the text; raise ValueError with a position on errors."""
        tokens = [_Token(match[0], match.start()) for match in _TOKEN.finditer(self.text)]
        arrows = [number for number, token in enumerate(tokens) if token.text == "->"]
        if len(arrows) != 1:
            at = tokens[arrows[1]].at if arrows else len(self.text)
            self.fail("one '->' stands between operands and results", at)
        operands = [
            self.dims(tensor_tokens, OPERAND_MARKS)
            for tensor_tokens in _split_at_commas(tokens[: arrows[0]])
        ]
        operand_letters = {*self.sharded, *self.unsharded}
        results = [
            self.dims(tensor_tokens, RESULT_MARKS)
            for tensor_tokens in _split_at_commas(tokens[arrows[0] + 1 :])
        ]
        for letter, at in self.sharded.items():
            if letter not in operand_letters:
                self.fail(
                    f"no operand has {letter!r}; a dim of results alone is whole: '!{letter}'", at
                )
            if letter in self.unsharded:
                self.fail(f"{letter!r} stays whole elsewhere: write '!{letter}' here too", at)
        if any(d.rest and not d.rest_whole for d in results) and not any(d.rest for d in operands):
            self.fail("no operand has '...'", self.text.rindex("..."))
        return Text(tuple(operands), tuple(results), frozenset(self.unsharded))

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
                allowed = f"a letter, '...' or '...@argument', '!' before; marks: {' '.join(marks)}"
                self.fail(f"{token.text!r} is no dim ({allowed})", token.at)
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
        """Record a letter; only an unsharded letter may occur twice in a tensor."""
        if not dim["whole"] and dim["letter"] in others:
            self.fail(f"a second {dim['letter']!r} in one tensor: only whole dims may be alike", at)
        (self.unsharded if dim["whole"] else self.sharded).setdefault(dim["letter"], at)

    def fail(self, message: str, at: int) -> NoReturn:
        """Raise a ValueError with a caret under the position."""
        subject = f"sharding rule of {self.ops}" if self.ops else "sharding rule"
        raise ValueError(f"{subject}: {message}\n  {self.text}\n  {' ' * at}^")


def _split_at_commas(tokens: Sequence[_Token]) -> Iterator[Sequence[_Token]]:
    """Yield the tokens of each tensor; commas separate tensors."""
    start = 0
    for number, token in enumerate(tokens):
        if token.text == ",":
            yield tokens[start:number]
            start = number + 1
    yield tokens[start:]


# -- strategies of a text --------------------------------------------------------------------------

#: A letter, or a dim of "...", counted from the right.
Factor = str | int


def rule(
    ops: str,
    text: str,
    *,
    no_empty: bool = False,
    sizes: str = "",
    unsharded: Callable[[Call], str] | None = None,
) -> Mapping[str, Rule]:
    """Map each of several ops to the rule of one text.

    Args:
        ops: op names without ``aten.``, separated by spaces.
        text: rule in the notation of this module.
        no_empty: whether the kernel rejects empty blocks; a rank with one returns zeros.
        sizes: name of the argument with the sizes of the first result; it gets the local sizes.
        unsharded: function of a call to further letters that are not sharded in this call.

    Raises:
        ValueError: the text does not fit the grammar, or these ops.
    """
    parsed = parse(text, ops)
    for op in ops.split():
        _check(op, parsed, text, sizes)
    return table(ops, _rule(parsed, no_empty, sizes, unsharded))


def strategies_by(call: Call, text: str, *, no_empty: bool = False) -> list[Strategy]:
    """Return the strategies of one call by a text that depends on the call."""
    return _Match(call, parse(text, call.node.op)).strategies(no_empty)


def _rule(text: Text, no_empty: bool, sizes: str, unsharded: Callable[[Call], str] | None) -> Rule:
    """Return the rule of a parsed text."""

    def strategies(call: Call) -> Sequence[Strategy]:
        match = _Match(call, text, unsharded(call) if unsharded else "")
        return match.strategies(no_empty, sizes)

    return strategies


def _check(op: str, text: Text, source: str, sizes: str) -> None:
    """Raise ValueError if a text has more tensors than the op, or unknown arguments.

    Args:
        op: op name without ``aten.``.
        text: parsed text.
        source: its source, for the error message.
        sizes: name of the argument with the sizes of the first result, or empty.
    """
    name, _, overload_name = op.partition(".")
    try:
        schema = torch._C._get_schema(f"aten::{name}", overload_name.replace("default", ""))
    except RuntimeError:
        return  # op of another torch version
    tensors = sum(str(a.type) in _TENSORS for a in schema.arguments)
    problem = ""
    if len(text.operands) > tensors:
        problem = f"it has {tensors} tensor arguments, not {len(text.operands)}"
    if len(text.results) > len(schema.returns):
        problem = f"it has {len(schema.returns)} results, not {len(text.results)}"
    named_arguments = {sizes, *(dims.argument for dims in (*text.operands, *text.results))} - {""}
    unknown = named_arguments - {a.name for a in schema.arguments}
    if unknown:
        problem = f"it has no argument {' or '.join(sorted(unknown))}"
    if problem:
        raise ValueError(f"sharding rule of {op}: {problem}\n  {source}")


_TENSORS = ("Tensor", "Optional[Tensor]")


@lru_cache(maxsize=1024)
def _tensor_arguments(op: str) -> tuple[str, ...]:
    """Return the names of the tensor arguments of an op, in order of its schema."""
    arguments = overload(op)._schema.arguments
    return tuple([a.name for a in arguments if str(a.type) in _TENSORS])


class _Place(NamedTuple):
    """Occurrences of a factor in the tensors of a call."""

    factor: Factor
    operands: tuple[tuple[str, int], ...]  # (name, dim) of each operand that has the factor
    #: dim of each result; -1: the result sums over the factor; None: the result is replicated
    results: tuple[int | None, ...]


class _Match:
    """Text matched against the tensors of a call."""

    def __init__(self, call: Call, text: Text, unsharded: str = "") -> None:
        self.call, self.text, self.unsharded = call, text, frozenset(unsharded)
        names = _tensor_arguments(call.node.op)
        self.operands = {
            name: dims for name, dims in zip(names, text.operands, strict=False) if call.has(name)
        }
        self.shapes = {name: call.shape(name) for name in self.operands}
        self.added = [name for name, dims in self.operands.items() if dims.mark == "+"]

    def strategies(self, no_empty: bool = False, sizes: str = "") -> list[Strategy]:
        """Return one strategy per factor, and the strategies with partial operands."""
        strategies = []
        for occurrence in self._occurrences():
            if occurrence.factor in self.unsharded or not self._can_shard(occurrence):
                continue
            strategy = self._strategy_of(occurrence)
            strategy = strategy.by(sized(tuple(self.call[sizes]), sizes)) if sizes else strategy
            strategies.append(zeros_when_empty(self.call, strategy) if no_empty else strategy)
        return strategies + self._partial_strategies()

    def _occurrences(self) -> tuple[_Place, ...]:
        """Return the shardable factors of the call with their dims."""
        ranks = tuple([(name, len(shape)) for name, shape in self.shapes.items()])
        results = tuple(
            [-1 if meta is None else _rank(meta.shape, dims)
             for meta, dims in zip(self.call.node.results, self.text.results, strict=False)]
        )  # fmt: skip
        keepdim = bool(self.call.args.get("keepdim", True))
        return _occurrences(self.text, self.call.node.op, ranks, results, self._along(), keepdim)

    def _along(self) -> frozenset[int]:
        """Return the dims of ``...`` that ``@argument`` names, counted from the right."""
        for name, dims in self.operands.items():
            if dims.argument:
                num_rest_dims = len(self.shapes[name]) - len(dims.before) - len(dims.after)
                arg = self.call[dims.argument]
                arg = arg if type(arg) is tuple else () if arg is None else (arg,)
                dims_of_rest = [dim % num_rest_dims for dim in arg] if num_rest_dims else []
                return frozenset(
                    num_rest_dims - 1 - dim for dim in dims_of_rest or range(num_rest_dims)
                )
        return frozenset()

    def _can_shard(self, occurrence: _Place) -> bool:
        """Return whether a factor can be sharded.

        Some operand must have more than one element along the factor. All sizes must be equal, or
        divisible by the axis size.
        """
        sizes = {self.shapes[name][dim] for name, dim in occurrence.operands}
        if max(sizes, default=0) < 2:
            return False
        for meta, dim in zip(self.call.node.results, occurrence.results, strict=False):
            if meta is not None and dim is not None and dim >= 0:
                sizes.add(meta.shape[dim])
        sizes -= {0, 1}
        return len(sizes) == 1 or all(size % self.call.axis_size == 0 for size in sizes)

    def _strategy_of(self, occurrence: _Place) -> Strategy:
        """Return the strategy that shards a factor."""
        results = self.call.node.results
        outputs: list[Placement] = [R] * len(results)
        for number, dim in enumerate(occurrence.results):
            meta = results[number]
            if dim is not None and meta is not None:
                is_sharded = dim >= 0 and meta.shape[dim] > 1
                reduction = self.text.results[number].mark or "sum"
                outputs[number] = S(dim) if is_sharded else Partial(reduction)
        placements: dict[str, Placement] = {
            name: S(dim) for name, dim in occurrence.operands if self.shapes[name][dim] > 1
        }
        if self.added and isinstance(outputs[0], Partial):
            placements = dict.fromkeys(self.added, outputs[0]) | placements
        return self.call.strategy(outputs, **placements)

    def _partial_strategies(self) -> list[Strategy]:
        """Return the strategies with partial operands, by the marks ``*`` and ``=``."""
        movable = [name for name, dims in self.operands.items() if dims.mark == "="]
        linear = [name for name, dims in self.operands.items() if dims.mark == "*"]
        partial_operands: list[tuple[list[str], Placement]] = [
            ([name, *self.added], P) for name in linear
        ]
        partial_operands += [(movable, placement) for placement in PARTIALS if movable]
        return [
            self.call.strategy(
                self._result_placements(placement), **dict.fromkeys(names, placement)
            )
            for names, placement in partial_operands
        ]

    def _result_placements(self, placement: Placement) -> list[Placement]:
        """Return ``placement`` for the results of the text, R for the others."""
        results = self.text.results
        count = len(self.call.node.results)
        return [
            placement if number < len(results) and not results[number].whole else R
            for number in range(count)
        ]


def _rank(shape: tuple[int, ...], dims: Dims) -> int:
    """Return the number of dims of a result; -1: the result was not requested."""
    rank = len(shape)
    return -1 if rank < len(dims.before) + len(dims.after) and 0 in shape else rank


@lru_cache(maxsize=4096)
def _occurrences(
    text: Text,
    op: str,
    operands: tuple[tuple[str, int], ...],
    results: tuple[int, ...],
    along: frozenset[int],
    keepdim: bool,
) -> tuple[_Place, ...]:
    """Return the occurrences of each shardable factor.

    Factors are in the order of the results' dims, then of the operands' dims.

    Args:
        operands: (name, number of dims) of each tensor operand of the call.
        results: number of dims of each result; -1: replicated.
        along: dims of ``...`` that ``@argument`` names; they are not sharded.
        keepdim: whether the results have the ``along`` dims.
    """
    texts = dict(zip(_tensor_arguments(op), text.operands, strict=False))
    operand_factors = {name: _factors_of(texts[name], rank, frozenset()) for name, rank in operands}
    reduced: frozenset[int] = frozenset() if keepdim else along
    result_factors = [
        None if rank < 0 or dims.whole else _factors_of(dims, rank, reduced)
        for dims, rank in zip(text.results, results, strict=False)
    ]
    excluded = {None, *text.unsharded, *along}
    all_factors = [
        factors for factors in (*result_factors, *operand_factors.values()) if factors is not None
    ]
    return tuple(
        _Place(
            factor,
            tuple([(name, f.index(factor)) for name, f in operand_factors.items() if factor in f]),
            tuple([None if f is None else _index_or_minus_one(factor, f) for f in result_factors]),
        )
        for factor in dict.fromkeys(chain.from_iterable(all_factors))
        if factor is not None and factor not in excluded
    )


def _index_or_minus_one(factor: Factor, factors: Sequence[Factor | None]) -> int:
    """Return the dim of a factor; -1: the tensor lacks the factor."""
    return factors.index(factor) if factor in factors else -1


def _factors_of(dims: Dims, rank: int, reduced: frozenset[int]) -> tuple[Factor | None, ...]:
    """Return the factor of each dim of a tensor; None: the dim is not sharded.

    Args:
        dims: parsed dims of the tensor.
        rank: number of dims of the tensor.
        reduced: dims of ``...`` that this tensor lacks (``keepdim=False``).
    """
    if dims.whole:
        return (None,) * rank
    num_rest_dims = max(rank - len(dims.before) - len(dims.after), 0)
    reduced = reduced if dims.argument else frozenset()
    rest = [dim for dim in range(num_rest_dims + len(reduced))[::-1] if dim not in reduced]
    middle = rest if dims.rest and not dims.rest_whole else [None] * num_rest_dims
    factors: tuple[Factor | None, ...] = (*dims.before, *middle, *dims.after)
    return factors[len(factors) - rank :]
