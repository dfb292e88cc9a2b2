"""Knobs of a sweep with their values, and all combinations.

knob                  values             acts on
wrap                  auto, block, one   every call of ``lazygt.fully_shard``
bucket_cap_mb         MiB                likewise
reshard               1, 0               likewise: ``reshard_after_forward``
limit_all_gathers     1, 0               likewise
any other             anything           the script, as ``--KNOB VALUE`` after its own arguments
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
#: Other name of a knob -> its name.
_ALIASES = {"reshard_after_forward": "reshard"}
#: Similarity above which a name counts as a misspelt knob.
_SIMILARITY = 0.75
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def _parse_wrap(text: str) -> str:
    """Parse a value of ``wrap``."""
    if text not in _WRAPS:
        raise ValueError("expected auto, block or one (or block2, which is the same)")
    return text


def _parse_cap(text: str) -> float:
    """Parse a value of ``bucket_cap_mb``."""
    expected = "expected MiB, such as 25; 0: every value alone"
    try:
        cap = float(text)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= cap < math.inf:
        raise ValueError(expected)
    return cap


def _parse_flag(text: str) -> bool:
    """Parse a flag, 1 or 0."""
    if text.lower() not in _FLAGS:
        raise ValueError("expected 1 or 0")
    return _FLAGS[text.lower()]


#: knob -> its argument of ``fully_shard``, and the parser of a value's text
FORCED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "wrap": ("wrap", _parse_wrap),
    "bucket_cap_mb": ("bucket_cap_mb", _parse_cap),
    "reshard": ("reshard_after_forward", _parse_flag),
    "limit_all_gathers": ("limit_all_gathers", _parse_flag),
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
        """Overrides of ``fully_shard``; see ``parallel.fsdp_overrides.forced_knobs``."""
        return {
            FORCED[knob][0]: FORCED[knob][1](text)
            for knob, text in self.values.items()
            if knob in FORCED
        }

    @property
    def passed(self) -> dict[str, str]:
        """Arguments of the script: the values of all other knobs."""
        return {knob: text for knob, text in self.values.items() if knob not in FORCED}

    def __str__(self) -> str:
        return " ".join(f"{knob}={text}" for knob, text in self.values.items())


def combinations(knobs: Mapping[str, Sequence[Any] | str]) -> list[Combination]:
    """Cartesian product of the values of all knobs; the last knob varies fastest.

    Args:
        knobs: values by knob; a text is split at commas. Other values are converted by ``str``,
            True and False to 1 and 0.

    Raises:
        ValueError: there is no knob, or a knob has no values, a duplicate or an invalid value.
    """
    if not knobs:
        raise ValueError(
            "nothing is to be swept: name knobs with their values, such as wrap=auto,block "
            "bucket_cap_mb=25,100 reshard=1,0"
        )
    texts: dict[str, list[str]] = {}
    for knob, values in knobs.items():
        name = _name(knob)
        if name in texts:
            raise ValueError(f"{name} is named twice: give all its values at once")
        texts[name] = _value_texts(name, values)
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
    """Return the index of the first combination with values such as ``wrap=auto,reshard=1``.

    Raises:
        ValueError: there is none.
    """
    requested = dict(item.partition("=")[::2] for item in re.split(r"[,\s]+", text.strip()) if item)
    requested = {_name(knob): value for knob, value in requested.items()}
    for number, combo in enumerate(combos):
        if requested and requested.items() <= combo.values.items():
            return number
    raise ValueError(f"{text!r} is no combination of this sweep; the first is {combos[0]}")


def _name(text: str) -> str:
    """Normalize a knob's name.

    Raises:
        ValueError: it is no name, or a misspelt knob of ``fully_shard``.
    """
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no name of a knob")
    name = text.replace("-", "_")
    name = _ALIASES.get(name, name)
    if name in FORCED:
        return name
    similar = get_close_matches(name, [*FORCED, *_ALIASES], 1, _SIMILARITY)
    if similar:
        knob = _ALIASES.get(similar[0], similar[0])
        raise ValueError(f"there is no knob {text}: did you mean {knob}?")
    return text


def _value_texts(name: str, values_or_text: Sequence[Any] | str) -> list[str]:
    """Return the values of a knob as texts, checked by its parser."""
    values = values_or_text.split(",") if isinstance(values_or_text, str) else values_or_text
    texts = [str(int(value)) if isinstance(value, bool) else str(value).strip() for value in values]
    if not texts or "" in texts:
        raise ValueError(f"{name}= has no value: expected some, such as {name}=A,B")
    for text in texts:
        try:
            if name in FORCED:
                FORCED[name][1](text)
        except ValueError as error:
            raise ValueError(f"{name}={text}: {error}") from None
    duplicate = next((text for text in texts if texts.count(text) > 1), None)
    if duplicate is not None:
        raise ValueError(f"{name}={','.join(texts)}: {duplicate} stands there twice")
    return texts
