"""The error for a CPU tensor among lazy ones: it gives the line to write."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.ops import OpFacts
from lazygt.graph.source import expand, is_library, user_call_site


def mixed_error(t: torch.Tensor, f: OpFacts) -> RuntimeError:
    """What is raised where torch's own error for tensors of two devices would be."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"lazygt:0 and {t.device}! {f.name} got a {TensorMeta.of(t)} on {t.device}; "
        f"move it with .to('lazygt'): {_advice(t)}"
    )


def _advice(t: torch.Tensor) -> str:
    here = expand(user_call_site(1))
    source = t if t._base is None else t._base
    if source.is_leaf and (source.requires_grad or isinstance(source, torch.nn.Parameter)):
        return f"it is a model's weight. Before {here}, write\n    model.to('lazygt')"
    name, place = _name_of(source) or _name_of(t) or ("x", here)
    return (
        f"what torch.from_numpy or a DataLoader's worker process makes is on the CPU. Before "
        f"{place}, write\n    {name} = {name}.to('lazygt')"
    )


def _name_of(t: torch.Tensor) -> tuple[str, str] | None:
    """What the outermost of the user's functions that has the tensor calls it, and its line."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            names = [name for name, value in frame.f_locals.items() if value is t]
            found = (names[0], expand((frame.f_code, frame.f_lasti))) if names else found
        frame = frame.f_back
    return found
