"""``lazygt.apply``: plain Python functions run on the workers' tensors, as one op of the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lazygt.graph.flags import Flags
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.ops import CustomOp, undispatched
from lazygt.graph.shapes.meta_run import fake_tensors
from lazygt.record.context import recorder
from lazygt.record.custom.definitions import known_op
from lazygt.record.custom.pickling import Fingerprint, bundle
from lazygt.record.host_values import upload_operand
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, meta_of
from lazygt.runtime.custom_ops import Definition, code_name
from lazygt.runtime.executors.custom_functions import Gradient, Operand, PlainFunction, structure_of

#: Schema of a function's op. With ``with_structure``, where the client could not infer it, the
#: result has all leaves, also those that are no tensors, and then the pytree's spec as text.
_SCHEMA = "(Tensor[] operands, bool with_structure) -> Tensor[]"
#: Number of functions, and of signatures of one function, that are remembered.
_FUNCTIONS = _SIGNATURES = 1_000

Metas = tuple[TensorMeta, ...]


def apply(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``fn(*args, **kwargs)``, computed by the workers as one op.

    ``fn`` gets the workers' own tensors in place of lazygt's, and may use them as any Python code:
    NumPy, SciPy, loops over values. Its code is sent pickled, with all that it refers to; workers
    import the modules that they can. It returns new values and does not write into its arguments;
    other side effects stay on the worker.

    ``fn`` is first run here on tensors without values, to infer the shapes of its results. Where
    that fails, the workers run it at each call while the client waits for the shapes.

    Gradients flow through it: the backward pass runs ``fn`` again, with the same random numbers.

    Args:
        fn: function of tensors, and of any objects that can be pickled.
        args, kwargs: its arguments; tensors may be in lists, tuples and dicts. A number is part
            of the program: pass one that changes with every step as a tensor.

    Raises:
        CodeError: the code can't be pickled, or ``Workers(ship_code=False)`` forbids that.
        NoSession: no session is open.
    """
    # the arguments as a pytree with an `Operand` for each tensor, and the tensors apart
    session_recorder = recorder()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    count = iter(range(len(tensors)))
    arguments = [Operand(next(count)) if isinstance(x, torch.Tensor) else x for x in leaves]
    plain = PlainFunction(fn, pytree.tree_unflatten(arguments, spec))
    is_tensor = [type(x) is Operand for x in arguments]  # distinguishes tensors from None
    structure_key = sys.intern(f"{spec} {is_tensor}")
    identity = (fn, structure_key, *(None if type(x) is Operand else x for x in arguments))
    call = _Call(session_recorder, plain, identity)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        results, structure = call.run(tensors)
        return structure.put_together(results)
    with session_recorder.lock:
        generator_state = session_recorder.generator.get_state()
    structures: list[Structure] = []  # gets the result's structure: autograd passes only tensors
    record: Any = _Differentiable.apply
    flat = record(call, generator_state, structures, *tensors)
    return structures[0].put_together(flat)


@dataclass(frozen=True)
class Structure:
    """Structure of a function's result: a pytree with metas in place of tensors."""

    leaves: tuple[Any, ...]  # metas of the tensors, and the other values, in order
    spec: Any

    def put_together(self, tensors: Sequence[Any]) -> Any:
        """Return the result with ``tensors`` in place of the metas."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, TensorMeta) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Call:
    """Call of a function, to be recorded."""

    active: Recorder
    plain: PlainFunction | Gradient  # the function with its arguments, or its backward pass
    identity: tuple[Any, ...]  # the function and its arguments, with None for tensors

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Structure]:
        """Record the call; return the resulting tensors and the result's structure."""
        session_recorder = self.active
        with session_recorder.lock:
            op = self._op()
            lazy = [
                t if is_lazy(t) else upload_operand(session_recorder, t, op.facts) for t in tensors
            ]
            assert isinstance(op.infer, _Results)
            structure = op.infer.structure(tuple(map(meta_of, lazy)))
            results = session_recorder.record_custom(op.facts, (lazy, structure is None))
        if structure is not None:
            return results, structure
        *leaves, text = results
        metas_or_values = tuple(meta_of(x) if is_lazy(x) else x for x in leaves)
        spec = structure_of(text)
        return [x for x in leaves if is_lazy(x)], Structure(metas_or_values, spec)

    def gradient(self, wanted: tuple[bool, ...], present: tuple[bool, ...]) -> _Call:
        """Return the call of the backward pass.

        Args:
            wanted: for each tensor, whether its gradient is needed.
            present: for each result, whether its gradient is an argument.
        """
        assert isinstance(self.plain, PlainFunction)
        plain = Gradient(self.plain, wanted, present)
        return _Call(self.active, plain, (*self.identity, wanted, present))

    def _op(self) -> CustomOp:
        """Return the function's op; equal functions, by fingerprint or code, share one."""
        definitions, plain = self.active.definitions, self.plain
        definitions.check_shipping(plain.name, plain.module)
        key = type(plain), getattr(self.identity[0], "__code__", None)
        fingerprint = Fingerprint.of(self.identity)
        cached = definitions.functions.get(key)
        if cached is not None and fingerprint is not None and cached[0] == fingerprint:
            return cached[1]
        code, modules, libraries = bundle(plain, plain.name, plain.module)
        name = f"function.{plain.name}.default@{code_name(code)}"
        definition = Definition(
            name, f"function::{plain.name}{_SCHEMA}", (), modules, libraries, code
        )
        op = known_op(definition, _Results(name, plain, torch.device(definitions.device_type)))
        if fingerprint is not None:
            if len(definitions.functions) >= _FUNCTIONS:
                definitions.functions.clear()
            definitions.functions[key] = fingerprint, op
        return op


@dataclass(frozen=True)
class _Results:
    """Inference of a function's results by fake tensors, cached by signature and flags."""

    name: str  # unique name of the function in graphs
    plain: PlainFunction | Gradient = field(compare=False)
    device: torch.device
    _cached: dict[tuple[Flags, Metas], Structure | None] = field(
        default_factory=dict, compare=False
    )

    def structure(self, metas: Metas) -> Structure | None:
        """Return the structure of the function's result; None: only values determine it."""
        key = recorder().flags, metas
        if key not in self._cached:
            if len(self._cached) >= _SIGNATURES:
                self._cached.clear()
            self._cached[key] = self._infer(metas)
        return self._cached[key]

    def _infer(self, metas: Metas) -> Structure | None:
        """Run the function on fake tensors; None if that fails."""
        plain = self.plain
        if isinstance(plain, Gradient):
            pairs = zip(metas[1:], plain.wanted, strict=False)
            grads = tuple(_row_major(meta) for meta, is_wanted in pairs if is_wanted)
            return Structure(grads, pytree.tree_structure(list(grads)))
        try:
            with undispatched(), fake_tensors(fallback=False):
                returned = plain(self.device, [meta.empty(self.device) for meta in metas])
                leaves, spec = pytree.tree_flatten(returned)
                metas_or_values = tuple(
                    _meta(x) if isinstance(x, torch.Tensor) else x for x in leaves
                )
        except Exception:  # noqa: BLE001 - it is run for real, where its own errors are raised
            return None
        return Structure(metas_or_values, spec)

    def __call__(self, operands: list[torch.Tensor], with_structure: bool) -> list[torch.Tensor]:
        """Return the function's results as fake tensors."""
        structure = self.structure(tuple(map(TensorMeta.of, operands)))
        if with_structure or structure is None:
            raise NotImplementedError(f"the results of {self.plain.name} depend on values")
        return [x.empty(self.device) for x in structure.leaves if isinstance(x, TensorMeta)]


def _meta(value: torch.Tensor) -> TensorMeta:
    """Return the meta of a result, which has memory of its own."""
    meta = TensorMeta.of(value)
    return TensorMeta(meta.shape, meta.stride, meta.dtype)


def _row_major(meta: TensorMeta) -> TensorMeta:
    """Return the row-major meta of the same shape and dtype."""
    return TensorMeta(meta.shape, contiguous_stride(meta.shape), meta.dtype)


class _Differentiable(torch.autograd.Function):
    """Autograd function whose backward pass runs the Python function again."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        generator_state: torch.Tensor,
        structures: list[Structure],
        *tensors: Any,
    ) -> Any:
        """Record the call; return its tensors, and append the structure to ``structures``."""
        results, structure = call.run(tensors)
        structures.append(structure)
        ctx.call = call
        ctx.save_for_backward(generator_state, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[t for t in results if not (t.is_floating_point() or t.is_complex())]
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """Record the backward pass; its inputs are those of `Gradient`."""
        generator_state, *tensors = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[3:])  # without forward's call, state and structures
        call = ctx.call.gradient(wanted, tuple(grad is not None for grad in grads))
        present_grads = [grad for grad in grads if grad is not None]
        results, _ = call.run([generator_state, *tensors, *present_grads])
        remaining = iter(results)
        return None, None, None, *[next(remaining) if is_wanted else None for is_wanted in wanted]
