"""Agent process started for one session: ``python -m`` this module.

The process writes its public key to standard output, reads a line of JSON with the client's
endpoint from standard input, and writes an empty line or an error. Only public keys are exchanged
that way. The end of standard input ends the process, and with it all workers here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

import zmq

from lazygt.errors import LazyGTError
from lazygt.net.channel import Keys
from lazygt.net.connection import dial
from lazygt.runtime.cluster.agent import Agent
from lazygt.runtime.cluster.attach import address_towards, host_id


def main() -> None:
    """Connect to the client, and serve it as the agent of this host."""
    keys = Keys.generate()
    _write_line(keys.public)
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    hello = json.dumps({"rank": request["rank"], "name": socket.gethostname()}).encode()
    try:
        connection = dial(
            zmq.Context.instance(),
            request["endpoint"],
            keys,
            request["public"],
            hello,
            request["max_message"],
            request["seconds"],
        )
    except LazyGTError as error:
        _write_line(f"{type(error).__name__}: {error}".replace("\n", " "))
        raise SystemExit(1) from error
    _write_line("")
    address = address_towards(request["endpoint"])
    Agent(connection, lambda spec: replace(spec, host=host_id(), address=address), address).serve()


def _write_line(line: str) -> None:
    """Write a line to standard output, and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    """End the process at the end of standard input; runs on a thread of its own."""
    sys.stdin.buffer.read()
    os._exit(1)  # the workers end with their pipes


if __name__ == "__main__":
    main()
