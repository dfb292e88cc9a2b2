"""What C and C++ the calling thread is inside of, which Python's own frames don't show."""

from __future__ import annotations

import ctypes

#: Frames that are looked at, innermost first.
_MOST = 128


class _Symbol(ctypes.Structure):
    """What ``dladdr`` tells of an address: ``Dl_info`` in dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None)  # not CDLL, which would let other threads run in between


def in_torch() -> bool:
    """Whether this was called, through whatever, by a function of torch's libraries."""
    addresses = (ctypes.c_void_p * _MOST)()
    symbol = _Symbol()
    for address in addresses[: _libc.backtrace(addresses, _MOST)]:
        found = _libc.dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
        if found and b"/torch/lib/" in (symbol.file or b""):
            return True
    return False
