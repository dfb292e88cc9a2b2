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
        version = self.document.get("version")
        self._need(
            type(version) is int and version == VERSION,
            "version",
            f"{_shown(version)}: expected {VERSION}, the one that this lazygt reads",
        )
        name, device, about = (
            self._text(key, self.document.get(key)) for key in ("name", "device", "about")
        )
        self._need(
            _NAME.fullmatch(name),
            "name",
            f"{name!r}: expected small letters, digits, '.', '_' and '-'",
        )
        self._need(device in DEVICES, "device", f"{device!r}: expected {_either(DEVICES)}")
        sources: Any = self.document.get("sources")
        expected = "missing: expected [sources] with a text for each name"
        self._need(isinstance(sources, dict) and sources, "sources", expected)
        self.sources = {key: self._text(f"sources.{key}", text) for key, text in sources.items()}
        figures = {key: self._figure(key, value) for key, value in self._leaves()}
        self._check_complete(figures)
        return Machine(name, device, about, figures, self.sources, self.path)

    def _need(self, holds: object, key: str, why: str) -> None:
        if not holds:
            raise MachineError(self.path, key, why)

    def _text(self, key: str, value: Any) -> str:
        self._need(isinstance(value, str) and value, key, f"{_shown(value)}: expected a text")
        return str(value)

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield every key of a figure, with its entry."""
        todo = [(key, value) for key, value in self.document.items() if key not in _HEAD]
        while todo:
            key, value = todo.pop(0)
            if isinstance(value, dict) and "value" not in value and key in _SECTIONS:
                todo[:0] = [(f"{key}.{name}", inner) for name, inner in value.items()]
            elif isinstance(value, list) and key in _CARRIERS:
                for at, entry in enumerate(value):
                    self._need(isinstance(entry, dict), f"{key}[{at}]", "expected a table")
                    todo[at:at] = [(f"{key}[{at}].{name}", inner) for name, inner in entry.items()]
            else:
                yield key, value

    def _figure(self, key: str, given: Any) -> Figure:
        where = re.sub(r"\[\d+\]", "[]", key)
        if where not in FIGURES and where not in _LINKS:
            near = difflib.get_close_matches(where, [*FIGURES, *sorted(_LINKS)], 1, 0.6)
            raise MachineError(
                self.path, key, f"unknown: did you mean {near[0]}?" if near else "unknown"
            )
        expected = quantity(key)
        self._need(
            isinstance(given, dict),
            key,
            f"{_shown(given)}: expected {{ value = ..., unit = {expected.unit!r}, "
            f"basis = {_either(BASES)}, source = ... }}",
        )
        for field in (*_FIELDS, *given):
            self._need(field in given, key, f"without {field!r}: {_range(expected)}")
            self._need(
                field in _FIELDS, f"{key}.{field}", f"unknown: expected {', '.join(_FIELDS)}"
            )
        value, unit, basis, source = (given[field] for field in _FIELDS)
        names = ", ".join(self.sources)
        self._need(unit == expected.unit, key, f"in {_shown(unit)}: expected {expected.unit!r}")
        self._need(basis in BASES, key, f"basis {_shown(basis)}: expected {_either(BASES)}")
        self._need(
            isinstance(source, str) and source in self.sources,
            key,
            f"source {_shown(source)}: expected one of [sources]: {names}",
        )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        self._need(number, key, f"{_shown(value)}: {_range(expected)}")
        self._need(  # nor where it is no number
            expected.least <= value <= expected.most,
            key,
            f"{_rounded(value)} {expected.unit}: {_range(expected)}",
        )
        return Figure(float(value), basis, source)

    def _check_complete(self, figures: Mapping[str, Figure]) -> None:
        for key, expected in FIGURES.items():
            there = not expected.needed or key in figures
            self._need(there, key, f"missing: {_range(expected)}; {expected.about}")
        self._need(
            self.document["collectives"].get("local"),
            "collectives.local",
            "missing: expected [[collectives.local]]",
        )
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
            raise MachineError(self.path, missing, f"missing: expected beside {there[0]}")
        if there:
            least, most = (figures[key].value for key in ends)
            self._need(least <= most, ends[0], f"{least:g}: expected at most {ends[1]}, {most:g}")

    def _check_carrier(self, carrier: str, figures: Mapping[str, Figure]) -> None:
        entries = len(self.document["collectives"].get(carrier, ()))
        bound = 0.0
        for at in range(entries):
            where = f"collectives.{carrier}[{at}]"
            for name, expected in LINK.items():
                there = not expected.needed or f"{where}.{name}" in figures
                self._need(there, f"{where}.{name}", f"missing: {_range(expected)}")
            limit, key = figures.get(f"{where}.up_to"), f"{where}.up_to"
            last = at == entries - 1
            self._need((limit is None) == last, key, "expected in every entry but the last")
            if limit is not None:
                self._need(limit.value > bound, key, f"expected more than {bound:g} B")
                bound = limit.value


_CARRIERS = {f"collectives.{carrier}" for carrier in CARRIERS}
_LINKS = {f"{carrier}[].{name}" for carrier in _CARRIERS for name in LINK}
_SECTIONS = {
    ".".join(parts[:length])
    for parts in (key.split(".") for key in FIGURES)
    for length in range(1, len(parts))
}


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
