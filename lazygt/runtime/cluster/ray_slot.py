"""Ray actor that only starts and ends a process of lazygt.

Ray loads this class by its name, so lazygt must be installed on its nodes; the actor exchanges only
texts.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from typing import Any

from lazygt.runtime.launch.local import same_package

HOST_PROCESS = "lazygt.runtime.cluster.host_process"


class RaySlot:
    """Actor of a bundle with resources for one worker; one slot of each node starts the agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def where(self, node: str) -> tuple[str, str, list[str]]:
        """Return the node's id and name, and the GPUs of this bundle.

        Args:
            node: the id, if the caller knows it, else "".
        """
        ray: Any = importlib.import_module("ray")
        context: Any = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return node or str(context.get_node_id()), socket.gethostname(), gpus

    def start(self, gpus: list[str]) -> str:
        """Start the agent with these GPUs; return its public key."""
        environment = {**os.environ, **same_package()}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", HOST_PROCESS],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._read_line()

    def join(self, request: str) -> str:
        """Let the agent join a session; return "" or the error."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._read_line()

    def _read_line(self) -> str:
        """Return the next line of the agent's output; RuntimeError if the agent has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise RuntimeError(f"the agent has ended with exit code {self._process.wait()}")
        return line[:-1]
