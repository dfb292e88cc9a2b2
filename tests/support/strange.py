"""Processes that differ from ours: of another version, or with another clock."""

from __future__ import annotations

import os
from pathlib import Path

OTHER_LAZYGT = """
import lazygt.config
lazygt.config.VERSION = "0.0.1"
"""
OTHER_TORCH = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.0.99")
"""
#: The time of day is an hour later there.
LATER = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + 3600.0
time.time_ns = lambda: _time_ns() + 3600 * 10**9
"""
#: Before a command: the machine has been up an hour longer there. Needs root.
UP_LONGER = ["unshare", "--fork", "--time", "--monotonic", "3600", "--boottime", "3600"]


def strange(folder: Path, what: str) -> dict[str, str]:
    """Variables with which a Python process begins by doing ``what``.

    Args:
        folder: an empty one, for the file that says it.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(what)
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), root, before)))}
