"""Machine files: what is shipped is whole, and every mistake names the file, the figure, and what
was expected."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import lazygt
from lazygt.errors import MachineError
from lazygt.machine import calibrated_path, default_machine, machine_of, shipped
from lazygt.machine.file import parse, text_of
from lazygt.machine.model import BASES, FIGURES

FOLDER = Path(lazygt.__file__).parent / "machine" / "machines"
GENERIC = (FOLDER / "cpu-generic.toml").read_text()


def test_shipped_machine_files() -> None:
    assert shipped() == ("a100-40", "a100-80", "b200", "cpu-generic", "h100", "h100-96", "h200")
    for name in shipped():
        machine = machine_of(name)
        assert machine.name == name
        assert {figure.basis for figure in machine.figures.values()} <= set(BASES)
        assert {figure.source for figure in machine.figures.values()} == set(machine.sources)
        if machine.device == "cuda":
            assert machine.matmul.rate["bf16"] < machine.matmul.peak["bf16"]
            assert machine.collectives.network[0].bandwidth < machine.collectives.local[0].bandwidth


def test_names_are_found_in_capitals_and_files_by_their_path(tmp_path: Path) -> None:
    assert machine_of("H100") is default_machine("cuda")
    assert machine_of("cpu-generic") is default_machine("cpu")
    own = tmp_path / "own.toml"
    own.write_text(GENERIC.replace('name = "cpu-generic"', 'name = "own"'))
    assert machine_of(own).name == "own"
    assert str(machine_of(own)) == f"own ({own})"


def test_the_calibrated_one_lies_in_the_cache(tmp_path: Path) -> None:
    place = calibrated_path(str(tmp_path))
    with pytest.raises(MachineError, match=r"machine .*machine\.toml is not there yet: run lazygt"):
        machine_of("calibrated", str(tmp_path))
    place.write_text(GENERIC)
    assert machine_of("calibrated", str(tmp_path)).path == str(place)


def test_unknown_machine_name_is_refused() -> None:
    with pytest.raises(MachineError) as caught:
        machine_of("h1000")
    assert str(caught.value) == (
        "machine h1000 is no machine, and no file: expected a100-40, a100-80, b200, cpu-generic, "
        "h100, h100-96, h200, calibrated, or a path"
    )
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", shipped())
def test_machine_file_round_trip(name: str) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    machine = parse(text, "x")
    assert parse(text_of(machine), "x").figures == machine.figures
    assert ("\nbase = " in text) == (text_of(machine) != text)
    assert tomllib.loads(text)["version"] == 1


def test_file_with_a_base_has_the_figures_of_the_base_and_its_own() -> None:
    head = 'version = 1\nname = "own"\nbase = "h200"\n[sources]\nserver = "measured"\n'
    call = '[host]\ncall = { value = 1e-6, unit = "s", basis = "measured", source = "server" }\n'
    machine, base = parse(head + call, "x"), machine_of("h200")
    changed = {key for key, figure in base.figures.items() if machine.figures[key] != figure}
    assert machine.figures.keys() == base.figures.keys()
    assert (changed, machine.host.call) == ({"host.call"}, 1e-6)
    assert machine.sources == {**base.sources, "server": "measured"}


def test_base_that_is_not_shipped_is_refused() -> None:
    with pytest.raises(MachineError, match=r"^machine x: base 'h1': expected one of a100-40, "):
        parse(GENERIC.replace('device = "cpu"', 'base = "h1"'), "x")


def test_a_text_of_any_characters_is_written() -> None:
    machine = parse(GENERIC.replace("one worker", r"a \"b\" \\ \n\u00e9 c"), "x")
    assert machine.about.startswith('a "b" \\ \né c')
    assert parse(text_of(machine), "x").about == machine.about


# -- mistakes --------------------------------------------------------------------------------------


def without(key: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"^{key} = .*\n", "", text, count=1, flags=re.MULTILINE)


def instead(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


SIZE = '{{ value = {}, unit = "B", basis = "measured", source = "server" }}'
BANDWIDTH = 'bandwidth = { value = 9e9, unit = "B/s"'

MISTAKES: dict[str, tuple[Callable[[str], str], str]] = {
    "no version": (
        without("version"),
        "version missing: expected 1, the one that this lazygt reads",
    ),
    "another version": (
        instead("version = 1", "version = 2"),
        "version 2: expected 1, the one that this lazygt reads",
    ),
    "a name with blanks": (
        instead('"cpu-generic"', '"My CPU"'),
        "name 'My CPU': expected small letters, digits, '.', '_' and '-'",
    ),
    "no such device": (instead('"cpu"', '"tpu"'), "device 'tpu': expected 'cpu' or 'cuda'"),
    "no words about it": (without("about"), "about missing: expected a text"),
    "a figure that is missing": (
        without("bandwidth"),
        "memory.bandwidth missing: expected 1e+06 to 1e+15 B/s; bytes read and written, beyond the "
        "cache",
    ),
    "negative": (
        instead(BANDWIDTH, 'bandwidth = { value = -9e9, unit = "B/s"'),
        "memory.bandwidth -9e+09 B/s: expected 1e+06 to 1e+15 B/s",
    ),
    "zero": (
        instead(BANDWIDTH, 'bandwidth = { value = 0, unit = "B/s"'),
        "memory.bandwidth 0 B/s: expected 1e+06 to 1e+15 B/s",
    ),
    "absurd": (
        instead(BANDWIDTH, 'bandwidth = { value = 1e30, unit = "B/s"'),
        "memory.bandwidth 1e+30 B/s: expected 1e+06 to 1e+15 B/s",
    ),
    "no number": (
        instead(BANDWIDTH, 'bandwidth = { value = nan, unit = "B/s"'),
        "memory.bandwidth nan B/s: expected 1e+06 to 1e+15 B/s",
    ),
    "a text": (
        instead(BANDWIDTH, 'bandwidth = { value = "9e9", unit = "B/s"'),
        "memory.bandwidth '9e9': expected 1e+06 to 1e+15 B/s",
    ),
    "a flag": (
        instead(BANDWIDTH, 'bandwidth = { value = true, unit = "B/s"'),
        "memory.bandwidth True: expected 1e+06 to 1e+15 B/s",
    ),
    "another unit": (
        instead(BANDWIDTH, 'bandwidth = { value = 9, unit = "GB/s"'),
        "memory.bandwidth in 'GB/s': expected 'B/s'",
    ),
    "no unit": (
        instead(BANDWIDTH, "bandwidth = { value = 9e9"),
        "memory.bandwidth without 'unit': expected 1e+06 to 1e+15 B/s",
    ),
    "a bare number": (
        instead(f'{BANDWIDTH}, basis = "measured", source = "server" }}', "bandwidth = 9e9"),
        "memory.bandwidth 9000000000.0: expected { value = ..., unit = 'B/s', basis = 'measured' "
        "or 'datasheet', source = ... }",
    ),
    "guessed": (
        instead('basis = "measured"', 'basis = "guessed"'),
        "memory.bandwidth basis 'guessed': expected 'measured' or 'datasheet'",
    ),
    "a source that is not there": (
        instead('source = "server"', 'source = "hearsay"'),
        "memory.bandwidth source 'hearsay': expected one of [sources]: ",
    ),
    "an empty source": (
        instead('server = "', 'server = ""#'),
        "sources.server '': expected a text",
    ),
    "more than a figure has": (
        instead(BANDWIDTH, f"{BANDWIDTH}, sigma = 1"),
        "memory.bandwidth.sigma unknown: expected value, unit, basis, source",
    ),
    "an unknown figure": (
        instead("cache_bandwidth =", "cash_bandwidth ="),
        "memory.cash_bandwidth unknown: did you mean memory.cache_bandwidth?",
    ),
    "an unknown section": (instead("[memory]", "[memroy]"), "memroy unknown"),
    "a section for a figure": (
        instead("[pointwise]", "[memory.deep]"),
        "memory.deep unknown",
    ),
    "no carrier": (
        instead("[[collectives.local]]", "[[collectives.network]]"),
        "collectives.local missing: expected [[collectives.local]]",
    ),
    "a carrier that is no list": (
        instead("[[collectives.local]]", "[collectives.local]"),
        "collectives.local",
    ),
    "half a carrier": (
        without("latency"),
        "collectives.local[0].latency missing: expected 0 to 10 s",
    ),
    "two entries without a bound": (
        instead("[[collectives.local]]\n", "[[collectives.local]]\nup_to = 3\n"),
        "collectives.local[0].up_to 3: expected { value = ...",
    ),
    "a bound of the last entry": (
        instead(
            "[[collectives.local]]\n",
            '[[collectives.local]]\nup_to = { value = 4096, unit = "B", basis = "measured", '
            'source = "server" }\n',
        ),
        "collectives.local[0].up_to expected in every entry but the last",
    ),
    "a number of hundreds of digits": (
        instead(BANDWIDTH, f'bandwidth = {{ value = 1{"0" * 400}, unit = "B/s"'),
        "memory.bandwidth a number of 401 digits in B/s: expected 1e+06 to 1e+15 B/s",
    ),
    "a bound beyond all sizes": (
        instead(
            "[[collectives.local]]\n",
            '[[collectives.local]]\nup_to = { value = inf, unit = "B", basis = "measured", '
            'source = "server" }\n',
        ),
        "collectives.local[0].up_to inf B: expected 1 to 1e+15 B",
    ),
    "half a range": (
        instead("[pointwise]", f"[range.bytes]\nleast = {SIZE.format(8)}\n[pointwise]"),
        "range.bytes.most missing: expected beside range.bytes.least",
    ),
    "a range the wrong way round": (
        instead(
            "[pointwise]",
            f"[range.bytes]\nleast = {SIZE.format(9)}\nmost = {SIZE.format(8)}\n[pointwise]",
        ),
        "range.bytes.least 9: expected at most range.bytes.most, 8",
    ),
    "a range of what has none": (
        instead("[pointwise]", f"[range.seconds]\nleast = {SIZE.format(8)}\n[pointwise]"),
        "range.seconds unknown",
    ),
    "a text for a section": (instead("[sources]", 'pointwise = "fast"\n[sources]'), "is not TOML"),
    "a number for a section": (instead("[host]", "[hosts]\nx = 1\n[host]"), "hosts unknown"),
    "nothing at all": (lambda text: "", "version missing: expected 1"),
    "brackets within brackets": (
        instead("version = 1", f"version = {'[' * 5000}"),
        "is not TOML: ",
    ),
    "no TOML": (instead("version = 1", "version = "), "is not TOML: Invalid value (at line 1, "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, tmp_path: Path) -> None:
    change, expected = MISTAKES[name]
    path = tmp_path / "machine.toml"
    path.write_text(change(GENERIC))
    with pytest.raises(MachineError) as caught:
        machine_of(path)
    assert str(caught.value).startswith(f"machine {path}")
    told = str(caught.value).removeprefix(f"machine {path}").removeprefix(":").lstrip()
    assert told.startswith(expected), told


def test_a_folder_is_no_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is no machine, and no file"):
        machine_of(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(MachineError, match=r"can't be read: 'utf-8' codec"):
        machine_of(path)


def test_every_figure_has_description_and_range() -> None:
    for key, quantity in FIGURES.items():
        assert quantity.about, key
        assert quantity.least < quantity.most, key
