"""A pool in a process of its own, as ``lazygt serve`` starts it, and keys for its clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lazygt.net.keys import KeyFile, Keyring
from lazygt.pool.pool_client import Pool, answer, connect
from lazygt.pool.requests import Admitted, Ask, Waits
from lazygt.runtime.wire import encode

SECONDS = 120.0


class Served:
    """A pool that serves."""

    def __init__(self, folder: Path, *options: str, start_new_session: bool = False) -> None:
        self.folder = folder
        self.ring = Keyring(folder / "keys")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lazygt.cli", "serve", "--keys", str(folder / "keys"),
             "--bind", "tcp://127.0.0.1:0", "--device", "cpu", *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "LAZYGT_CACHE_DIR": str(folder / "cache")},
            start_new_session=start_new_session,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        match = re.search(r"tcp://[\d.]+:\d+", self.said)
        assert match is not None, self.said + self.process.stdout.read()
        self.on = match[0]

    def key(self, name: str) -> Path:
        """The key file of a client of that name, which is new if there was none."""
        path = self.folder / f"{name}.key"
        if not path.exists():
            self.ring.new(name, self.on).write(path)
        return path

    @property
    def server(self) -> KeyFile:
        return self.ring.own(self.on)

    def status(self) -> dict:
        with Pool(self.on, self.server, SECONDS) as pool:
            return pool.status()

    def sessions(self, client: str) -> list[dict]:
        return [row for row in self.status()["sessions"] if row["client"] == client]

    def until(self, holds, seconds: float = SECONDS) -> float:
        """Wait until the status is so; how long that took."""
        begin = time.monotonic()
        while not holds(status := self.status()):
            assert time.monotonic() - begin < seconds, status
            time.sleep(0.02)
        return time.monotonic() - begin

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def served(folder: Path, *options: str, **how: bool) -> Iterator[Served]:
    pool = Served(folder, *options, **how)
    try:
        yield pool
    finally:
        pool.close()


class Asker:
    """A client that asks for a session, and starts no workers there."""

    def __init__(self, pool: Served, name: str, workers: int = 1, detach: bool = False) -> None:
        self.connection = connect(pool.on, pool.key(name), SECONDS)
        self.connection.send(encode(Ask(workers, workers, 0.0, detach)))

    def told(self):
        message, _ = answer(self.connection, (Admitted, Waits), time.monotonic() + SECONDS)
        return message

    def close(self) -> None:
        self.connection.close()


def start_client(
    program: str, *arguments: Sequence[str], stdin: int | None = None
) -> subprocess.Popen:
    """Another process that runs a program; its output can be read line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
