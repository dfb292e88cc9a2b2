"""The compile process, run as a module: ``compile_process CLIENT_PID CACHE``.

Takes requests on its standard input, a line of JSON each, and answers each on its standard output.
It runs on one thread, at the idle priority that its client gives it. It ends with its client: when
the pipe is closed or the client is gone, it kills its own process group.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
from typing import TypedDict

import msgspec


class CompileRequest(TypedDict):
    """Request to compile a group; see ``KernelGroup``."""

    key: str  # of the artifact
    body: bytes  # the group's body and flags; see ``graph_codec.encode_graph``
    writes: tuple[tuple[int, int], ...]
    fresh: int
    flat: bool
    dynamic_dims: tuple[tuple[int, ...], ...]
    lanes: int
    device: str


class CompileAnswer(TypedDict):
    """Outcome of a request."""

    key: str
    error: str  # empty: the artifact lies in the cache


def main() -> None:
    """Serve until the client goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of compilers is no answer
    requests: queue.SimpleQueue[CompileRequest] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, int(sys.argv[1])), daemon=True).start()
    # why: it loads torch, which takes long at this priority, and the client may end meanwhile
    from lazygt.runtime.compiling import service

    answer = service.begin(sys.argv[2])
    while True:
        answers.write(msgspec.json.encode(answer(requests.get())) + b"\n")


def _listen(requests: queue.SimpleQueue[CompileRequest], client: int) -> None:
    """Pass requests on; end the process group when the client closes the pipe or is gone."""
    rest = b""
    try:
        watch = select.poll()
        watch.register(0, select.POLLIN | select.POLLHUP)
        watch.register(os.pidfd_open(client), select.POLLIN)
        while True:
            ready = {fd for fd, _ in watch.poll()}
            data = os.read(0, 1 << 20) if ready == {0} else b""
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                requests.put(msgspec.json.decode(line, type=CompileRequest))
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
