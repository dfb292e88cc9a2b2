"""Reader and writer of machine files (TOML); the reader names the first mistake."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazygt.errors import MachineError
from lazygt.machine.model import (
    BASES,
    CARRIERS,
    DEVICES,
    FIGURES,
    LINK,
    RANGES,
    VERSION,
    Figure,
    Machine,
    Quantity,
    quantity,
)

#: Folder of the shipped machines.
FOLDER = Path(__file__).parent / "machines"
_FIELDS = ("value", "unit", "basis", "source")
_HEAD = ("version", "name", "device", "about", "sources")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def read(path: str | os.PathLike[str]) -> Machine:
    """Read a machine file.

    Raises:
        MachineError: the file can't be read, or a figure is missing or implausible.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(path, "", f"can't be read: {error}") from error
    return parse(text, os.fspath(path))


def parse(text: str, path: str) -> Machine:
    """Parse the text of a machine file; see ``read``."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MachineError(path, "", f"is not TOML: {error}") from error
    machine = _Reader(path, _with_base(document, path)).machine()
    used = {figure.source for figure in machine.figures.values()}
    used |= document.get("sources", {}).keys()
    return replace(machine, sources={n: text for n, text in machine.sources.items() if n in used})


def shipped() -> tuple[str, ...]:
    """Return the names of the machines shipped with lazygt."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def _with_base(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a document with the entries of its ``base``, a shipped machine, that it leaves out."""
    base = document.pop("base", None)
    if base is None:
        return document
    if base not in shipped():
        raise MachineError(path, "base", f"{base!r}: expected one of {', '.join(shipped())}")
    below = tomllib.loads((FOLDER / f"{base}.toml").read_text(encoding="utf-8"))
    return _merged(_with_base(below, path), document)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge the sections of two documents; a figure or list of ``above`` replaces that of below."""
    merged = {**below, **above}
    for key, value in above.items():
        other = below.get(key)
        if isinstance(value, dict) and isinstance(other, dict) and "value" not in value:
            merged[key] = _merged(other, value)
    return merged


class _Reader:
    """Validating reader of one document; unknown keys are errors."""

    def __init__(self, path: str, document: dict[str, Any]) -> None:
        self.path, self.document = path, document
        self.sources: dict[str, str] = {}

    def machine(self) -> Machine:
        """Read and check the whole document."""
        version = self.document.get("version")
        self._require(
            type(version) is int and version == VERSION,
            "version",
            f"{_shown(version)}: expected {VERSION}, the one that this lazygt reads",
        )
        name, device, about = (
            self._text(key, self.document.get(key)) for key in ("name", "device", "about")
        )
        self._require(
            _NAME.fullmatch(name),
            "name",
            f"{name!r}: expected small letters, digits, '.', '_' and '-'",
        )
        self._require(device in DEVICES, "device", f"{device!r}: expected {_either(DEVICES)}")
        sources: Any = self.document.get("sources")
        expected = "missing: expected [sources] with a text for each name"
        self._require(isinstance(sources, dict) and sources, "sources", expected)
        self.sources = {key: self._text(f"sources.{key}", text) for key, text in sources.items()}
        figures = {key: self._figure(key, value) for key, value in self._figure_entries()}
        self._check_complete(figures)
        return Machine(name, device, about, figures, self.sources, self.path)

    def _require(self, holds: object, key: str, problem: str) -> None:
        """Raise MachineError for a key unless a condition holds."""
        if not holds:
            raise MachineError(self.path, key, problem)

    def _text(self, key: str, value: Any) -> str:
        """Check that a value is a text, and return it."""
        self._require(isinstance(value, str) and value, key, f"{_shown(value)}: expected a text")
        return str(value)

    def _figure_entries(self) -> Iterator[tuple[str, Any]]:
        """Yield every key of a figure, with its entry."""
        todo = [(key, value) for key, value in self.document.items() if key not in _HEAD]
        while todo:
            key, value = todo.pop(0)
            if isinstance(value, dict) and "value" not in value and key in _SECTIONS:
                todo[:0] = [(f"{key}.{name}", inner) for name, inner in value.items()]
            elif isinstance(value, list) and key in _CARRIERS:
                for at, entry in enumerate(value):
                    self._require(isinstance(entry, dict), f"{key}[{at}]", "expected a table")
                    todo[at:at] = [(f"{key}[{at}].{name}", inner) for name, inner in entry.items()]
            else:
                yield key, value

    def _figure(self, key: str, entry: Any) -> Figure:
        """Check the entry of a figure: its key, fields, unit, origin and bounds."""
        pattern = re.sub(r"\[\d+\]", "[]", key)
        if pattern not in FIGURES and pattern not in _LINKS:
            similar = difflib.get_close_matches(pattern, [*FIGURES, *sorted(_LINKS)], 1, 0.6)
            raise MachineError(
                self.path, key, f"unknown: did you mean {similar[0]}?" if similar else "unknown"
            )
        expected = quantity(key)
        self._require(
            isinstance(entry, dict),
            key,
            f"{_shown(entry)}: expected {{ value = ..., unit = {expected.unit!r}, "
            f"basis = {_either(BASES)}, source = ... }}",
        )
        for field in (*_FIELDS, *entry):
            self._require(field in entry, key, f"without {field!r}: {_range(expected)}")
            self._require(
                field in _FIELDS, f"{key}.{field}", f"unknown: expected {', '.join(_FIELDS)}"
            )
        value, unit, basis, source = (entry[field] for field in _FIELDS)
        names = ", ".join(self.sources)
        self._require(unit == expected.unit, key, f"in {_shown(unit)}: expected {expected.unit!r}")
        self._require(basis in BASES, key, f"basis {_shown(basis)}: expected {_either(BASES)}")
        self._require(
            isinstance(source, str) and source in self.sources,
            key,
            f"source {_shown(source)}: expected one of [sources]: {names}",
        )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        self._require(number, key, f"{_shown(value)}: {_range(expected)}")
        self._require(  # NaN fails, too
            expected.least <= value <= expected.most,
            key,
            f"{_rounded(value)} {expected.unit}: {_range(expected)}",
        )
        return Figure(float(value), basis, source)

    def _check_complete(self, figures: Mapping[str, Figure]) -> None:
        """Check that all required figures are there."""
        for key, expected in FIGURES.items():
            present = not expected.needed or key in figures
            self._require(present, key, f"missing: {_range(expected)}; {expected.about}")
        self._require(
            self.document["collectives"].get("local"),
            "collectives.local",
            "missing: expected [[collectives.local]]",
        )
        for carrier in CARRIERS:
            self._check_carrier(carrier, figures)
        for name in RANGES:
            self._check_range(name, figures)

    def _check_range(self, name: str, figures: Mapping[str, Figure]) -> None:
        """Check that a range has both ends or none, and that they are in order."""
        ends = [f"range.{name}.least", f"range.{name}.most"]
        present = [key for key in ends if key in figures]
        if len(present) == 1:
            (missing,) = set(ends) - set(present)
            raise MachineError(self.path, missing, f"missing: expected beside {present[0]}")
        if present:
            least, most = (figures[key].value for key in ends)
            self._require(
                least <= most, ends[0], f"{least:g}: expected at most {ends[1]}, {most:g}"
            )

    def _check_carrier(self, carrier: str, figures: Mapping[str, Figure]) -> None:
        """Check a carrier's entries: complete, and with ascending bounds but for the last."""
        entries = len(self.document["collectives"].get(carrier, ()))
        bound = 0.0
        for index in range(entries):
            prefix = f"collectives.{carrier}[{index}]"
            for name, expected in LINK.items():
                present = not expected.needed or f"{prefix}.{name}" in figures
                self._require(present, f"{prefix}.{name}", f"missing: {_range(expected)}")
            limit, key = figures.get(f"{prefix}.up_to"), f"{prefix}.up_to"
            last = index == entries - 1
            self._require((limit is None) == last, key, "expected in every entry but the last")
            if limit is not None:
                self._require(limit.value > bound, key, f"expected more than {bound:g} B")
                bound = limit.value


#: Keys of lists of links, of the figures in them, and of all sections.
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
    """Format a number in a few digits, even an integer with hundreds of digits."""
    try:
        return f"{value:g}"
    except OverflowError:
        return f"a number of {len(str(abs(value)))} digits in"


def _range(expected: Quantity) -> str:
    """Describe the plausible range of a figure."""
    return f"expected {expected.least:g} to {expected.most:g} {expected.unit}"


# -- writing ---------------------------------------------------------------------------------------


def text_of(machine: Machine) -> str:
    """Return the text of a machine's file; ``parse`` is the inverse."""
    rows = [f"version = {VERSION}"]
    rows += [f"{key} = {_quoted(getattr(machine, key))}" for key in ("name", "device", "about")]
    rows += ["", "[sources]"]
    rows += [f"{_key(name)} = {_quoted(about)}" for name, about in machine.sources.items()]
    section = ""
    for key, figure in in_order(machine.figures):
        prefix, _, name = key.rpartition(".")
        if prefix != section:
            section = prefix
            rows += ["", f"[[{prefix[: prefix.index('[')]}]]" if "[" in prefix else f"[{prefix}]"]
        rows.append(f"{name} = {_figure_text(figure, quantity(key))}")
    return "\n".join(rows) + "\n"


def in_order(figures: Mapping[str, Figure]) -> list[tuple[str, Figure]]:
    """Return the figures in the order of a file."""
    return sorted(figures.items(), key=lambda entry: _sort_key(entry[0]))


def _sort_key(key: str) -> tuple[int, str, int]:
    """Return a figure's sort key: the schema's order, then carriers."""
    if key in FIGURES:
        return list(FIGURES).index(key), "", 0
    prefix, _, name = key.rpartition(".")
    return len(FIGURES), prefix, list(LINK).index(name)


def _figure_text(figure: Figure, expected: Quantity) -> str:
    """Return a figure as a TOML inline table."""
    rest = {"unit": expected.unit, "basis": figure.basis, "source": figure.source}
    fields = [f"value = {_number_text(figure.value)}"]
    fields += [f"{name} = {_quoted(text)}" for name, text in rest.items()]
    return f"{{ {', '.join(fields)} }}"


def _number_text(value: float) -> str:
    """Return the shortest text that parses to this value."""
    short = re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")
    if float(short) == value:
        return short
    return str(int(value)) if value.is_integer() else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


_ESCAPED = {'"': '\\"', "\\": "\\\\"}


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    escaped = (
        _ESCAPED.get(c) or (c if c.isprintable() or c == " " else f"\\U{ord(c):08X}") for c in text
    )
    return f'"{"".join(escaped)}"'
