"""Settings: the signature of ``lazygt.session`` beside ``Config``; sessions can not be copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import lazygt
from lazygt.config import Config
from lazygt.settings import GROUPS, RENAMED, Settings, expand, grouped, keyword_text, setting_name

pytestmark = pytest.mark.timeout(60)
KEYWORDS = list(Settings.__annotations__)
SETTINGS = {f.name: f for f in fields(Config)}
#: Settings with the object and field that have them.
OF_GROUPS = {
    setting_name(group, each.name): (group, each.name)
    for group in GROUPS.values()
    for each in fields(group)
}
FLAT = {"mesh", "invariant", "launcher", "device", "checkpoint"}


def test_signature_has_every_keyword_with_its_type_and_default() -> None:
    parameters = inspect.signature(lazygt.session).parameters
    assert list(parameters) == KEYWORDS
    for keyword, parameter in parameters.items():
        default = SETTINGS[keyword].default if keyword in SETTINGS else None
        assert parameter.default == default
        assert parameter.annotation == get_type_hints(Settings)[keyword]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_each_setting_is_a_flat_keyword_or_a_field_of_one_object() -> None:
    assert SETTINGS.keys() == OF_GROUPS.keys() | FLAT
    assert not OF_GROUPS.keys() & FLAT
    assert len(OF_GROUPS) == sum(len(fields(group)) for group in GROUPS.values())
    assert set(KEYWORDS) == GROUPS.keys() | FLAT


def test_objects_accept_at_least_the_types_of_the_settings() -> None:
    types = get_type_hints(Config)
    for name, (group, attribute) in OF_GROUPS.items():
        accepted = get_type_hints(group)[attribute].__args__
        assert set(getattr(types[name], "__args__", (types[name],))) <= set(accepted), name


def test_help_describes_every_setting() -> None:
    text = inspect.getdoc(lazygt.session.__init__)
    assert text is not None
    for keyword in KEYWORDS:
        assert f"\n    {keyword}: " in text
        if keyword in SETTINGS:
            assert SETTINGS[keyword].metadata["about"] in text
    for name, (group, attribute) in OF_GROUPS.items():
        about, default = SETTINGS[name].metadata["about"], SETTINGS[name].default
        assert f"    {attribute}: {about}. Default: {default!r}." in (inspect.getdoc(group) or "")


def test_objects_are_public() -> None:
    for group in GROUPS.values():
        assert getattr(lazygt, group.__name__) is group


def test_objects_expand_to_settings_and_back() -> None:
    keywords = {
        "workers": lazygt.Workers(2, threads=1),
        "mesh": "data=2",
        "compile": lazygt.Compile(timeout=3.0),
        "recovery": lazygt.Recovery("off"),
        "pool": lazygt.PoolAccess("tcp://a:1", key=Path("me")),
        "tracing": lazygt.Tracing(max_ahead=2),
        "planning": lazygt.Planning(machine="h100"),
    }
    settings = {
        "workers": 2, "threads": 1, "mesh": "data=2", "compile_timeout": 3.0, "recovery": "off",
        "pool": "tcp://a:1", "key": Path("me"), "max_ahead": 2, "machine": "h100",
    }  # fmt: skip
    assert expand(keywords) == settings
    assert grouped(settings) == keywords


def test_field_that_is_none_leaves_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_THREADS", "3")
    config = Config.load(workers=lazygt.Workers(2))
    assert (config.workers, config.threads) == (2, 3)
    assert Config.load(workers=lazygt.Workers(threads=1)).threads == 1


@pytest.mark.parametrize("name", [name for name in OF_GROUPS if name not in GROUPS])
def test_former_keyword_works_and_names_the_present_one(name: str) -> None:
    group, attribute = OF_GROUPS[name]
    form = rf"lazygt\.session\({name}=\.\.\.\) is \w+={group.__name__}\({attribute}=\.\.\.\) now"
    with (
        pytest.warns(DeprecationWarning, match=form) as warned,
        pytest.raises(TypeError, match="unexpected keyword 'wrong'"),
    ):
        lazygt.session(**{name: SETTINGS[name].default or 1, "wrong": 1})
    assert warned[0].filename == __file__


@pytest.mark.parametrize("name", RENAMED)
def test_renamed_keyword_names_the_present_one(name: str) -> None:
    with (
        pytest.warns(DeprecationWarning, match=rf"\({name}=\.\.\.\) is {RENAMED[name]}=\.\.\. now"),
        pytest.raises(ValueError, match=rf"lazygt\.session\({RENAMED[name]}="),
    ):
        lazygt.session(**{name: "nonsense"})


@pytest.mark.parametrize("name", RENAMED)
def test_renamed_variable_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LAZYGT_{name.upper()}", "x")
    with pytest.raises(ValueError, match=f"which is LAZYGT_{RENAMED[name].upper()} now: rename it"):
        Config.load()


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("worker", "workers=..."),
        ("thread", "workers=Workers(threads=...)"),
        ("compiled", "compile=..."),
        ("plannin", "planning=..."),
        ("timeout", "compile=Compile(timeout=...)"),
        ("mode", "compile=... or recovery=..."),
    ],
)
def test_misspelt_keyword_is_a_type_error_with_the_nearest_setting(
    keyword: str, meant: str
) -> None:
    with pytest.raises(TypeError) as raised:
        lazygt.session(**{keyword: 1})  # type: ignore[misc]
    assert f"{keyword!r}; did you mean {meant}? It takes: workers, mesh, " in str(raised.value)


def test_unlike_keyword_has_no_suggestion() -> None:
    with pytest.raises(TypeError, match="'qqq'; It takes: workers, "):
        lazygt.session(qqq=1)  # type: ignore[call-arg]


def test_misplaced_object_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"compile=\.\.\.\) got a Workers, which is for workers="):
        lazygt.session(compile=lazygt.Workers(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"planning=3\): expected lazygt\.Planning\(\.\.\.\)"):
        lazygt.session(planning=3)  # type: ignore[arg-type]


def test_setting_given_twice_is_a_type_error() -> None:
    with (
        pytest.warns(DeprecationWarning, match="threads"),
        pytest.raises(
            TypeError, match=r"'threads' twice; write it once, as workers=Workers\(threads="
        ),
    ):
        lazygt.session(threads=1, workers=lazygt.Workers(2, threads=2))  # type: ignore[call-arg]
    with (
        pytest.warns(DeprecationWarning, match="recover="),
        pytest.raises(TypeError, match=r"'recovery' twice; write it once, as recovery=\.\.\."),
    ):
        lazygt.session(recover="off", recovery="auto")  # type: ignore[call-arg]


def test_error_names_the_object_of_a_wrong_value() -> None:
    with pytest.raises(ValueError, match=r"session\(workers=Workers\(threads=0\)\): expected at"):
        lazygt.session(workers=lazygt.Workers(threads=0))
    assert keyword_text("workers", "0") == "workers=0"
    assert keyword_text("mesh", "{}") == "mesh={}"


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda s: copy.deepcopy({"session": [s]})]
)
def test_copy_of_a_session_is_a_type_error(duplicate: Callable[[Any], Any]) -> None:
    with (
        lazygt.session(launcher="inline") as session,
        pytest.raises(TypeError, match=r"a lazygt\.session can't be copied or pickled"),
    ):
        duplicate(session)
