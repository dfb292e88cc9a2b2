"""Numbers as they are: told apart by type and bits.

Python's ``==`` takes 1, 1.0 and True for one number, 0.0 and -0.0 too, and finds that a NaN is not
even itself. Whatever is kept for a number, and whatever is merged with another, asks here.
"""

from __future__ import annotations

from marshal import dumps
from typing import Any

#: The last format that says only what a number is, and not how often Python holds it.
_FORMAT = 2


def exact(arg: Any) -> Any:
    """A node's argument as part of a key: equal for arguments that are the same."""
    kind = type(arg)
    if kind is tuple:
        return tuple([exact(item) for item in arg])
    return kind, dumps(arg, _FORMAT) if kind is float or kind is complex else arg
