"""Machine files: read with every mistake named, and written."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lazygt.errors import MachineError
from lazygt.machine.model import Figure, Machine
from lazygt.machine.schema import (
    BASES,
    CARRIERS,
    DEVICES,
    FIGURES,
    LINK,
    RANGES,
    VERSION,
    Quantity,
    quantity,
)

_FIELDS = ("value", "unit", "basis", "source")
_HEAD = ("version", "name", "device", "about", "sources")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def read(path: str | os.PathLike[str]) -> Machine:
    """The machine of a file.

    Raises:
        MachineError: it can't be read, or a figure is missing or absurd.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(path, "", f"can't be read: {error}") from error
    return parse(text, os.fspath(path))


def parse(text: str, path: str) -> Machine:
    """The machine of a file's text; see ``read``."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MachineError(path, "", f"is not TOML: {error}") from error
    return _Reader(path, document).machine()


class _Reader:
    """One document, every key of which has to be known."""

    def __init__(self, path: str, document: dict[str, Any]) -> None:
        self.path, self.document = path, document
        self.sources: dict[str, str] = {}

    def machine(self) -> Machine:
        self._check_version()
        name, device, about = (self._text(key) for key in ("name", "device", "about"))
        if not _NAME.fullmatch(name):
            raise self._error("name", f"{name!r}: expected small letters, digits, '.', '_' and '-'")
        if device not in DEVICES:
            raise self._error("device", f"{device!r}: expected {_either(DEVICES)}")
        self.sources = self._read_sources()
        figures = dict(self._figures())
        self._check_complete(figures)
        return Machine(name, device, about, figures, self.sources, self.path)

    def _error(self, key: str, why: str) -> MachineError:
        return MachineError(self.path, key, why)

    def _check_version(self) -> None:
        version = self.document.get("version")
        if type(version) is not int or version != VERSION:
            raise self._error(
                "version",
                f"{'missing' if version is None else repr(version)}: expected {VERSION}, the one "
                f"that this lazygt reads",
            )

    def _text(self, key: str) -> str:
        value = self.document.get(key)
        if not isinstance(value, str) or not value:
            raise self._error(key, f"{_shown(value)}: expected a text")
        return value

    def _read_sources(self) -> dict[str, str]:
        sources = self.document.get("sources")
        if not isinstance(sources, dict) or not sources:
            raise self._error("sources", "missing: expected [sources] with a text for each name")
        for name, about in sources.items():
            if not isinstance(about, str) or not about:
                raise self._error(f"sources.{name}", f"{_shown(about)}: expected a text")
        return sources

    def _figures(self) -> Iterator[tuple[str, Figure]]:
        for key, value in self._leaves():
            where = _template(key)
            if where not in FIGURES and where not in _LINKS:
                raise self._error(key, f"unknown{_nearest(where)}")
            yield key, self._figure(key, value)

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield every key of a figure, with its entry."""
        todo = [(key, value) for key, value in self.document.items() if key not in _HEAD]
        while todo:
            key, value = todo.pop(0)
            if isinstance(value, dict) and "value" not in value and _is_section(key):
                todo[:0] = [(f"{key}.{name}", inner) for name, inner in value.items()]
            elif isinstance(value, list) and key in _CARRIERS:
                for at, entry in enumerate(value):
                    if not isinstance(entry, dict):
                        raise self._error(f"{key}[{at}]", "expected a table")
                    todo[at:at] = [(f"{key}[{at}].{name}", inner) for name, inner in entry.items()]
            else:
                yield key, value

    def _figure(self, key: str, given: Any) -> Figure:
        expected = quantity(key)
        if not isinstance(given, dict):
            raise self._error(
                key,
                f"{_shown(given)}: expected {{ value = ..., unit = {expected.unit!r}, "
                f"basis = {_either(BASES)}, source = ... }}",
            )
        for field in (*_FIELDS, *given):
            if field not in given:
                raise self._error(key, f"without {field!r}: {_range(expected)}")
            if field not in _FIELDS:
                raise self._error(f"{key}.{field}", f"unknown: expected {', '.join(_FIELDS)}")
        if given["unit"] != expected.unit:
            raise self._error(key, f"in {_shown(given['unit'])}: expected {expected.unit!r}")
        if given["basis"] not in BASES:
            raise self._error(key, f"basis {_shown(given['basis'])}: expected {_either(BASES)}")
        source = given["source"]
        if not isinstance(source, str) or source not in self.sources:
            names = ", ".join(self.sources)
            raise self._error(key, f"source {_shown(source)}: expected one of [sources]: {names}")
        return Figure(self._number(key, given["value"], expected), given["basis"], source)

    def _number(self, key: str, value: object, expected: Quantity) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, f"{_shown(value)}: {_range(expected)}")
        if not expected.least <= value <= expected.most:  # nor where it is no number
            raise self._error(key, f"{_rounded(value)} {expected.unit}: {_range(expected)}")
        return float(value)

    def _check_complete(self, figures: Mapping[str, Figure]) -> None:
        for key, expected in FIGURES.items():
            if expected.needed and key not in figures:
                raise self._error(key, f"missing: {_range(expected)}; {expected.about}")
        if not self.document["collectives"].get("local"):
            raise self._error("collectives.local", "missing: expected [[collectives.local]]")
        for carrier in CARRIERS:
            self._check_carrier(carrier, figures)
        for what in RANGES:
            self._check_range(what, figures)

    def _check_range(self, what: str, figures: Mapping[str, Figure]) -> None:
        """Either end has the other, and they are not the wrong way round."""
        ends = [f"range.{what}.least", f"range.{what}.most"]
        there = [key for key in ends if key in figures]
        if len(there) == 1:
            (missing,) = set(ends) - set(there)
            raise self._error(missing, f"missing: expected beside {there[0]}")
        if there and figures[ends[0]].value > figures[ends[1]].value:
            raise self._error(
                ends[0], f"{figures[ends[0]].value:g}: expected at most {ends[1]}, "
                f"{figures[ends[1]].value:g}",
            )  # fmt: skip

    def _check_carrier(self, carrier: str, figures: Mapping[str, Figure]) -> None:
        entries = len(self.document["collectives"].get(carrier, ()))
        bound = 0.0
        for at in range(entries):
            where = f"collectives.{carrier}[{at}]"
            for name, expected in LINK.items():
                if expected.needed and f"{where}.{name}" not in figures:
                    raise self._error(f"{where}.{name}", f"missing: {_range(expected)}")
            limit = figures.get(f"{where}.up_to")
            if (limit is None) != (at == entries - 1):
                raise self._error(f"{where}.up_to", "expected in every entry but the last")
            if limit is not None and limit.value <= bound:
                raise self._error(f"{where}.up_to", f"expected more than {bound:g} B")
            bound = limit.value if limit is not None else bound


_CARRIERS = {f"collectives.{carrier}" for carrier in CARRIERS}
_LINKS = {f"{carrier}[].{name}" for carrier in _CARRIERS for name in LINK}
_SECTIONS = {
    ".".join(parts[:length])
    for parts in (key.split(".") for key in FIGURES)
    for length in range(1, len(parts))
}


def _is_section(key: str) -> bool:
    return key in _SECTIONS


def _template(key: str) -> str:
    """``collectives.local[].each`` for ``collectives.local[0].each``."""
    return re.sub(r"\[\d+\]", "[]", key)


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, [*FIGURES, *sorted(_LINKS)], 1, 0.6)
    return f": did you mean {near[0]}?" if near else ""


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(map(repr, names))


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


def _rounded(value: float) -> str:
    """A number in a few digits, though it has hundreds."""
    try:
        return f"{value:g}"
    except OverflowError:
        return f"a number of {len(str(abs(value)))} digits in"


def _range(expected: Quantity) -> str:
    return f"expected {expected.least:g} to {expected.most:g} {expected.unit}"


# -- writing ---------------------------------------------------------------------------------------


def text_of(machine: Machine) -> str:
    """The file of a machine; ``parse`` gives the same machine back."""
    rows = [f"version = {VERSION}"]
    rows += [f"{key} = {_quoted(getattr(machine, key))}" for key in ("name", "device", "about")]
    rows += ["", "[sources]"]
    rows += [f"{_key(name)} = {_quoted(about)}" for name, about in machine.sources.items()]
    section = ""
    for key, figure in in_order(machine.figures):
        where, _, name = key.rpartition(".")
        if where != section:
            section = where
            rows += ["", f"[[{where[: where.index('[')]}]]" if "[" in where else f"[{where}]"]
        rows.append(f"{name} = {_written(figure, quantity(key))}")
    return "\n".join(rows) + "\n"


def in_order(figures: Mapping[str, Figure]) -> list[tuple[str, Figure]]:
    """The figures as they stand in a file."""
    return sorted(figures.items(), key=lambda entry: _place(entry[0]))


def _place(key: str) -> tuple[int, str, int]:
    """Figures in the schema's order, carriers behind the rest."""
    if key in FIGURES:
        return list(FIGURES).index(key), "", 0
    where, _, name = key.rpartition(".")
    return len(FIGURES), where, list(LINK).index(name)


def _written(figure: Figure, expected: Quantity) -> str:
    rest = {"unit": expected.unit, "basis": figure.basis, "source": figure.source}
    fields = [f"value = {_shortest(figure.value)}"]
    fields += [f"{name} = {_quoted(text)}" for name, text in rest.items()]
    return f"{{ {', '.join(fields)} }}"


def _shortest(value: float) -> str:
    """The shortest text that is read as this value."""
    short = re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")
    if float(short) == value:
        return short
    return str(int(value)) if value.is_integer() else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


_ESCAPED = {'"': '\\"', "\\": "\\\\"}


def _quoted(text: str) -> str:
    """A TOML basic string."""
    shown = (
        _ESCAPED.get(c) or (c if c.isprintable() or c == " " else f"\\U{ord(c):08X}") for c in text
    )
    return f'"{"".join(shown)}"'
