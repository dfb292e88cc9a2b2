"""Tests of the CUDA branches on stubs of CUDA's libraries: `make test-cuda-host`.

Kernels do nothing and memory is the host's, so numbers mean nothing: calls, their order, waits and
refusals do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda_host.control import VARIABLE, Control, control

_CONTROL = control()

if _CONTROL is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def gpu() -> Iterator[Control]:
    """The stub's state, at first two GPUs that have nothing to do."""
    assert _CONTROL is not None, f"{VARIABLE} is not set"
    _CONTROL.reset()
    yield _CONTROL
    _CONTROL.reset()
