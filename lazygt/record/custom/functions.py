"""Plain Python functions run on the workers' tensors, as one op of the graph."""

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
from lazygt.graph.ops import Foreign, undispatched
from lazygt.graph.shapes.meta_run import fake_tensors
from lazygt.record.context import recorder
from lazygt.record.custom.definitions import known_op
from lazygt.record.custom.pickling import Witness, bundle
from lazygt.record.host_values import foreign
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, meta_of
from lazygt.runtime.custom_functions import Gradient, Operand, PlainFunction, structure_of
from lazygt.runtime.custom_ops import Definition, code_name

_SCHEMA = "(Tensor[] operands, bool tell) -> Tensor[]"
#: Number of functions, and of signatures of one function, that are remembered.
_FUNCTIONS = _SIGNATURES = 1_000

Metas = tuple[TensorMeta, ...]


def apply(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``fn(*args, **kwargs)``, computed by the workers as one op.

    ``fn`` gets the workers' own tensors in place of lazygt's, and may use them as any Python code:
    NumPy, SciPy, loops over values. Its code is sent pickled, with all that it refers to; workers
    import the modules that they can. It returns new values and does not write into its arguments;
    other side effects stay on the worker.

    ``fn`` is first run here on tensors without values, to learn the shapes of its results. Where
    that fails, the workers run it at each call while the client waits for the shapes.

    Gradients flow through it: the backward pass runs ``fn`` again, with the same random numbers.

    Args:
        fn: function of tensors, and of any objects that can be pickled.
        args, kwargs: its arguments; tensors may stand in lists, tuples and dicts. A number is part
            of the program: give one that changes with every step as a tensor.

    Raises:
        CodeError: the code can't be pickled, or ``ship_code=False`` forbids that.
        NoSession: no session is open.
    """
    active = recorder()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    count = iter(range(len(tensors)))
    given = [Operand(next(count)) if isinstance(x, torch.Tensor) else x for x in leaves]
    plain = PlainFunction(fn, pytree.tree_unflatten(given, spec))
    places = [type(x) is Operand for x in given]  # None may stand where a tensor stood before
    shape = sys.intern(f"{spec} {places}")
    parts = (fn, shape, *(None if type(x) is Operand else x for x in given))
    call = _Call(active, plain, parts)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        results, structure = call.run(tensors)
        return structure.put_together(results)
    with active.lock:
        state = active.generator.get_state()
    structures: list[Structure] = []
    record: Any = _Differentiable.apply
    flat = record(call, state, structures, *tensors)
    return structures[0].put_together(flat)


@dataclass(frozen=True)
class Structure:
    """Structure of a function's result: a pytree with tensors left out.

    Attributes:
        leaves: metas of the tensors, and the other values, in order.
    """

    leaves: tuple[Any, ...]
    spec: Any

    def put_together(self, tensors: Sequence[Any]) -> Any:
        """Return the value with these tensors in it."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, TensorMeta) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Call:
    """Call of a function, to be recorded.

    Attributes:
        parts: all parts of ``plain`` besides tensors.
    """

    active: Recorder
    plain: PlainFunction | Gradient
    parts: tuple[Any, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Structure]:
        """Record the call; return the resulting tensors and the structure around them."""
        active = self.active
        with active.lock:
            op = self._op()
            lazy = [t if is_lazy(t) else foreign(active, t, op.facts) for t in tensors]
            assert isinstance(op.infer, _Results)
            structure = op.infer.structure(tuple(map(meta_of, lazy)))
            results = active.record_foreign(op.facts, (lazy, structure is None))
        if structure is not None:
            return results, structure
        *leaves, text = results
        shown = tuple(meta_of(x) if is_lazy(x) else x for x in leaves)
        spec = structure_of(text)
        return [x for x in leaves if is_lazy(x)], Structure(shown, spec)

    def gradient(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> _Call:
        """Return the call of the backward pass."""
        assert isinstance(self.plain, PlainFunction)
        plain = Gradient(self.plain, wanted, given)
        return _Call(self.active, plain, (*self.parts, wanted, given))

    def _op(self) -> Foreign:
        """Return the function's op in graphs: one op for one content."""
        definitions, plain = self.active.definitions, self.plain
        definitions.check_shipping(plain.name, plain.module)
        key = type(plain), getattr(self.parts[0], "__code__", None)
        witness = Witness.of(self.parts)
        known = definitions.functions.get(key)
        if known is not None and witness is not None and known[0] == witness:
            return known[1]
        code, modules, libraries = bundle(plain, plain.name, plain.module)
        name = f"function.{plain.name}.default@{code_name(code)}"
        definition = Definition(
            name, f"function::{plain.name}{_SCHEMA}", (), modules, libraries, code
        )
        op = known_op(definition, _Results(name, plain, torch.device(definitions.device_type)))
        if witness is not None:
            if len(definitions.functions) >= _FUNCTIONS:
                definitions.functions.clear()
            definitions.functions[key] = witness, op
        return op


@dataclass(frozen=True)
class _Results:
    """Results of a function for tensors without values, cached by signature and flags.

    Attributes:
        name: the function's identity.
    """

    name: str
    plain: PlainFunction | Gradient = field(compare=False)
    device: torch.device
    _known: dict[tuple[Flags, Metas], Structure | None] = field(default_factory=dict, compare=False)

    def structure(self, metas: Metas) -> Structure | None:
        """Return the structure of the function's result; None: only values can tell."""
        key = recorder().flags, metas
        if key not in self._known:
            if len(self._known) >= _SIGNATURES:
                self._known.clear()
            self._known[key] = self._found(metas)
        return self._known[key]

    def _found(self, metas: Metas) -> Structure | None:
        plain = self.plain
        if isinstance(plain, Gradient):
            pairs = zip(metas[1:], plain.wanted, strict=False)
            grads = tuple(_rows(meta) for meta, wanted in pairs if wanted)
            return Structure(grads, pytree.tree_structure(list(grads)))
        try:
            with undispatched(), fake_tensors(fallback=False):
                returned = plain(self.device, [meta.empty(self.device) for meta in metas])
                leaves, spec = pytree.tree_flatten(returned)
                shown = tuple(_meta(x) if isinstance(x, torch.Tensor) else x for x in leaves)
        except Exception:  # noqa: BLE001 - it is run for real, where its own errors are raised
            return None
        return Structure(shown, spec)

    def __call__(self, operands: list[torch.Tensor], tell: bool) -> list[torch.Tensor]:
        """Return the function's results as fake tensors."""
        structure = self.structure(tuple(map(TensorMeta.of, operands)))
        if tell or structure is None:
            raise NotImplementedError(f"only values can tell what {self.plain.name} returns")
        return [x.empty(self.device) for x in structure.leaves if isinstance(x, TensorMeta)]


def _meta(value: torch.Tensor) -> TensorMeta:
    """Return the meta of a result, which has memory of its own."""
    meta = TensorMeta.of(value)
    return TensorMeta(meta.shape, meta.stride, meta.dtype)


def _rows(meta: TensorMeta) -> TensorMeta:
    return TensorMeta(meta.shape, contiguous_stride(meta.shape), meta.dtype)


class _Differentiable(torch.autograd.Function):
    """Function with a backward pass that runs it again."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, state: torch.Tensor, structures: list[Structure], *tensors: Any
    ) -> Any:
        results, structure = call.run(tensors)
        structures.append(structure)
        ctx.call = call
        ctx.save_for_backward(state, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[t for t in results if not (t.is_floating_point() or t.is_complex())]
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        state, *tensors = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[3:])
        call = ctx.call.gradient(wanted, tuple(grad is not None for grad in grads))
        results, _ = call.run([state, *tensors, *(grad for grad in grads if grad is not None)])
        left = iter(results)
        return None, None, None, *[next(left) if each else None for each in wanted]
