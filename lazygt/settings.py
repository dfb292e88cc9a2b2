"""Keywords of ``lazygt.session``: six flat ones, and objects for groups of rarer settings.

Each setting has one name in ``config.Config``, which is also the name of its ``LAZYGT_<NAME>``. An
object names the settings of its group; ``expand`` turns the keywords into those names.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, TypedDict

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Workers:
    """Worker processes: ``lazygt.session(workers=Workers(4, threads=1))``."""

    count: int | None = None
    _: KW_ONLY
    threads: int | None = None
    transport: str | None = None
    max_message_bytes: int | None = None
    shm_threshold: int | None = None
    frozen_after: float | None = None
    start_timeout: float | None = None
    ship_code: bool | None = None
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Compile:
    """Compiled code: ``lazygt.session(compile=Compile("now", cache_dir="code"))``."""

    mode: str | None = None
    _: KW_ONLY
    timeout: float | None = None
    cache_dir: Path | None = None
    plan_code: str | None = None
    cuda_graphs: str | None = None
    max_cuda_graph_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery from dead workers: ``lazygt.session(recovery=Recovery(spares=1))``."""

    mode: str | None = None
    _: KW_ONLY
    snapshot_cost: float | None = None
    journal_bytes: int | None = None
    spares: int | None = None
    checkpoint_every: int | str | None = None


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """Access to a pool: ``lazygt.session(pool=PoolAccess("tcp://host:7001", key="me.key"))``."""

    address: str | None = None
    _: KW_ONLY
    key: Path | None = None
    grace: float | None = None
    detach: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """Recording of ops: ``lazygt.session(tracing=Tracing(default_device=False))``."""

    default_device: bool | None = None
    flush_on_backward: bool | None = None
    max_graph_nodes: int | None = None
    max_graph_bytes: int | None = None
    max_trie_nodes: int | None = None
    max_ahead: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Passes and plans: ``lazygt.session(planning=Planning(machine="h100"))``."""

    machine: Path | None = None
    bucket_cap_mb: float | None = None
    max_plans: int | None = None
    max_plan_bytes: int | None = None
    keep_stages: bool | None = None
    check_passes: bool | None = None


class Settings(TypedDict, total=False):
    """Keywords of ``lazygt.session``, for type checkers and editors.

    None, also in an object, stands for the variable ``LAZYGT_<NAME>``, else the default.
    """

    workers: int | Workers | None
    mesh: Mapping[str, int] | str | None
    invariant: bool | int | Mapping[str, int] | None
    launcher: str | None
    device: str | None
    checkpoint: Path | None
    compile: str | Compile | None
    recovery: str | Recovery | None
    pool: str | PoolAccess | None
    tracing: Tracing | None
    planning: Planning | None


#: Keyword -> class of its object.
GROUPS: dict[str, type] = {
    "workers": Workers,
    "compile": Compile,
    "recovery": Recovery,
    "pool": PoolAccess,
    "tracing": Tracing,
    "planning": Planning,
}
#: Field of an object -> name of its setting, where that is another.
_NAMES = {
    "Workers.count": "workers",
    "Compile.mode": "compile",
    "Compile.timeout": "compile_timeout",
    "Recovery.mode": "recovery",
    "PoolAccess.address": "pool",
}
#: Former names of settings -> present names.
RENAMED = {"executor": "launcher", "on": "pool", "recover": "recovery"}


def setting_name(group: type, name: str) -> str:
    """Return the name of the setting of an object's field."""
    return _NAMES.get(f"{group.__name__}.{name}", name)


#: Setting -> keyword and field of the object that has it.
_FIELDS = {
    setting_name(group, attribute.name): (keyword, attribute.name)
    for keyword, group in GROUPS.items()
    for attribute in fields(group)
}


def keyword_text(name: str, value: str) -> str:
    """Return a setting as source code of ``lazygt.session``: ``workers=Workers(threads=2)``.

    Args:
        name: of a setting.
        value: as source code.
    """
    keyword, attribute = _FIELDS.get(name, (name, ""))
    if keyword == name:
        return f"{name}={value}"
    return f"{keyword}={GROUPS[keyword].__name__}({attribute}={value})"


def expand(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects by their settings, and former names by present ones; None is left out.

    Raises:
        TypeError: a keyword has another object than its own, or a setting stands there twice.
    """
    settings: dict[str, Any] = {}
    for requested, value in keywords.items():
        keyword = RENAMED.get(requested, requested)
        group = GROUPS.get(keyword)
        if group is not None and isinstance(value, group):
            values = {setting_name(group, f.name): getattr(value, f.name) for f in fields(group)}
        else:
            _check_no_object(keyword, value)
            values = {keyword: value}
        for name, setting in values.items():
            if setting is None:
                continue
            if name in settings:
                raise TypeError(
                    f"lazygt.session got {name!r} twice; write it once, as "
                    f"{keyword_text(name, '...')}"
                )
            settings[name] = setting
    return settings


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``lazygt.session`` for settings by name, the inverse of `expand`."""
    keywords: dict[str, Any] = {}
    fields_of: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        keyword, attribute = _FIELDS.get(name, (name, ""))
        if attribute:
            fields_of.setdefault(keyword, {})[attribute] = value
        else:
            keywords[name] = value
    return keywords | {key: GROUPS[key](**values) for key, values in fields_of.items()}


def _check_no_object(keyword: str, value: object) -> None:
    """Raise TypeError for a misplaced object, or for a value where only an object fits."""
    if value is not None and keyword in {"tracing", "planning"}:
        raise TypeError(
            f"lazygt.session({keyword}={value!r}): expected lazygt.{GROUPS[keyword].__name__}(...)"
        )
    for right, group in GROUPS.items():
        if isinstance(value, group):
            raise TypeError(
                f"lazygt.session({keyword}=...) got a {group.__name__}, which is for {right}=..."
            )


def expand_user_keywords(keywords: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
    """Expand a user's keywords; warn of former ones.

    Args:
        stacklevel: frames from the caller of this function to the user's line, for the warning.
    """
    for name in keywords.keys() - Settings.__annotations__.keys():
        present_name = RENAMED.get(name, name)
        if present_name in _FIELDS or name in RENAMED:
            warnings.warn(
                f"lazygt.session({name}=...) is {keyword_text(present_name, '...')} now",
                DeprecationWarning,
                stacklevel=stacklevel + 1,
            )
    return expand(keywords)
