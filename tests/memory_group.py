"""A memory cgroup of a test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_group() -> Iterator[Path]:
    """Its directory, below that of this process; skips where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"lazygt-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"no memory cgroup can be made here: {error}")
            try:
                yield group
            finally:
                group.rmdir()
            return
    pytest.skip("this machine has no memory cgroups of version 1, which may be made anywhere")
