"""A program that is killed again and again, and goes on from its checkpoints each time.

    python -m tests.recovery.killed_client --kills 50 --layout "one worker"

The program is killed at random moments, in the middle of a checkpoint's file, and while the disk is
full (a small tmpfs, where this user may mount one). Weights, the optimizer's state and the
generator at the end must have the bits of a run that nobody killed. Prints counts as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import lazygt
from lazygt.recovery.checkpoint.checkpoint_file import CheckpointFolder
from lazygt.settings import grouped
from tests.recovery.programs import BATCH, LAYOUTS, MLP, WIDTH, digest
from tests.support import forking

#: Steps that a run does at most before its death.
_MOST = 6
#: Bytes of the file system that becomes full: some checkpoints of the model.
_DISK_BYTES = 4 << 20
_BALLAST = "ballast"


def train(name: str, steps: int, folder: Path | None, dies: Dies | None = None) -> str:
    """Train from the folder's last checkpoint to the end; the state there as SHA-256."""
    layout = LAYOUTS[name]
    settings: dict[str, Any] = {} if folder is None else {
        "checkpoint": folder, "checkpoint_every": 1,
    }  # fmt: skip
    torch.manual_seed(3)
    with lazygt.session(**grouped({**layout.settings, **settings})) as session:
        model = MLP()
        layout.lay(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session.register(model=model, optimizer=optimizer)
        begin = session.resume().step
        if dies is not None:
            dies.after(begin)
        for step in range(begin, steps):
            x = torch.randn(BATCH, WIDTH, device="cpu").to("lazygt")
            y = torch.randint(0, WIDTH, (BATCH,), device="cpu").to("lazygt")
            if layout.cut:
                x, y = (lazygt.distribute(t, {"ranks": Shard(0)}) for t in (x, y))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            session.checkpoint(step + 1, now=dies is not None and dies.in_file(step))
            if dies is not None:
                dies.step(step)
        state = [v for each in optimizer.state.values() for v in each.values()]
        return digest([*model.parameters(), *state, torch.get_rng_state()])


class Dies:
    """The death of this process: at a random moment, inside a file, or on a full disk."""

    def __init__(self, how: str, folder: Path, seed: int) -> None:
        self._how, self._folder = how, folder
        self._draw = random.Random(seed)
        self._last = 0
        if how == "writing":
            CheckpointFolder.write = self._writing(CheckpointFolder.write)  # type: ignore[method-assign]

    def after(self, begin: int) -> None:
        """Choose the step after which it ends."""
        self._last = begin + self._draw.randint(1, _MOST)
        if self._how == "full":
            fill(self._folder)

    def step(self, step: int) -> None:
        """Go on, or end soon."""
        if self._how == "full" and step == self._last - 1:
            (self._folder / _BALLAST).unlink()
        if self._how != "writing" and step == self._last:
            delay = self._draw.uniform(0, 0.05)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if self._how != "writing" and step > self._last:
            signal.pause()  # a fast machine would use up the steps of the lives to come

    def in_file(self, step: int) -> bool:
        """Whether it is to end in the file of this step, which is waited for."""
        return self._how == "writing" and step >= self._last

    def _writing(self, write: Any) -> Any:
        def dying(
            folder: CheckpointFolder, about: Mapping[str, Any], sections: Iterable[memoryview]
        ) -> Path:
            last = about["step"] > self._last
            return write(folder, about, self._cut(sections) if last else sections)

        return dying

    def _cut(self, sections: Iterable[memoryview]) -> Iterator[memoryview]:
        kept = self._draw.randint(0, 12)
        for number, section in enumerate(sections):
            if number == kept:
                os.kill(os.getpid(), signal.SIGKILL)
            yield section


def fill(folder: Path) -> None:
    """Take all room that is left on the folder's disk."""
    room = os.statvfs(folder)
    with (folder / _BALLAST).open("wb") as file:
        file.write(bytes(room.f_bavail * room.f_bsize))


def child(given: argparse.Namespace) -> None:
    """One life of the program; prints its end if it comes to that."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of a full disk
    torch.set_num_threads(1)
    folder = Path(given.folder)
    (folder / _BALLAST).unlink(missing_ok=True)
    dies = Dies(given.how, folder, given.seed) if given.how else None
    print(train(given.layout, given.steps, folder, dies), flush=True)


def live(given: argparse.Namespace, folder: Path, how: str, seed: int) -> tuple[int, str]:
    """Start the program; its exit status and what it printed."""
    command = [sys.executable, "-m", "tests.recovery.killed_client", "--child"]
    command += [f"--folder={folder}", f"--layout={given.layout}", f"--steps={given.steps}"]
    command += [f"--how={how}", f"--seed={seed}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=forking.ROOT)
    told, _ = process.communicate(timeout=300)
    return process.returncode, told


def deaths(given: argparse.Namespace, folder: Path, full: bool) -> tuple[Counter[str], str]:
    """Lives that end by SIGKILL, and one that comes to the end."""
    draw, seen = random.Random(given.seed), Counter[str]()
    kinds = ("running", "writing", "full") if full else ("running", "writing")
    while sum(seen.values()) < given.kills:
        how = draw.choice(kinds)
        status, told = live(given, folder, how, draw.getrandbits(30))
        assert status == -signal.SIGKILL, (status, how, told, dict(seen))
        seen[how] += 1
    status, told = live(given, folder, "", 0)
    assert status == 0, (status, told)
    return seen, told.strip()


def parent(given: argparse.Namespace) -> None:
    subprocess.Popen = forking.Forked  # type: ignore[misc]
    forking.template()
    expected = train(given.layout, given.steps, None)
    folder = Path(tempfile.mkdtemp(prefix="lazygt-killed-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "lazygt", str(folder)]
    full = os.getuid() == 0 and not os.spawnvp(os.P_WAIT, mount[0], mount)
    begin = time.monotonic()
    try:
        seen, told = deaths(given, folder, full)
    finally:
        if full:
            os.spawnvp(os.P_WAIT, "umount", ["umount", str(folder)])
        shutil.rmtree(folder)
    assert told == expected, "other bits"
    seconds = round(time.monotonic() - begin)
    print(json.dumps({"kills": sum(seen.values()), "by kind": seen, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="one worker")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=0, help="0: more than all lives can do")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--folder", default="")
    parser.add_argument("--how", default="")
    given = parser.parse_args()
    given.steps = given.steps or given.kills * (_MOST + 2) + 1
    torch.set_num_threads(1)
    (child if given.child else parent)(given)


if __name__ == "__main__":
    main()
