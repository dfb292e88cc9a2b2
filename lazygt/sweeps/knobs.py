"""Knobs of a sweep with their values, and all combinations.

knob                  values             acts on
wrap                  auto, block, one   every call of ``lazygt.fully_shard`` (``parallel.knobs``)
bucket_cap_mb         MiB                likewise
reshard               1, 0               likewise: ``reshard_after_forward``
limit_all_gathers     1, 0               likewise
any other             anything           the script, as ``--KNOB VALUE`` behind its own arguments
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

_NAME = re.compile(r"[A-Za-z][\w-]*")
_WRAPS = ("auto", "block", "one", "block2")
#: Names in ``fully_shard`` or in other scripts -> names of knobs.
_OTHER_NAMES = {"reshard_after_forward": "reshard"}
#: Similarity from which a name is taken for a misspelt knob.
_ALIKE = 0.75
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def _wrap(text: str) -> str:
    if text not in _WRAPS:
        raise ValueError("expected auto, block or one (or block2, which is the same)")
    return text


def _cap(text: str) -> float:
    expected = "expected MiB, such as 25; 0: every value alone"
    try:
        cap = float(text)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= cap < math.inf:
        raise ValueError(expected)
    return cap


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError("expected 1 or 0")
    return _FLAGS[text.lower()]


#: knob -> its argument of ``fully_shard``, and the parser of a value's text
FORCED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "wrap": ("wrap", _wrap),
    "bucket_cap_mb": ("bucket_cap_mb", _cap),
    "reshard": ("reshard_after_forward", _flag),
    "limit_all_gathers": ("limit_all_gathers", _flag),
}


@dataclass(frozen=True)
class Combination:
    """One value for each knob.

    Attributes:
        values: text by knob.
    """

    values: Mapping[str, str]

    @property
    def forced(self) -> dict[str, Any]:
        """Overrides of ``fully_shard``; see ``parallel.knobs.forced_knobs``."""
        return {
            FORCED[knob][0]: FORCED[knob][1](text)
            for knob, text in self.values.items()
            if knob in FORCED
        }

    @property
    def passed(self) -> dict[str, str]:
        """Arguments of the script."""
        return {knob: text for knob, text in self.values.items() if knob not in FORCED}

    def __str__(self) -> str:
        return " ".join(f"{knob}={text}" for knob, text in self.values.items())


def combinations(knobs: Mapping[str, Sequence[Any] | str]) -> list[Combination]:
    """Return every combination of the values, the last knob's turned fastest.

    Args:
        knobs: values by knob; a text with commas is several. Other values count as their
            ``str``, and True and False as 1 and 0.

    Raises:
        ValueError: there is no knob, a knob has no values, one of them twice, or one that it can't
            have.
    """
    if not knobs:
        raise ValueError(
            "nothing is to be swept: name knobs with their values, such as wrap=auto,block "
            "bucket_cap_mb=25,100 reshard=1,0"
        )
    texts: dict[str, list[str]] = {}
    for given, values in knobs.items():
        name = _name(given)
        if name in texts:
            raise ValueError(f"{name} is named twice: give all its values at once")
        texts[name] = _texts(name, values)
    return [
        Combination(dict(zip(texts, values, strict=True)))
        for values in itertools.product(*texts.values())
    ]


def parsed(arguments: Iterable[str]) -> dict[str, str]:
    """Parse knobs such as ``wrap=auto,block reshard=1,0``.

    Raises:
        ValueError: a knob is named twice.
    """
    knobs: dict[str, str] = {}
    for argument in arguments:
        name, _, values = argument.partition("=")
        if name in knobs:
            raise ValueError(f"{name} is named twice: give all its values at once")
        knobs[name] = values
    return knobs


def is_knob(argument: str) -> bool:
    """Return whether an argument names a knob with its values."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and _NAME.fullmatch(name) is not None


def matching(combos: Sequence[Combination], text: str) -> int:
    """Return the number of the first combination with values such as ``wrap=auto,reshard=1``.

    Raises:
        ValueError: there is none.
    """
    wanted = dict(part.partition("=")[::2] for part in re.split(r"[,\s]+", text.strip()) if part)
    wanted = {_name(knob): value for knob, value in wanted.items()}
    for number, combo in enumerate(combos):
        if wanted and wanted.items() <= combo.values.items():
            return number
    raise ValueError(f"{text!r} is no combination of this sweep; the first is {combos[0]}")


def _name(given: str) -> str:
    """Return the knob's own name.

    Raises:
        ValueError: it looks like a knob of ``fully_shard`` that is written otherwise.
    """
    if not _NAME.fullmatch(given):
        raise ValueError(f"{given!r} is no name of a knob")
    name = given.replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    if name in FORCED:
        return name
    alike = get_close_matches(name, [*FORCED, *_OTHER_NAMES], 1, _ALIKE)
    if alike:
        knob = _OTHER_NAMES.get(alike[0], alike[0])
        raise ValueError(f"there is no knob {given}: did you mean {knob}?")
    return given


def _texts(name: str, given: Sequence[Any] | str) -> list[str]:
    values = given.split(",") if isinstance(given, str) else given
    texts = [str(int(value)) if isinstance(value, bool) else str(value).strip() for value in values]
    if not texts or "" in texts:
        raise ValueError(f"{name}= has no value: expected some, such as {name}=A,B")
    for text in texts:
        try:
            if name in FORCED:
                FORCED[name][1](text)
        except ValueError as error:
            raise ValueError(f"{name}={text}: {error}") from None
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise ValueError(f"{name}={','.join(texts)}: {twice} stands there twice")
    return texts
