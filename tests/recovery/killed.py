"""A training whose workers are killed at random moments; run in a process of its own.

    python -m tests.recovery.killed --kills 500 --layout "fully sharded"

Workers are killed while the client waits, while it records, while a recovery is under way, while
compiled code is swapped in, one or all at once; some are stopped instead, or crash. Losses,
weights, the optimizer's state and the generator must have the bits of a training that nobody
disturbed; no process, descriptor or memory may be left. Prints counts as JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import lazygt
from lazygt.recovery import recover
from lazygt.runtime.compiling import compiler
from lazygt.runtime.executors.compiled import Record
from lazygt.settings import grouped
from tests.recovery.programs import BATCH, LAYOUTS, MLP, WIDTH, Layout, chaotic, digest
from tests.support import forking

#: Deaths that one wait may see: the third at the same run would be poison.
MOST = 2
#: Seconds within which the first death of a wait comes, and the second: in a recovery.
SOON, LATER = 0.01, 0.6
#: Seconds after which a stopped worker counts as frozen.
FROZEN = 5.0
#: A process that hangs says where after so many seconds.
PATIENCE = 3000.0


class Killer:
    """Kills workers of a session, so many times.

    Attributes:
        seen: deaths, by kind.
    """

    def __init__(self, session: lazygt.Session, kills: int, waits: int, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._session = session
        self._workers = session._link._pool.workers
        self._left, self._waits = kills, waits
        self._draw = random.Random(seed)
        self._late = 0

    def around(self, wait: Callable[[], Any]) -> Any:
        """Kill workers while a wait lasts, or soon after it."""
        # all that are left, spread over the waits that are left
        most = MOST - self._late
        share = self._left / max(self._waits, 1)
        count = min(most, self._left, round(share + self._draw.uniform(-1, 1)))
        self._waits -= 1
        ended: list[float] = []
        delays = [self._draw.uniform(0, each) for each in (SOON, LATER)[: max(count, 0)]]
        thread = threading.Thread(target=self._kill, args=(delays, ended))
        thread.start()
        value = wait()
        came = time.time()
        thread.join()
        # the next wait has that of a worker that had just answered, too
        back = max((each.at + each.seconds for each in self._session.recoveries), default=0.0)
        self._late = sum(at > min(came, back) for at in ended)
        return value

    def _kill(self, delays: list[float], ended: list[float]) -> None:
        for delay in delays:
            threading.Event().wait(delay)
            how = self._draw.choices(["one", "all", "crash", "stop"], (80, 12, 5, 3))[0]
            number = {"crash": signal.SIGSEGV, "stop": signal.SIGSTOP}.get(how, signal.SIGKILL)
            workers = self._workers if how == "all" else [self._draw.choice(self._workers)]
            for worker in workers:
                with suppress(ProcessLookupError):  # it has just died
                    signal.pidfd_send_signal(worker.process.pidfd, number)
            ended.append(time.time())
            self.seen[how] += 1
            self._left -= 1


def train(
    session: lazygt.Session, layout: Layout, steps: int, around: Callable[[Callable[[], Any]], Any]
) -> str:
    """Some steps, with several waits each; what they come to as SHA-256.

    Args:
        around: calls each wait.
    """
    torch.manual_seed(7)
    compiles = session.config.compile != "off"
    model = MLP()
    layout.lay(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    large, told = torch.arange(100_000.0).to("lazygt"), []
    for step in range(steps):
        x = torch.randn(BATCH, WIDTH, device="cpu").to("lazygt")
        y = torch.randint(0, WIDTH, (BATCH,), device="cpu").to("lazygt")
        if layout.cut:
            x, y = (lazygt.distribute(t, {"ranks": Shard(0)}) for t in (x, y))
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        told.append(torch.tensor(around(loss.item), device="cpu"))
        loss.backward()
        opt.step()
        norm = sum(p.detach().square().sum() for p in model.parameters())
        told.append(torch.tensor(around(norm.item), device="cpu"))
        if compiles:  # swapped in at the same step of each run
            large = chaotic(large)
            session.flush()
            assert around(session.compiled)
        if step % 4 == 1:  # large values go through shared memory, both ways
            large = large + torch.randn(100_000, device="cpu").to("lazygt")
            told.append(around(large.cpu))
        if step % 4 == 3:  # shapes that depend on values
            told.append(around(large[large > 0].cpu).sum())
    state = [v for each in opt.state.values() for v in each.values()]
    return digest([*told, *model.parameters(), *state, torch.get_rng_state()])


class Leftovers:
    """What a process has of what may be left behind."""

    def __init__(self) -> None:
        me = psutil.Process()
        self.files = {}
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of this listing
                self.files[fd] = os.readlink(f"/proc/self/fd/{fd}")
        self.mebibytes = me.memory_info().rss >> 20
        self.children = {child.pid for child in me.children()}
        self.threads = threading.active_count()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="fully sharded")
    parser.add_argument("--workers", type=int, default=0, help="0: the layout's")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--steps", type=int, default=0, help="0: so many that all fit")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--compile", choices=("off", "now", "auto"), default="off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anew", action="store_true", help="start processes as users do")
    given = parser.parse_args()
    if not given.anew:
        subprocess.Popen = forking.Forked  # type: ignore[misc]
        forking.template()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    recover._LEAST_SECONDS = 0.2  # snapshots are taken, and often
    # a compile process at idle priority never ends on a busy machine
    compiler.leave_only_spare_time = lambda pid: None
    # compiled code is swapped in even where this machine gains nothing by it
    Record.saved = lambda record, numel: 1.0  # type: ignore[method-assign]
    layout = LAYOUTS[given.layout]
    settings = {**layout.settings, "compile": given.compile}
    if given.workers:
        settings["mesh"] = dict.fromkeys(settings["mesh"], given.workers)
    steps = given.steps or max(given.kills * 2 // 5, 4)
    for _ in range(1 if given.compile == "off" else 2):  # the first one fills the compiler's cache
        with lazygt.session(**grouped(settings)) as session:
            expected = train(session, layout, steps, lambda wait: wait())
    before = Leftovers()
    more = {"spares": given.spares, "frozen_after": FROZEN}
    with lazygt.session(**grouped({**settings, **more})) as session:
        waits = steps * 5 // 2 + steps * (given.compile != "off") - 2  # a few for the last kills
        killer = Killer(session, given.kills, waits, given.seed)
        actual = train(session, layout, steps, killer.around)
        swapped = sum(bool(entry.swap) for entry in session.entries())
        within = Leftovers()
    after = Leftovers()
    assert actual == expected, "other bits"
    left = after.children - before.children
    assert not left, [psutil.Process(pid).cmdline() for pid in left]
    new = {fd: name for fd, name in after.files.items() if before.files.get(fd) != name}
    assert len(after.files) <= len(before.files), new
    assert after.threads == before.threads, threading.enumerate()
    slowest = max((each.seconds for each in session.recoveries), default=0.0)
    print(json.dumps({
        "kills": sum(killer.seen.values()), "by kind": killer.seen,
        "recoveries": len(session.recoveries),
        "plans on compiled code": swapped,
        "runs again": sum(each.runs for each in session.recoveries),
        "slowest": round(slowest, 2), "steps": steps,
        "descriptors": [len(each.files) for each in (before, within, after)],
        "MiB": [before.mebibytes, after.mebibytes], "pid": os.getpid(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
