"""Numbers on their way to the client, as the extension writes and reads them."""

from __future__ import annotations

from typing import Any

import torch

from lazygt import native
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.messages import Done
from lazygt.runtime.wire import NUMBERS, pack


def packed_metas() -> dict[torch.dtype, bytes]:
    """Return the encoded meta of a single number, by dtype."""
    return {dtype: pack(TensorMeta((), (), dtype)) for dtype in NUMBERS}


def number_reader() -> Any:
    """Return the extension's reader of single numbers; None without the extension.

    Its ``number(frames, run)`` returns a run's number, or None if the frames hold anything else.
    """
    module = native.load().module
    if module is None:
        return None
    return module.Answers(packed_metas(), Done.__struct_config__.tag)
