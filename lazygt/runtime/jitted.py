"""Triton kernels in pickled code: made anew from their source, which Triton compiles."""

from __future__ import annotations

import importlib
import linecache
from types import FunctionType
from typing import Any

#: Options of ``triton.jit`` that kernels keep.
OPTIONS = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")


def jitted(fn: FunctionType, source: tuple[str, ...], first: int, options: dict[str, Any]) -> Any:
    """The kernel of a function whose source stands in no file.

    Args:
        source: its lines, decorators included; ``first`` is the number of the first.
    """
    name = f"<triton kernel {fn.__module__}.{fn.__qualname__} {hash(source)}>"
    lines = ["\n"] * (first - 1) + list(source)
    linecache.cache[name] = sum(map(len, lines)), None, lines, name
    fn.__code__ = fn.__code__.replace(co_filename=name)
    return importlib.import_module("triton").jit(**options)(fn)
