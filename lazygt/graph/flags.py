"""torch's process-wide flags that decide bits or errors of ops: read, check, set.

A plan is recorded under some flags and runs under the same ones, in any process. Flags are stored
as differences from torch's defaults, so a program without any has none to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

#: (name, value) of each flag that differs from torch's default, in the order of ``TABLE``.
Flags = tuple[tuple[str, Any], ...]

#: The number of threads that kernels use, where the program has set it.
THREADS = "num_threads"
#: Flags that compiled code does not depend on: kernels read them when they run.
_AT_RUN_TIME = frozenset({THREADS, "flush_denormal"})
_MAX_THREADS = 1024
#: torch's threads as the process has begun.
_THREADS_AT_IMPORT = torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Flag:
    """Process-wide flag of torch."""

    default: Any  # torch's default
    choices: tuple[Any, ...]  # the valid values; a hostile peer may send others
    get: Callable[[], Any]  # get, set: torch's own functions, not a session's replacements
    set: Callable[[Any], object]


def _switch(default: bool, name: str) -> Flag:
    """Return a flag that ``torch._C`` has a getter and a setter for."""
    getter, setter = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    return Flag(default, (False, True), getter, setter)


def _reduction(dtype: str) -> Flag:
    """Return the flag of reduced-precision reductions of matmuls in a half dtype.

    Its value is torch's pair of switches: for the reductions, and for split-K matmuls with them.
    """
    name = f"cublas_allow_{dtype}_reduced_precision_reduction"
    setter = getattr(torch._C, f"_set_{name}")
    pairs = tuple(
        [
            (reduced_precision, split_k)
            for reduced_precision in (False, True)
            for split_k in (False, True)
        ]
    )
    return Flag((True, True), pairs, getattr(torch._C, f"_get_{name}"), lambda pair: setter(*pair))


def _precision(backend: str, op: str) -> Flag:
    """Return the flag of a backend's float32 precision for an op."""
    getter, setter = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    default = "tf32" if backend == "cuda" and op in ("conv", "rnn") else "none"
    return Flag(
        default,
        ("none", "ieee", "tf32", "bf16"),
        lambda: getter(backend, op),
        lambda value: setter(backend, op, value),
    )


def _matmul_precision() -> str:
    """Return the float32 matmul precision; torch's getter raises if backends differ."""
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return (
            "high" if torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32" else "highest"
        )


def _cudnn_allows_tf32() -> bool:
    """Return cuDNN's TF32 flag; torch's getter raises if its ops differ."""
    try:
        return torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormals, tested by a product: torch has no getter."""
    smallest = torch.finfo(torch.float64).tiny
    return smallest * 0.5 == 0.0


def _deterministic() -> Flag:
    """Return the flag of deterministic algorithms: off, warn or on."""
    getter, warn_only = (
        torch._C._get_deterministic_algorithms,
        torch._C._get_deterministic_algorithms_warn_only,
    )
    setter = torch._C._set_deterministic_algorithms
    return Flag(
        "off",
        ("off", "warn", "on"),
        lambda: ("warn" if warn_only() else "on") if getter() else "off",
        lambda value: setter(value != "off", warn_only=value == "warn"),
    )


def _default_dtype() -> Flag:
    """Return the flag of the default dtype, by name."""
    setter = torch._C._set_default_dtype
    return Flag(
        "float32",
        ("float16", "bfloat16", "float32", "float64"),
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: setter(getattr(torch, name)),
    )


#: Always set, and first: these flags also set backends' precisions, which torch then compares.
_LEGACY = frozenset({"float32_matmul_precision", "cudnn.allow_tf32"})
#: Flag name -> flag, in the order in which flags are set.
TABLE: Mapping[str, Flag] = {
    "deterministic_algorithms": _deterministic(),
    "fill_uninitialized_memory": _switch(True, "deterministic_fill_uninitialized_memory"),
    "default_dtype": _default_dtype(),
    "flush_denormal": Flag(False, (False, True), flushes_denormals, torch._C.set_flush_denormal),
    "float32_matmul_precision": Flag(
        "highest",
        ("highest", "high", "medium"),
        _matmul_precision,
        torch._C._set_float32_matmul_precision,
    ),
    "cudnn.allow_tf32": Flag(
        True, (False, True), _cudnn_allows_tf32, torch._C._set_cudnn_allow_tf32
    ),
    **{
        f"fp32_precision.{backend}.{op}": _precision(backend, op)
        for backend, ops in (
            ("generic", ("all",)),
            ("cuda", ("all", "matmul", "conv", "rnn")),
            ("mkldnn", ("all", "matmul", "conv", "rnn")),
        )
        for op in ops
    },
    "matmul.allow_fp16_reduced_precision_reduction": _reduction("fp16"),
    "matmul.allow_bf16_reduced_precision_reduction": _reduction("bf16"),
    "matmul.allow_fp16_accumulation": _switch(False, "cublas_allow_fp16_accumulation"),
    "cudnn.enabled": _switch(True, "cudnn_enabled"),
    "cudnn.benchmark": _switch(False, "cudnn_benchmark"),
    "cudnn.deterministic": _switch(False, "cudnn_deterministic"),
    "mkldnn.enabled": _switch(True, "mkldnn_enabled"),
    "mkldnn.deterministic": _switch(False, "mkldnn_deterministic"),
    "nnpack.enabled": _switch(True, "nnpack_enabled"),
}


def read_flags(threads: bool = False) -> Flags:
    """Return the flags of this process that differ from torch's defaults.

    Args:
        threads: include the number of threads, if the program has changed it.
    """
    values = [(name, flag.get(), flag.default) for name, flag in TABLE.items()]
    flags = tuple([(name, value) for name, value, default in values if value != default])
    number = torch.get_num_threads()
    if not threads or number == _THREADS_AT_IMPORT:
        return flags
    return (*flags, (THREADS, min(number, _MAX_THREADS)))


def write_flags(flags: Flags, threads: int) -> None:
    """Set all flags in this process and on this thread; an absent flag gets its default.

    Args:
        threads: number of kernel threads, if the flags have none.
    """
    values = dict(flags)
    for name, flag in TABLE.items():
        value = values.get(name, flag.default)
        if name in _LEGACY or flag.get() != value:
            flag.set(value)
    thread_count = values.get(THREADS, threads)
    if torch.get_num_threads() != thread_count:
        torch._C.set_num_threads(thread_count)


def check_flags(flags: Flags) -> None:
    """Refuse flags that ``read_flags`` never returns.

    Raises:
        ValueError: an unknown flag, an invalid value, or a repeated flag.
    """
    for name, value in flags:
        if name == THREADS:
            allowed = type(value) is int and 1 <= value <= _MAX_THREADS
        else:
            flag = TABLE.get(name)
            allowed = flag is not None and any(
                value == choice and type(value) is type(choice) for choice in flag.choices
            )
        if not allowed:
            raise ValueError(f"no flag {name!r} with the value {value!r}")
    if len(dict(flags)) != len(flags):
        raise ValueError("a flag occurs twice")


def flags_of_code(flags: Flags) -> Flags:
    """Return the flags that compiled code depends on."""
    return tuple([flag for flag in flags if flag[0] not in _AT_RUN_TIME])


def shown_flags(flags: Flags) -> str:
    """Return the flags as text for a plan's title."""
    return ", ".join(f"{name}={value}" for name, value in flags)


def fills_new_memory() -> bool:
    """Return whether torch fills the memory of ``torch.empty``."""
    c = torch._C
    return c._get_deterministic_algorithms() and c._get_deterministic_fill_uninitialized_memory()


@contextmanager
def nondeterministic() -> Iterator[None]:
    """Context in which ops without a deterministic kernel raise no error: no kernel runs."""
    flag = TABLE["deterministic_algorithms"]
    before = flag.get()
    if before == "off":
        yield
        return
    flag.set("off")
    try:
        yield
    finally:
        flag.set(before)
