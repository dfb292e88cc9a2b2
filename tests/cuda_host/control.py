"""The state of the stub, which all processes of a test share."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

#: The environment's name for the file of the state.
VARIABLE = "CUDA_HOST_CONTROL"
#: As ``Control`` in stub/control.h has them.
FIELDS = (
    "devices", "total_bytes", "busy_us", "fail_after", "refuse_context", "fail_captures",
    "fail_register", "driver", "reads_zeros", "full", "kernels", "copies", "waits", "captures",
    "replays", "registered", "opened", "collectives", "compiled",
)  # fmt: skip
#: Two GPUs of 4 GiB, with a driver for CUDA 13.
AT_FIRST = {"devices": 2, "total_bytes": 4 << 30, "driver": 13000}
_NUMBER = struct.Struct("q")


class Control:
    """Numbers of the stub by their names, as attributes.

    Args:
        path: of the file; it is made anew.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        object.__setattr__(self, "_page", page)
        self.reset()

    def reset(self) -> None:
        """Set all numbers to those at first."""
        for name in FIELDS:
            setattr(self, name, AT_FIRST.get(name, 0))

    def __getattr__(self, name: str) -> int:
        if name not in FIELDS:
            raise AttributeError(name)
        (value,) = _NUMBER.unpack_from(self._page, 8 * FIELDS.index(name))
        return int(value)

    def __setattr__(self, name: str, value: Any) -> None:
        _NUMBER.pack_into(self._page, 8 * FIELDS.index(name), value)


def control() -> Control | None:
    """The state of this process's stub; None: it has none."""
    place = os.environ.get(VARIABLE)
    return None if place is None else Control(Path(place))
