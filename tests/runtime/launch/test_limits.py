"""A session that would run out of descriptors or processes is an error before it opens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from lazygt.runtime.launch.start_plan import check_limits

ROOT = Path(__file__).parents[3]
OPEN = """
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec

spec = LinkSpec(factory="tests.runtime.handlers:Obedient", loads_torch=False, threads=1)


def opened():
    try:
        link = ProcessLink(spec)
    except OSError as error:
        return str(error)
    link.send(0, [b"echo", b"hello"])
    rank, frames = link.receive(60)
    link.close()
    return bytes(frames[0]).decode()
"""
DESCRIPTORS = """
import os, resource

for free in range(0, 80, 3):
    used = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    said = opened()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(said)
    if said == "hello":
        break
"""
PROCESSES = """
import resource

own = OWN
for more in range(0, 40, 3):
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (own + more, hard))
    print(said := opened())
    if said == "hello":
        break
"""


def run(text: str, *command: str, **environment: str) -> list[str]:
    """What a client prints, which ends well and leaves no process behind."""
    client = subprocess.Popen(
        [*command, sys.executable, "-c", OPEN + text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    said, errors = client.communicate(timeout=600)
    assert client.returncode == 0, errors
    return said.splitlines()


def test_descriptor_limit_is_checked() -> None:
    *refused, opened = run(DESCRIPTORS)
    assert opened == "hello"
    assert refused
    assert all("file descriptors" in line and "ulimit -n" in line for line in refused)


def test_process_limit_is_checked() -> None:
    """As a user other than root, whom no limit binds."""
    own, command = 2, []
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed")
        # a number that nobody else has; it may read what only root may, such as this Python
        rights = "+dac_read_search,+dac_override"
        command = ["setpriv", f"--reuid={2**30 + os.getpid()}", "--clear-groups",
                   f"--inh-caps={rights}", f"--ambient-caps={rights}"]  # fmt: skip
    else:
        mine = [p for p in psutil.process_iter(["uids"]) if p.info["uids"].real == os.getuid()]
        own = sum(process.num_threads() for process in mine)
    *refused, opened = run(PROCESSES.replace("OWN", str(own)), *command)
    assert opened == "hello"
    assert refused
    assert all("processes and threads" in line and "ulimit -u" in line for line in refused)


def test_limit_check_releases_its_resources() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    check_limits(4, 2)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
