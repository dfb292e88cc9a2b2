"""Grammar and parser of sharding rules as text, see ``factors``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, NoReturn

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
