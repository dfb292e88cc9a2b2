"""Numbers on their way to the client as the extension writes and reads them."""

from __future__ import annotations

from typing import Any

import torch

from lazygt import native
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.messages import Done
from lazygt.runtime.wire import NUMBERS, pack


def packed_metas() -> dict[torch.dtype, bytes]:
    """What the meta of a single number is on the wire, by its dtype."""
    return {dtype: pack(TensorMeta((), (), dtype)) for dtype in NUMBERS}


def number_reader() -> Any:
    """Whose ``number(frames, run)`` is a run's number, or None where these are not just that; None:
    there is no extension."""
    module = native.load().module
    if module is None:
        return None
    return module.Answers(packed_metas(), Done.__struct_config__.tag)
