"""Processes of one user that may not look into one another."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import lazygt
from lazygt.host import processes
from lazygt.pool.hosted import Terms
from lazygt.runtime.launch.start_plan import LinkSpec
from tests.pool.serving import served

pytestmark = pytest.mark.timeout(120)

#: The source of what hides stands alone, so another user needs no access to where lazygt lies.
HIDES = Path(processes.__file__).read_text()
SECRET = """
import os, sys
fd = os.memfd_create("secret")
os.write(fd, b"secret")
if sys.argv[1] == "hidden":
    hide()
print(fd, flush=True)
sys.stdin.read()
"""
LOOKS = """
import json, os, sys
pid, fd = sys.argv[1:]
seen = {}
for name in (f"fd/{fd}", "mem", "environ"):
    try:
        os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        seen[name.partition("/")[0]] = True
    except PermissionError:
        seen[name.partition("/")[0]] = False
print(json.dumps(seen))
"""
NOBODY = 65534


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Start it as a user who is not root."""
    return subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", program, *map(str, arguments)], cwd="/", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        user=NOBODY if os.getuid() == 0 else None, group=NOBODY if os.getuid() == 0 else None,
        extra_groups=[] if os.getuid() == 0 else None,
        env={"PATH": "/usr/bin:/usr/local/bin:/bin"},
    )  # fmt: skip


def looked_at(how: str) -> dict[str, bool]:
    """What a process of the same user sees of another one."""
    secret = start(HIDES + SECRET, how)
    assert secret.stdout is not None
    fd = secret.stdout.readline().strip()
    if not fd:
        _, why = secret.communicate()
        pytest.skip(f"another user can't run Python here: {why.strip()[-200:]}")
    told, _ = start(LOOKS, secret.pid, fd).communicate()
    secret.communicate("")
    seen: dict[str, bool] = json.loads(told)
    return seen


def test_hidden_process_is_unreadable_by_its_own_user() -> None:
    if not looked_at("open")["fd"]:
        pytest.skip("nobody may look into other processes here in any case")
    assert looked_at("hidden") == {"fd": False, "mem": False, "environ": False}


def test_pool_setting_hides_workers() -> None:
    spec = LinkSpec(environment={processes.VARIABLE: "", "LAZYGT_MAX_PLANS": "7"})
    for hides in (False, True):
        told = Terms(1, 1, "cpu", "/cache", (0,), hides).apply(spec).environment
        assert told.get(processes.VARIABLE, "") == ("1" if hides else "")
        assert told["LAZYGT_MAX_PLANS"] == "7"


def test_a_hidden_pool_serves_as_any_other(tmp_path: Path) -> None:
    """The kernel gives what belongs to a process that hides to root."""
    with (
        served(tmp_path, "--workers", "1", "--hidden") as pool,
        lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1
        ) as session,
    ):
        assert (torch.ones(3) + 1).sum().item() == 6.0
        (pid,) = session.worker_pids
        (row,) = pool.sessions("alice")
        assert row["pids"] == [pid]
        pool.until(lambda told: told["sessions"][0]["memory"] > 0)
        if os.getuid() != 0:  # to whom it belongs in any case
            for process in (pid, pool.process.pid):
                assert os.stat(f"/proc/{process}").st_uid == 0
