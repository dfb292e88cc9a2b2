"""``launcher=``: a name in a table, and what it opens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import pytest
import torch

import lazygt
from lazygt.runtime.cluster import opening
from lazygt.runtime.launch.launcher import Boot, Launcher, Process

pytestmark = pytest.mark.timeout(120)


class Noting(Launcher):
    """Notes which ranks it started."""

    started: list[int] = []  # noqa: RUF012 - a session makes its own launcher

    def start(self, boot: Boot, environment: Mapping[str, str]) -> Process:
        self.started.append(boot.rank)
        return super().start(boot, environment)


def test_a_line_of_the_table_is_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    line = partial(opening._processes, f"{__name__}:Noting")
    monkeypatch.setitem(opening.LAUNCHERS, "noting", line)
    monkeypatch.setattr(Noting, "started", [])
    with lazygt.session(launcher="noting", workers=lazygt.Workers(2, threads=1)):
        assert (torch.ones(3) * 2 + 1).sum().item() == 9.0
    assert Noting.started == [0, 1]


def test_a_wrong_name_is_told_all_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(opening.LAUNCHERS, "noting", opening.LAUNCHERS["process"])
    text = (
        r"^lazygt\.session\(launcher='magic'\): "
        r"expected 'process', 'environment', 'ray', 'inline', 'dry' or 'noting'$"
    )
    with pytest.raises(ValueError, match=text):
        lazygt.session(launcher="magic")


def test_import_lazygt_loads_nothing_of_other_hosts_and_no_sockets() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import lazygt\n"
        "loaded = {'zmq', 'lazygt.runtime.cluster.environment', 'lazygt.net.mailbox',"
        "          'lazygt.runtime.collectives.peer_backend',"
        "          'lazygt.submit.status_page'} & set(sys.modules)\n"
        "print(sorted(loaded - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "[]"
