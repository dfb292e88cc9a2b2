"""Pipeline stages: consecutive layers of a model on consecutive ranks of a mesh axis.

    lazygt.stage(model.blocks[0:4], 0)
    lazygt.stage(model.blocks[4:8], 1)
    for micro in batch.chunk(8):
        (criterion(model(micro)) / 8).backward()
    opt.step()

The ops from one update to the next are one program, so the stages work on different microbatches
at the same time, in the 1F1B order. The numbers are those of one device.
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
from lazygt.parallel.distribute import drop_hooks, fresh_meta, own_parameter
from lazygt.passes.sharding.marks import ENTER, LEAVE
from lazygt.record.annotate import assign_stage, is_everywhere, mesh_of, record_mark
from lazygt.record.tensor import LazyTensor, Owner, is_lazy, meta_of, storage_of
from lazygt.session import current


@dataclass(frozen=True)
class _Given:
    """Stages of a session: the first stage that each module, parameter and buffer was put on.

    Attributes:
        modules: nn.Module -> stage.
        tensors: LazyTensor -> stage.
    """

    modules: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)
    tensors: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


_given: WeakKeyDictionary[Owner, _Given] = WeakKeyDictionary()


def stage(what: Any, index: int, mesh_dim: str = "pipe") -> Any:
    """Put modules on a stage: one rank of a mesh axis stores and computes them.

    Parameters and buffers move there and stay the same objects; one that an earlier stage has stays
    there, and the two share it (a tied head). A module's inputs enter the stage, and values
    computed from them belong to the stage, until a value enters another. A tensor can be put on a
    stage by itself, for code without modules: use the returned tensor. Copies of a module are on
    its stage too, and so is the module in a later session with a mesh that has the stage, unless it
    is put on another one there.

    Args:
        what: a module, several of them, or a lazygt tensor.
        index: the stage, from 0.
        mesh_dim: the axis.

    Returns:
        ``what``; of a tensor the same values on the stage.

    Raises:
        ValueError: the mesh has no such axis, the axis no such stage, a module (or one inside it)
            is on a stage already, or has a parameter that is no lazygt tensor of its own.
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
    modules = [what] if isinstance(what, nn.Module) else _listed(what)
    given = _given.setdefault(session.recorder, _Given())
    for module in modules:
        _check_module(module, given)
    for module in modules:
        given.modules.update(dict.fromkeys(module.modules(), index))
        for inner in module.modules():
            drop_hooks(inner, _Entry)
        _mark_inputs(module, _Entry(index, mesh_dim))
    for t in [t for module in modules for t in _own(module)]:
        if t not in given.tensors:
            given.tensors[t] = index
            assign_stage(t, index, mesh_dim)
    return what


def _check_stage(mesh: Mesh, index: int, mesh_dim: str) -> None:
    size = mesh.size(mesh_dim)
    if type(index) is not int or not 0 <= index < size:
        raise ValueError(
            f"stage {index!r}: axis {mesh_dim!r} of the mesh {mesh} has stages 0 to {size - 1}"
        )


def _listed(what: Any) -> list[nn.Module]:
    modules = list(what) if isinstance(what, Iterable) else [what]
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"stage() takes modules and lazygt tensors, not {module!r}")
    return modules


def _check_module(module: nn.Module, given: _Given) -> None:
    """Raise ValueError for a module that can't be put on a stage."""
    for name, inner in module.named_modules():
        if inner in given.modules:
            what = f"{type(module).__name__}{'.' * bool(name)}{name}"
            raise ValueError(
                f"{what} is on stage {given.modules[inner]} already; stage a module once"
            )
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        own_parameter(name, t)


def _own(module: nn.Module) -> list[LazyTensor]:
    """Return the parameters and buffers of a module."""
    return [
        t for t in (*module.parameters(), *module.buffers()) if is_lazy(t)
    ]  # fmt: skip


def _mark_inputs(module: nn.Module, entry: _Entry) -> None:
    """Register the entry hook; for a list of layers on each, since the list is never called."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        for layer in module:
            _mark_inputs(layer, entry)
    else:
        module.register_forward_pre_hook(entry, with_kwargs=True)


@dataclass(frozen=True)
class _Entry:
    """Forward pre-hook of a module on a stage: inputs enter it, and parameters lie there."""

    index: int
    mesh_dim: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        for t in _own(module):
            if is_everywhere(t) and self._has(t):
                assign_stage(t, self.index, self.mesh_dim)
        return tree_map_only(is_lazy, self._enter, (args, kwargs))

    def _has(self, t: LazyTensor) -> bool:
        """Return whether a tensor of the module belongs to this stage, not to one sharing it."""
        given = _given.get(storage_of(t).owner)
        first = self.index if given is None else given.tensors.get(t, self.index)
        return self._is_known(t) and first == self.index

    def _is_known(self, t: LazyTensor) -> bool:
        """Return whether the tensor's session has this stage."""
        mesh = mesh_of(t)
        return self.mesh_dim in mesh.names and self.index < mesh.size(self.mesh_dim)

    def _enter(self, t: LazyTensor) -> Any:
        return _enter(t, self.index, self.mesh_dim) if self._is_known(t) else t


def _enter(t: LazyTensor, index: int, mesh_dim: str) -> Any:
    return _Enter.apply(t, index, mesh_dim)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """Stage entry as autograd sees it: the identity. Its gradient leaves the stage again.

    An entry inside a backward pass is a checkpoint's recomputation: no microbatch begins.
    """

    @staticmethod
    def forward(ctx: Any, t: LazyTensor, index: int, mesh_dim: str) -> LazyTensor:
        ctx.save_for_backward(t)
        ctx.mesh_dim = mesh_dim
        again = (True,) if _C._current_graph_task_id() != -1 else ()
        return _shown(ENTER, (t,), (index, mesh_dim, *again))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (t,) = ctx.saved_tensors
        return _leave(grads[0], t, ctx.mesh_dim), None, None


def _leave(gradient: torch.Tensor, t: torch.Tensor, mesh_dim: str) -> Any:
    """Return a gradient, moved to the tensor's stage."""
    return _Leave.apply(gradient, t, mesh_dim)  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    """Stage exit as autograd sees it, for gradients of gradients: the identity as well."""

    @staticmethod
    def forward(ctx: Any, gradient: LazyTensor, t: LazyTensor, mesh_dim: str) -> LazyTensor:
        ctx.save_for_backward(gradient)
        ctx.mesh_dim = mesh_dim
        return _shown(LEAVE, (gradient, t), (mesh_dim,))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return _leave(grads[0], gradient, ctx.mesh_dim), None, None


def _shown(op: str, operands: tuple[LazyTensor, ...], rest: tuple[int | str, ...]) -> LazyTensor:
    owner, meta = storage_of(operands[0]).owner, fresh_meta(meta_of(operands[0]))
    with owner.lock:
        return owner.show(record_mark(op, operands, rest, meta), meta)
