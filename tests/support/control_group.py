"""A cgroup of a test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """Its directory, below that of this process; skips where none can be made.

    Args:
        controller: of version 1: ``memory``, ``cpu``.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parent = Path("/sys/fs/cgroup") / controller / path.lstrip("/")
            group = parent / f"lazygt-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"no {controller} cgroup can be made here: {error}")
            try:
                yield group
            finally:
                group.rmdir()
            return
    pytest.skip(f"this machine has no {controller} cgroups of version 1, made anywhere")
