"""What the kernel tells of other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from lazygt.runtime.launch.procfs import is_stopped, processor_time

# a name that looks like the end of a name
CHILD = """
import ctypes, sys, time
while time.process_time() < 0.05:
    pass
ctypes.CDLL(None).prctl(15, b"a) T 1 (b", 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


def test_processor_time_grows_with_work_only() -> None:
    begun, until = processor_time(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert processor_time(os.getpid()) - begun >= 0.05


def test_a_process_that_is_stopped_and_one_that_has_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"named\n"
    assert processor_time(child.pid) > 0.02
    assert not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert is_stopped(child.pid)
    child.kill()
    child.communicate()
    assert not is_stopped(child.pid)
    assert processor_time(child.pid) == 0
