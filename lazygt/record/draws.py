"""Random ops with a user's generator: run on the client's CPU, and uploaded.

The generator is an object of this process that other code may draw from, set and read at any time,
so its stream stays here. Operands that an op reads are fetched, which is a sync point; ops that
only fill a tensor (``normal_``, ``randperm``) read none.
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
    """Run a random op on CPU copies of its operands, and record its results as uploads."""
    written = {id(t) for t in written_tensors(f, args, kwargs)}
    reads_shape_only = f.name.startswith(_SHAPED)
    #: id of a written CPU tensor -> (the CPU tensor, the lazy tensor)
    results_by_id: dict[int, tuple[torch.Tensor, LazyTensor]] = {}

    def to_host(a: Any) -> Any:
        """Return a CPU tensor for a lazy argument: its values, or uninitialised."""
        if isinstance(a, torch.Generator):
            return host_generator(a)
        if not is_lazy(a):
            return a
        if id(a) not in written and not reads_shape_only:
            return host_copy(a)
        host_tensor = TensorMeta.of(a).empty("cpu")
        if id(a) in written:
            results_by_id[id(host_tensor)] = host_tensor, a
        return host_tensor

    def to_user(result: Any) -> Any:
        """Return the user's tensor for a CPU result."""
        if id(result) in results_by_id:
            return results_by_id[id(result)][1]
        return to_lazy(recorder, result) if isinstance(result, torch.Tensor) else result

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    results = f.func(*host_args, **host_kwargs)
    for host_tensor, target in results_by_id.values():
        if host_tensor.shape != target.shape:
            resize(target, TensorMeta.of(host_tensor))
        recorder.record(aten.copy_.default, (target, host_tensor), {})
    return tree_map(to_user, results)
