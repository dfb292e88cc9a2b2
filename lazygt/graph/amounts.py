"""Numbers as people read them: three digits and a unit."""

from __future__ import annotations

_PREFIXES = ("", "k", "M", "G", "T", "P")


def amount(number: int, unit: str) -> str:
    """``2.1 Mflop``: three digits at most, in powers of 1000; without a unit ``2.1 M``."""
    power = min((len(str(abs(number))) - 1) // 3, len(_PREFIXES) - 1)
    return f"{number / 1000**power:.3g} {_PREFIXES[power]}{unit}".rstrip()


def count(number: int, one: str, many: str = "") -> str:
    """``1 launch``, ``2 launches``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """``3.2 us``: three digits, in seconds, milliseconds or microseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
