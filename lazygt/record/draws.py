"""Draws through a user's own generator: in the client, by the CPU's kernels, and uploaded.

Such a generator is an object of this process that other code may draw from, set and read at any
time, so its stream stays here. Operands that an op reads are fetched, which is a sync point; ops
that only fill a tensor (``normal_``, ``randperm``) read none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from lazygt.graph.meta import TensorMeta
from lazygt.graph.ops import OpFacts
from lazygt.record.copies import host_copy
from lazygt.record.host_values import to_lazy
from lazygt.record.rng import host_generator
from lazygt.record.tensor import LazyTensor, is_lazy
from lazygt.record.trace import written_tensors
from lazygt.record.views import resize

if TYPE_CHECKING:
    from lazygt.record.handlers import OpRecorder

aten: Any = torch.ops.aten
#: Ops that read only the shape of their first operand.
_SHAPED = ("aten.rand_like", "aten.randn_like", "aten.randint_like")


def draw_in_client(
    recorder: OpRecorder, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a random op on CPU tensors, and record its results as uploads."""
    written = {id(t) for t in written_tensors(f, args, kwargs)}
    shaped = f.name.startswith(_SHAPED)
    twins: dict[int, tuple[torch.Tensor, LazyTensor]] = {}  # id of a twin -> (twin, lazy tensor)

    def host(a: Any) -> Any:
        if isinstance(a, torch.Generator):
            return host_generator(a)
        if not is_lazy(a):
            return a
        if id(a) not in written and not shaped:
            return host_copy(a)
        twin = TensorMeta.of(a).empty("cpu")
        if id(a) in written:
            twins[id(twin)] = twin, a
        return twin

    def lazy(result: Any) -> Any:
        if id(result) in twins:
            return twins[id(result)][1]
        return to_lazy(recorder, result) if isinstance(result, torch.Tensor) else result

    host_args, host_kwargs = tree_map(host, (args, kwargs))
    results = f.func(*host_args, **host_kwargs)
    for twin, target in twins.values():
        if twin.shape != target.shape:
            resize(target, TensorMeta.of(twin))
        recorder.record(aten.copy_.default, (target, twin), {})
    return tree_map(lazy, results)
