"""Settings: the signature of ``lazygt.session`` beside ``Config``; sessions can not be copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import lazygt
from lazygt.config import Config, Settings

pytestmark = pytest.mark.timeout(60)


def test_signature_has_every_setting_with_its_type_and_default() -> None:
    parameters = inspect.signature(lazygt.session).parameters
    assert list(parameters) == [f.name for f in fields(Config)] == list(Settings.__annotations__)
    for f in fields(Config):
        assert parameters[f.name].default == f.default
        assert parameters[f.name].annotation == get_type_hints(Settings)[f.name]
        assert parameters[f.name].kind is inspect.Parameter.KEYWORD_ONLY


def test_keywords_accept_at_least_the_types_of_the_settings() -> None:
    kept, taken = get_type_hints(Config), get_type_hints(Settings)
    for name, type_ in kept.items():
        assert set(getattr(type_, "__args__", (type_,))) <= set(taken[name].__args__), name


def test_help_describes_every_setting() -> None:
    text = inspect.getdoc(lazygt.session.__init__)
    assert text is not None
    for f in fields(Config):
        assert f"    {f.name}: {f.metadata['about']}." in text


@pytest.mark.parametrize(
    ("keyword", "meant"), [("worker", "workers"), ("thread", "threads"), ("compiled", "compile")]
)
def test_misspelt_keyword_is_a_type_error_with_the_nearest_setting(
    keyword: str, meant: str
) -> None:
    with pytest.raises(
        TypeError, match=f"{keyword!r}; did you mean {meant!r}\\? It takes: workers, "
    ):
        lazygt.session(**{keyword: 1})  # type: ignore[misc]


def test_unlike_keyword_has_no_suggestion() -> None:
    with pytest.raises(TypeError, match="'qqq'; It takes: workers, "):
        lazygt.session(qqq=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda s: copy.deepcopy({"session": [s]})]
)
def test_copy_of_a_session_is_a_type_error(duplicate: Callable[[Any], Any]) -> None:
    with (
        lazygt.session(launcher="inline") as session,
        pytest.raises(TypeError, match=r"a lazygt\.session can't be copied or pickled"),
    ):
        duplicate(session)
