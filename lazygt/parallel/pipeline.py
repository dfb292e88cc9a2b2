"""Pipeline stages: consecutive layers of a model on consecutive ranks of a mesh axis.

    lazygt.stage(model.blocks[0:4], 0)
    lazygt.stage(model.blocks[4:8], 1)
    for micro in batch.chunk(8):
        (criterion(model(micro)) / 8).backward()
    opt.step()

The ops between two updates are one program, so the stages work on different microbatches at the
same time, in 1F1B order. The numbers are those of one device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import _C, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lazygt.graph.mesh import Mesh
from lazygt.parallel.distribute import drop_hooks, shardable_parameter, without_offset
from lazygt.passes.sharding.marks import ENTER, LEAVE
from lazygt.record.annotate import assign_stage, is_everywhere, mesh_of, record_mark
from lazygt.record.tensor import LazyTensor, Owner, is_lazy, meta_of, storage_of
from lazygt.session import current


@dataclass(frozen=True)
class _Stages:
    """Stages of a session's modules, parameters and buffers; a tensor stays on its first stage.

    Attributes:
        modules: nn.Module -> stage.
        tensors: LazyTensor -> stage.
    """

    modules: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)
    tensors: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


_stages_of: WeakKeyDictionary[Owner, _Stages] = WeakKeyDictionary()


def stage(what: Any, index: int, mesh_dim: str = "pipe") -> Any:
    """Put modules on a stage: one rank of a mesh axis stores and computes them.

    Parameters and buffers move there and stay the same objects; a parameter of an earlier stage
    stays there, and both stages share it (a tied head). A module's inputs enter the stage, and
    values computed from them belong to the stage, until a value enters another. For code without
    modules a single tensor can enter a stage: use the returned tensor. Copies of a module are on
    its stage too. In a later session the module keeps its stage if the mesh has it, unless the
    module is put on another stage there.

    Args:
        what: a module, several of them, or a lazygt tensor.
        index: the stage, from 0.
        mesh_dim: the axis.

    Returns:
        ``what``; of a tensor the same values on the stage.

    Raises:
        ValueError: the mesh has no such axis, the axis no such stage, a module (or one inside it)
            is on a stage already, or has a parameter on another device, or one that is a view.
        TypeError: ``what`` is none of these.
    """
    session = current()
    _check_stage(session.mesh, index, mesh_dim)
    if isinstance(what, torch.Tensor):
        if not is_lazy(what):
            raise TypeError(
                f"stage() takes modules and lazygt tensors, not a tensor on {what.device}; "
                f"move it with .to('lazygt')"
            )
        return _enter(what, index, mesh_dim)
    modules = [what] if isinstance(what, nn.Module) else _as_modules(what)
    stages = _stages_of.setdefault(session.recorder, _Stages())
    for module in modules:
        _check_module(module, stages)
    for module in modules:
        stages.modules.update(dict.fromkeys(module.modules(), index))
        for inner in module.modules():
            drop_hooks(inner, _EntryHook)
        _mark_inputs(module, _EntryHook(index, mesh_dim))
    for t in [t for module in modules for t in _tensors_of(module)]:
        if t not in stages.tensors:
            stages.tensors[t] = index
            assign_stage(t, index, mesh_dim)
    return what


def _check_stage(mesh: Mesh, index: int, mesh_dim: str) -> None:
    """Raise ValueError for a stage that the axis does not have."""
    size = mesh.size(mesh_dim)
    if type(index) is not int or not 0 <= index < size:
        raise ValueError(
            f"stage {index!r}: axis {mesh_dim!r} of the mesh {mesh} has stages 0 to {size - 1}"
        )


def _as_modules(target: Any) -> list[nn.Module]:
    """Return the modules of an argument of ``stage``."""
    modules = list(target) if isinstance(target, Iterable) else [target]
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"stage() takes modules and lazygt tensors, not {module!r}")
    return modules


def _check_module(module: nn.Module, stages: _Stages) -> None:
    """Raise ValueError for a module that can't be put on a stage."""
    for name, inner in module.named_modules():
        if inner in stages.modules:
            path = f"{type(module).__name__}{'.' * bool(name)}{name}"
            raise ValueError(
                f"{path} is on stage {stages.modules[inner]} already; stage a module once"
            )
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        shardable_parameter(name, t)


def _tensors_of(module: nn.Module) -> list[LazyTensor]:
    """Return the parameters and buffers of a module."""
    return [
        t for t in (*module.parameters(), *module.buffers()) if is_lazy(t)
    ]  # fmt: skip


def _mark_inputs(module: nn.Module, entry: _EntryHook) -> None:
    """Register the entry hook; on each layer of a list, which is never called itself."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        for layer in module:
            _mark_inputs(layer, entry)
    else:
        module.register_forward_pre_hook(entry, with_kwargs=True)


@dataclass(frozen=True)
class _EntryHook:
    """Forward pre-hook of a module on a stage: inputs and parameters enter the stage."""

    index: int
    mesh_dim: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        for t in _tensors_of(module):
            if is_everywhere(t) and self._owns(t):
                assign_stage(t, self.index, self.mesh_dim)
        return tree_map_only(is_lazy, self._enter, (args, kwargs))

    def _owns(self, t: LazyTensor) -> bool:
        """Return whether a tensor belongs to this stage, rather than to one that shares it."""
        stages = _stages_of.get(storage_of(t).owner)
        first_stage = self.index if stages is None else stages.tensors.get(t, self.index)
        return self._exists_for(t) and first_stage == self.index

    def _exists_for(self, t: LazyTensor) -> bool:
        """Return whether the tensor's session has this stage."""
        mesh = mesh_of(t)
        return self.mesh_dim in mesh.names and self.index < mesh.size(self.mesh_dim)

    def _enter(self, t: LazyTensor) -> LazyTensor:
        """Return a tensor on the stage; unchanged in a session without the stage."""
        return _enter(t, self.index, self.mesh_dim) if self._exists_for(t) else t


def _enter(t: LazyTensor, index: int, mesh_dim: str) -> LazyTensor:
    """Return a tensor's values, moved to a stage; differentiable."""
    entered: LazyTensor = _EnterStage.apply(t, index, mesh_dim)  # type: ignore[no-untyped-call]
    return entered


class _EnterStage(torch.autograd.Function):
    """Identity that marks a stage entry; backward moves the gradient back.

    An entry during a backward pass is a checkpoint's recomputation and begins no microbatch.
    """

    @staticmethod
    def forward(ctx: Any, t: LazyTensor, index: int, mesh_dim: str) -> LazyTensor:
        ctx.save_for_backward(t)
        ctx.mesh_dim = mesh_dim
        is_in_backward = _C._current_graph_task_id() != -1
        recomputes = (True,) if is_in_backward else ()
        return _record_mark(ENTER, (t,), (index, mesh_dim, *recomputes))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (t,) = ctx.saved_tensors
        return _leave(grads[0], t, ctx.mesh_dim), None, None


def _leave(gradient: torch.Tensor, t: torch.Tensor, mesh_dim: str) -> LazyTensor:
    """Return a gradient, moved to the tensor's stage."""
    left: LazyTensor = _LeaveStage.apply(gradient, t, mesh_dim)  # type: ignore[no-untyped-call]
    return left


class _LeaveStage(torch.autograd.Function):
    """Identity that marks a stage exit, differentiable for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, gradient: LazyTensor, t: LazyTensor, mesh_dim: str) -> LazyTensor:
        ctx.save_for_backward(gradient)
        ctx.mesh_dim = mesh_dim
        return _record_mark(LEAVE, (gradient, t), (mesh_dim,))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return _leave(grads[0], gradient, ctx.mesh_dim), None, None


def _record_mark(
    op: str, operands: tuple[LazyTensor, ...], arguments: tuple[int | str, ...]
) -> LazyTensor:
    """Record a stage mark; return a tensor with the first operand's values."""
    owner, meta = storage_of(operands[0]).owner, without_offset(meta_of(operands[0]))
    with owner.lock:
        return owner.show(record_mark(op, operands, arguments, meta), meta)
