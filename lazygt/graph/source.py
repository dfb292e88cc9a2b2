"""Source lines of ops: the user's own file:line.

A *call site* is ``(code, lasti)``: cheap to read at every op, expanded to text only for an error or
a dump.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import CodeType, FrameType

import torch

#: Code object and instruction offset of the innermost frame that is the user's own.
CallSite = tuple[CodeType, int]

_TORCH = os.path.dirname(torch.__file__) + os.sep
#: directory of this package
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

#: file name -> True if it belongs to torch, lazygt or the interpreter
_library: dict[str, bool] = {}


def is_library(filename: str) -> bool:
    """Return whether a file belongs to torch, lazygt or the interpreter."""
    installed = filename.startswith((_TORCH, PACKAGE, "<frozen", "<string>"))
    installed = installed or filename.endswith("contextlib.py")
    _library[filename] = installed
    return installed


def user_call_site(depth: int) -> CallSite | None:
    """Return the innermost user frame at least ``depth`` frames up; None when there is none.

    There is none on autograd's own threads, where backward ops are recorded.
    """
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:  # fewer frames than that: one of autograd's threads
        return None
    known = _library
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        library = known.get(name)
        if library is None:
            library = is_library(name)
        if not library:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def expand(call_site: CallSite | None) -> str:
    """Return ``file:line`` of a call site, or ``"?"``."""
    if call_site is None:
        return "?"
    code, lasti = call_site
    return _line(code, code.co_filename, lasti)


def with_line(text: str) -> str:
    """Return an error's text, and below it the user's line if there is one."""
    call_site = user_call_site(1)
    return text if call_site is None else f"{text}\n  at {expand(call_site)}"


@lru_cache(maxsize=16384)
def _line(code: CodeType, name: str, lasti: int) -> str:
    # the name is part of the key: code objects of two files may compare equal
    """Return ``file:line`` of an instruction, from the code object's line table."""
    line = code.co_firstlineno
    for start, stop, number in code.co_lines():
        if start <= lasti < stop and number is not None:
            line = number
            break
    return f"{name}:{line}"
