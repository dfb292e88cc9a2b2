"""Compiled code on a host that sees nothing of the client's cache."""

from __future__ import annotations

import pytest

from tests.clusters.hosts import Hosts
from tests.clusters.running import alone, same, torchrun

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

COMPILED = {"LAZYGT_COMPILE": "now", "LAZYGT_THREADS": "1"}
#: Over the other host's cache lies a file system of its own, which is empty.
MOUNT = 'mount -t tmpfs -o mode=700 tmpfs "$HOME/.cache/lazygt" && exec "$@"'
OTHER_CACHE = ["unshare", "--mount", "sh", "-c", MOUNT, "sh"]


def test_all_hosts_run_compiled_code(hosts: Hosts) -> None:
    expected = alone(5, 1, 2, COMPILED)
    run = torchrun(hosts, 1, 5, 1, given=COMPILED, before=OTHER_CACHE)
    told = run.told()
    here, _ = run.ended()
    assert same(told, expected)
    assert told["compiled"] == expected["compiled"] > 0
    assert "RuntimeWarning" not in here


def test_a_host_with_another_processor_has_all_run_op_by_op(hosts: Hosts) -> None:
    """Here one that has none of the instructions that torch's kernels are chosen by."""
    other = {"ATEN_CPU_CAPABILITY": "default"}
    run = torchrun(hosts, 1, 5, 1, given=COMPILED, strange=other)
    told = run.told()
    here, _ = run.ended()
    assert told["compiled"] == 0
    assert (
        "a host can't run it: worker 1: ValueError: code is compiled for"
        in " ".join(run.lines) + here
    )
