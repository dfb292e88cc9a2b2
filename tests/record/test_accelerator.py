"""torch's accelerator, which is lazygt's in threads with a session only."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lazygt.errors import LazyGTError
from lazygt.record import autograd
from lazygt.record.tensor import NATIVE

#: Run in a process of its own: torch decides by thread from then on.
BY_THREAD = """
import threading
import torch
import lazygt
from lazygt.record import autograd
from lazygt.record.tensor import NATIVE

def now():
    found = torch.accelerator.current_accelerator()
    return found and found.type

def in_thread(f):
    found = []
    thread = threading.Thread(target=lambda: found.append(f()))
    thread.start()
    thread.join()
    return found[0]

def gradient():
    w = torch.ones(3, requires_grad=True)
    (w * w * 2).sum().backward()
    return w.grad.tolist()

outside = "cuda" if torch.backends.cuda.is_built() else None
assert now() == ("lazygt" if outside is None else outside)
assert NATIVE.share_accelerator()
autograd.SHARED = True
assert now() == outside
with lazygt.session(launcher="inline", device="cpu"):
    assert now() == "lazygt"
    assert in_thread(now) == outside
    with autograd.selected(False):
        assert now() == outside
        assert gradient() == [4.0] * 3
        assert now() == outside
    assert now() == "lazygt"
    assert gradient() == in_thread(gradient) == [4.0] * 3
    with lazygt.session(launcher="inline", device="cpu"):
        assert now() == "lazygt"
    assert now() == "lazygt"
assert now() == outside
"""


@pytest.mark.skipif(NATIVE is None, reason="the extension has torch decide")
@pytest.mark.timeout(120)
def test_threads_with_a_session_have_lazygt() -> None:
    done = subprocess.run([sys.executable, "-c", BY_THREAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_refused_backward_names_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(*_: object, **__: object) -> None:
        raise RuntimeError("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED")

    monkeypatch.setattr(autograd, "SHARED", False)
    monkeypatch.setattr(autograd, "_engine_run_backward", engine)
    with pytest.raises(LazyGTError, match="build-native"):
        torch.ones(2, requires_grad=True).sum().backward()


def test_other_errors_of_a_backward_pass_stay() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"), autograd.selected(False):
        torch.ones(2).sum().backward()
