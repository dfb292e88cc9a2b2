"""Exact equality of numbers: by type and bits.

Python's ``==`` takes 1, 1.0 and True for one number, 0.0 and -0.0 too, and a NaN as unequal to
itself. Caches with numbers in their keys, and passes that merge numbers, compare them by ``exact``.
"""

from __future__ import annotations

from marshal import dumps
from typing import Any

#: The last format that depends on the number alone, and not on Python's reference counts.
_FORMAT = 2


def exact(arg: Any) -> Any:
    """Return a node's argument as part of a key: equal for arguments that are the same."""
    kind = type(arg)
    if kind is tuple:
        return tuple([exact(item) for item in arg])
    return kind, dumps(arg, _FORMAT) if kind is float or kind is complex else arg
