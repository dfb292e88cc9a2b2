"""Resolved settings of a session, from keywords and LAZYGT_* variables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

from lazygt.settings import GROUPS, RENAMED, Settings, expand, keyword_text, setting_name

#: Version of lazygt.
VERSION = "0.1.0"


def _setting(default: Any, about: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Make a field of ``Config``.

    Args:
        about: description, for docstrings and help.
        parse: parser of the variable ``LAZYGT_<NAME>``; None: of the default's type, or text.
    """
    kind = str if default is None else type(default)
    parse = parse or (_flag if kind is bool else kind)
    return field(default=default, metadata={"about": about, "parse": parse})


def _flag(text: str) -> bool:
    """Parse a boolean variable."""
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError(f"{text!r} is not one of 1, 0, true, false, yes, no, on, off")


def mesh_axes(text: str) -> dict[str, int]:
    """Parse the axes of a mesh such as ``data=2,model=4``.

    Raises:
        ValueError: for any other text.
    """
    axes: dict[str, int] = {}
    for axis in filter(None, (axis.strip() for axis in text.split(","))):
        name, equals, size = axis.partition("=")
        if not equals or not size.strip().isdigit() or name.strip() in axes:
            raise ValueError(f"{text!r} is not a mesh such as 'data=2,model=4'")
        axes[name.strip()] = int(size)
    return axes


def _virtual_ranks(text: str) -> bool | int | dict[str, int]:
    """Parse ``invariant``: a flag, a number, or numbers by axis such as ``data=4``."""
    if "=" in text:
        return mesh_axes(text)
    return int(text) if text.strip().isdigit() and int(text) > 1 else _flag(text)


def _interval(text: str) -> int | str:
    """Parse ``checkpoint_every``: a number of steps, or a time."""
    return int(text) if text.strip().isdigit() else text


#: Seconds of each unit of time.
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """Parse a time such as ``30s``, ``1.5 min`` or ``2h`` into seconds.

    Raises:
        ValueError: for any other text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time such as '30s', '10min' or '1h'")
    return float(match[1]) * _SECONDS[match[2]]


#: Possible values of LAZYGT_RECORDER.
RECORDERS = ("auto", "native", "python")


def recorder_setting() -> str:
    """Return LAZYGT_RECORDER, the recorder of this process.

    The choice is per process, since torch's private backend can be registered only once.

    Raises:
        ValueError: no recorder has this name.
    """
    name = os.environ.get("LAZYGT_RECORDER") or "auto"
    if name not in RECORDERS:
        raise ValueError(f"LAZYGT_RECORDER={name!r}: expected {', '.join(RECORDERS)}")
    return name


def cache_setting() -> str | None:
    """Return LAZYGT_CACHE_DIR, for code that is compiled outside of sessions."""
    return os.environ.get("LAZYGT_CACHE_DIR") or None


def sanitize_setting() -> str | None:
    """Return the sanitizers of the native extension in tests, by LAZYGT_NATIVE_SANITIZE.

    1 stands for ASan and UBSan, ``thread`` for TSan.
    """
    value = os.environ.get("LAZYGT_NATIVE_SANITIZE") or "0"
    if value == "thread":
        return value
    return "address,undefined" if _flag(value) else None


def wheels_setting() -> str | None:
    """Return LAZYGT_NATIVE_WHEELS, the folder with wheels of the native extension."""
    return os.environ.get("LAZYGT_NATIVE_WHEELS") or None


#: Names of settings, a predicate of valid values other than None, and a description of these.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "workers max_graph_nodes max_graph_bytes max_plans max_plan_bytes max_ahead journal_bytes",
        lambda value: isinstance(value, int) and value >= 1,
        "an integer >= 1",
    ),
    ("bucket_cap_mb", lambda value: value >= 0, "at least 0"),
    ("threads max_cuda_graph_bytes", lambda value: value >= 1, "at least 1"),
    ("compile cuda_graphs", {"auto", "off", "now"}.__contains__, "'auto', 'off' or 'now'"),
    ("recovery", {"auto", "off"}.__contains__, "'auto' or 'off'"),
    ("spares", lambda value: value >= 0, "an integer >= 0"),
    ("snapshot_cost", lambda x: 0 < x <= 1, "a share of the time, above 0 and at most 1"),
    ("plan_code", {"auto", "native", "python"}.__contains__, "'auto', 'native' or 'python'"),
    ("device", {"auto", "cpu", "cuda"}.__contains__, "auto, cpu or cuda"),
)

#: Settings of sessions in a pool.
POOL_SETTINGS = frozenset({"pool", "key", "grace", "detach"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a session; a keyword of ``lazygt.session`` wins over ``LAZYGT_<NAME>``."""

    workers: int = _setting(1, "number of worker processes")
    mesh: Mapping[str, int] | None = _setting(
        None, "the workers as a grid with named axes, such as data=2,model=2", mesh_axes
    )
    invariant: bool | int | Mapping[str, int] | None = _setting(
        None,
        "the same bits for every number of workers that divides this many virtual ranks an axis; "
        "True: 4",
        _virtual_ranks,
    )
    launcher: str = _setting(
        "auto",
        "auto: environment under torchrun, srun and the like, else process; process: on this host; "
        "environment: on all hosts where an engine started this program; ray: where Ray has room; "
        "inline: in the client's process; dry: nothing is computed",
    )
    device: str = _setting("auto", "device of the workers: auto, cpu or cuda")
    default_device: bool = _setting(True, "new tensors are lazy inside the session")
    flush_on_backward: bool = _setting(True, "ship the trace at the end of .backward()")
    max_graph_nodes: int = _setting(5_000, "a trace of so many ops flushes by itself")
    max_graph_bytes: int = _setting(
        8 << 30, "a trace whose results hold so many bytes on a rank flushes by itself"
    )
    max_plans: int = _setting(512, "plans cached by the client and by each worker")
    max_plan_bytes: int = _setting(256 << 20, "approximate bytes of the cached plans")
    max_trie_nodes: int = _setting(500_000, "recorded steps remembered by the client")
    max_ahead: int = _setting(4, "maximum runs of the client ahead of the workers")
    threads: int | None = _setting(None, "torch threads a worker; None: a fair share", int)
    transport: str = _setting("ipc", "ipc, or tcp://HOST for CURVE-encrypted TCP")
    max_message_bytes: int = _setting(1 << 30, "longest frame a worker accepts")
    shm_threshold: int = _setting(16 << 10, "minimum bytes of tensors in shared memory")
    frozen_after: float = _setting(
        5.0, "seconds without a sign of life until WorkerFrozen is raised"
    )
    start_timeout: float = _setting(120.0, "seconds a worker may take to start")
    recovery: str = _setting(
        "auto", "recovery from a worker's death: auto, or off (its values are lost)"
    )
    snapshot_cost: float = _setting(0.02, "maximum share of the time for recovery snapshots")
    journal_bytes: int = _setting(
        256 << 20, "maximum bytes of messages logged for recovery between two snapshots"
    )
    spares: int = _setting(0, "idle spare processes to replace dead workers")
    checkpoint: str | None = _setting(
        None, "folder for checkpoints, from which a killed program resumes"
    )
    checkpoint_every: int | str | None = _setting(
        None,
        "steps, or a time such as 30s, 10min or 1h, between checkpoints; None: as often as "
        "snapshot_cost allows",
        _interval,
    )
    pool: str | None = _setting(
        None, "address of a pool of workers (`lazygt serve`), tcp://HOST:PORT"
    )
    key: str | None = _setting(None, "this client's key file for the pool")
    detach: bool = _setting(False, "in a pool, shipped work continues after the client has left")
    grace: float = _setting(30.0, "maximum seconds of a dead connection to a pool")
    keep_stages: bool = _setting(False, "retain each graph as recorded and after every pass")
    check_passes: bool = _setting(False, "verify each graph after every pass")
    plan_code: str = _setting(
        "auto",
        "executor of a plan after its first run: native, python (generated), or auto: native if "
        "the extension loads",
    )
    compile: str = _setting("auto", "auto, off, or now: run fused groups compiled")
    cuda_graphs: str = _setting(
        "auto",
        "auto, off, or now: on GPUs, run hot plans as CUDA graphs; auto: where they are faster",
    )
    max_cuda_graph_bytes: int | None = _setting(
        None,
        "maximum bytes of a GPU's memory for a worker's CUDA graphs; None: half of the memory that "
        "is free when a plan is captured",
        int,
    )
    compile_timeout: float = _setting(
        300.0, "timeout in seconds of a wait for compiled code without an answer"
    )
    cache_dir: str | None = _setting(None, "folder of compiled code; None: ~/.cache/lazygt")
    ship_code: bool = _setting(
        True, "send workers pickled code of ops and functions that they can't import"
    )
    bucket_cap_mb: float | None = _setting(
        None,
        "MiB of values in one collective; 0: no bucketing; None: 25, and on CPUs values of 512 KiB "
        "and more alone",
        float,
    )
    machine: str | None = _setting(
        None,
        "cost model of plans: a machine's name such as h100, calibrated, or a machine file; None: "
        "cpu-generic, or h100 for GPUs",
    )
    log: str | None = _setting(None, "path of the instruction log (JSON lines)")

    @staticmethod
    def load(**arguments: Any) -> Config:
        """Merge defaults, LAZYGT_* variables and arguments; None counts as absent.

        Raises:
            TypeError: for an unknown keyword.
            ValueError: for a value that is out of its range or can't be parsed.
        """
        arguments = expand(arguments)
        settings = {setting.name: setting for setting in fields(Config)}
        unknown = sorted(set(arguments) - set(settings))
        if unknown:
            hint = _keyword_hint(unknown[0], settings)
            raise TypeError(f"lazygt.session got an unexpected keyword {unknown[0]!r}; {hint}")
        for old_name, new_name in RENAMED.items():
            if os.environ.get(f"LAZYGT_{old_name.upper()}"):
                raise ValueError(
                    f"LAZYGT_{old_name.upper()} is set, which is LAZYGT_{new_name.upper()} now: "
                    f"rename it"
                )
        values: dict[str, Any] = {}
        #: the program requests another launcher, which overrides a pool's variables
        ignores_pool = arguments.get("launcher") not in (None, "auto")
        for name, setting in settings.items():
            text = os.environ.get(f"LAZYGT_{name.upper()}")
            if arguments.get(name) is not None:
                values[name] = arguments[name]
            elif text and not (ignores_pool and name in POOL_SETTINGS):
                values[name] = _parse(name, text, setting.metadata["parse"])
        for name in ("checkpoint", "machine", "key", "cache_dir", "log"):
            if name in values:
                values[name] = os.fspath(values[name])
        if values.get("mesh"):
            values["mesh"], values["workers"] = _parse_mesh(values["mesh"], values.get("workers"))
        if values.get("invariant"):
            # compiled code, and kernels on several threads, may round in another way
            values.setdefault("threads", 1)
            if values.get("compile", "auto") == "auto":
                values["compile"] = "off"
        config = Config(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raise ValueError for a setting out of its range."""
        for names, fits, expected in _RULES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    form = keyword_text(name, repr(value))
                    raise ValueError(f"lazygt.session({form}): expected {expected}")
        self._check_checkpoint()
        self._check_pool()
        if self.invariant and self.compile != "off":
            raise ValueError(
                f"lazygt.session(invariant={self.invariant!r}, compile={self.compile!r}): compiled "
                f"code rounds in ways that depend on the number of workers; leave compile= out"
            )

    def _check_pool(self) -> None:
        """Raise ValueError for settings of a pool without one, or that contradict one."""
        if self.pool is None:
            if self.key is not None or self.detach:
                name = "detach" if self.detach else "key"
                raise ValueError(
                    f"lazygt.session({keyword_text(name, repr(getattr(self, name)))}): it is for a "
                    f"session in a pool; say where that listens, PoolAccess('tcp://HOST:PORT', ...)"
                )
            return
        if re.fullmatch(r"tcp://.+:\d{1,5}", self.pool) is None:
            raise ValueError(f"lazygt.session(pool={self.pool!r}): expected 'tcp://HOST:PORT'")
        if self.key is None:
            raise ValueError(
                f"lazygt.session(pool=...) needs key=FILE, PoolAccess({self.pool!r}, key=FILE): "
                f"whoever runs the pool makes one with `lazygt keys new`"
            )
        if self.launcher not in {"auto", "process"} or self.transport != "ipc" or self.spares:
            raise ValueError(
                f"lazygt.session(pool={self.pool!r}): leave launcher=, Workers(transport=) and "
                f"Recovery(spares=) out: the pool starts its workers as it does"
            )
        if not self.grace >= 0:
            form = keyword_text("grace", repr(self.grace))
            raise ValueError(f"lazygt.session({form}): expected seconds, at least 0")

    def _check_checkpoint(self) -> None:
        """Raise ValueError for impossible settings of checkpoints."""
        every = self.checkpoint_every
        form = keyword_text("checkpoint_every", repr(every))
        if isinstance(every, str):
            try:
                seconds_of(every)
            except ValueError as error:
                raise ValueError(f"lazygt.session({form}): {error}") from None
        elif every is not None and (type(every) is not int or every < 1):
            raise ValueError(
                f"lazygt.session({form}): expected a number of steps, at least 1, or a time such "
                f"as '30s'"
            )
        if self.checkpoint is not None and self.launcher == "dry":
            raise ValueError(
                f"lazygt.session(checkpoint={self.checkpoint!r}, launcher='dry'): "
                f"nothing is computed, so there is nothing to save"
            )


Init = TypeVar("Init", bound=Callable[..., None])


def takes_settings(init: Init) -> Init:
    """Decorate an ``__init__`` of any keywords with the settings' signature and help."""
    about = {f.name: f for f in fields(Config)}
    init.__signature__ = Signature([  # type: ignore[attr-defined]
        Parameter("self", Parameter.POSITIONAL_ONLY),
        *(
            Parameter(
                keyword, Parameter.KEYWORD_ONLY, annotation=type_,
                default=about[keyword].default if keyword in about else None,
            )
            for keyword, type_ in get_type_hints(Settings).items()
        ),
    ])  # fmt: skip
    lines = ["Open a session.", "", "Args:"]
    for keyword in Settings.__annotations__:
        group = GROUPS.get(keyword)
        texts = [about[keyword].metadata["about"]] if keyword in about else []
        if group is not None:
            texts.append(f"an object of {group.__name__}")
        lines.append(f"    {keyword}: {'; or '.join(texts)}.")
    init.__doc__ = "\n".join(lines)
    return init


def _describe(group: type) -> None:
    """Append the settings of an object, with their defaults, to its docstring."""
    about = {f.name: f for f in fields(Config)}
    lines = [group.__doc__ or "", "", "Args:"]
    for attribute in (f.name for f in fields(group)):
        setting = about[setting_name(group, attribute)]
        lines.append(f"    {attribute}: {setting.metadata['about']}. Default: {setting.default!r}.")
    group.__doc__ = "\n".join(lines)


for _group in GROUPS.values():
    _describe(_group)


def _keyword_hint(name: str, names: Mapping[str, object]) -> str:
    """Return a hint for a keyword that is no setting."""
    # why: only a wrong keyword needs it
    from difflib import get_close_matches

    keywords = list(Settings.__annotations__)
    meant = [
        setting_name(group, name)
        for group in GROUPS.values()
        if name in (attribute.name for attribute in fields(group))
    ] or get_close_matches(name, {**names, **dict.fromkeys(keywords)}, 1)
    forms = " or ".join(keyword_text(setting, "...") for setting in meant)
    question = f"did you mean {forms}? " if meant else ""
    return f"{question}It takes: {', '.join(keywords)}"


def _parse_mesh(mesh: Mapping[Any, Any] | str, workers: int | None) -> tuple[dict[str, int], int]:
    """Return the axes of a mesh, and the number of workers that follows from them."""
    if not isinstance(mesh, str | Mapping):
        raise TypeError(
            f"lazygt.session(mesh={mesh!r}): expected ranks by axis, such as "
            f"{{'data': 2, 'model': 4}} or 'data=2,model=4'"
        )
    axes = mesh_axes(mesh) if isinstance(mesh, str) else dict(mesh)
    if not all(isinstance(name, str) and name.isidentifier() for name in axes):
        raise ValueError(f"lazygt.session(mesh={axes!r}): expected names such as 'data' as axes")
    if any(type(size) is not int or size < 1 for size in axes.values()):
        raise ValueError(f"lazygt.session(mesh={axes!r}): expected integers >= 1 as sizes")
    total = math.prod(axes.values())
    if workers not in (None, total):
        raise ValueError(
            f"lazygt.session(workers={workers!r}, mesh={axes!r}): that mesh is of {total} workers; "
            f"leave workers= out"
        )
    return axes, total


def _parse(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Parse a variable; errors name the variable."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"LAZYGT_{name.upper()}={text!r}: {error}") from error
