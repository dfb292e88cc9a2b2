"""User functions as ops of a worker: tensors in, a list of tensors out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazygt.errors import ProtocolError
from lazygt.graph.ops import undispatched
from lazygt.runtime.custom_ops import Portable
from lazygt.runtime.executors import kernels

_PLAIN_TYPES = (type(None), bool, int, float, complex, str)


@dataclass(frozen=True, slots=True)
class Operand:
    """Placeholder of a tensor among a function's arguments, by its number."""

    index: int


@dataclass(frozen=True)
class PlainFunction(Portable):
    """A function and its arguments, with an ``Operand`` instead of each tensor."""

    fn: Callable[..., Any]
    arguments: Any  # (args, kwargs)

    @property
    def name(self) -> str:
        """The function's name, in a form that a schema may have."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return re.sub(r"\W", "", str(name)) or "function"

    @property
    def module(self) -> str:
        """Name of its module."""
        return str(getattr(self.fn, "__module__", ""))

    def __call__(self, device: torch.device, operands: Sequence[torch.Tensor]) -> Any:
        """Call the function on these tensors."""
        args, kwargs = pytree.tree_map(
            lambda x: operands[x.index] if isinstance(x, Operand) else x, self.arguments
        )
        return self.fn(*args, **kwargs)

    def on(self, device: torch.device) -> Callable[..., Any]:
        return _Call(self, device)


@dataclass(frozen=True)
class Gradient(Portable):
    """Backward pass of a function, which it runs again, as torch's checkpointing does.

    Its inputs are the generator state before the forward pass, the function's tensors, and the
    gradients of its results.
    """

    function: PlainFunction
    wanted: tuple[bool, ...]  # for each tensor, whether its gradient is wanted
    #: for each tensor that the function returned, whether a gradient of it is an input
    present: tuple[bool, ...]

    @property
    def name(self) -> str:
        """Name of the gradient, made of the function's."""
        return f"gradient_of_{self.function.name}"

    @property
    def module(self) -> str:
        """Name of the function's module."""
        return self.function.module

    def __call__(self, device: torch.device, operands: Sequence[torch.Tensor]) -> Any:
        """Return the wanted gradients, in order."""
        state, *values = operands
        count = len(self.wanted)
        pairs = zip(values[:count], self.wanted, strict=True)
        tensors = [t.detach().requires_grad_(wanted) for t, wanted in pairs]
        returned = _with_rng_state(self.function, device, tensors, state)
        leaves = [x for x in pytree.tree_leaves(returned) if isinstance(x, torch.Tensor)]
        outputs = [x for x, present in zip(leaves, self.present, strict=True) if present]
        outputs_and_grads = zip(outputs, values[count:], strict=True)
        differentiable = [
            (output, grad) for output, grad in outputs_and_grads if output.requires_grad
        ]
        inputs = [t for t in tensors if t.requires_grad]
        if not differentiable:
            return [torch.zeros_like(t) for t in inputs]
        gradients = torch.autograd.grad(
            [output for output, _ in differentiable], inputs, [grad for _, grad in differentiable],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        return [grad.contiguous() for grad in gradients]

    def on(self, device: torch.device) -> Callable[..., Any]:
        return _Call(self, device)


def _with_rng_state(
    function: PlainFunction, device: torch.device, operands: Sequence[Any], state: torch.Tensor
) -> Any:
    """Call the function with the generator in ``state``; restore the current state afterwards."""
    current_state = kernels.get_rng_state(device)
    kernels.set_rng_state(device, state)
    try:
        return function(device, operands)
    finally:
        kernels.set_rng_state(device, current_state)


class _Call:
    """Kernel of a function's op on a worker.

    It passes copies of the operands to the function, which may write into them. Writes through
    torch are errors; those through NumPy are not detected, so the originals are never passed.
    """

    def __init__(self, function: PlainFunction | Gradient, device: torch.device) -> None:
        self._function, self._device = function, device

    def __call__(self, operands: Sequence[torch.Tensor], with_structure: bool) -> list[Any]:
        """Return the result's tensors; ``with_structure``: all its leaves, and its spec as text.

        Raises:
            RuntimeError: the function has written into an operand.
            TypeError: it has returned an object that can't be sent.
        """
        copies = [t.detach().clone() for t in operands]
        versions = [t._version for t in copies]
        with undispatched(), torch.enable_grad():
            returned = self._function(self._device, copies)
        for number, (t, version) in enumerate(zip(copies, versions, strict=True)):
            if t._version != version:
                raise RuntimeError(
                    f"{self._function.name} has written into its tensor argument {number}, which "
                    f"is a value of the workers: have it write into a copy (x = x.clone()), and "
                    f"return that"
                )
        leaves, spec = pytree.tree_flatten(returned)
        results = [self._to_device(leaf) for leaf in leaves]
        if not with_structure:
            return [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        return [*results, pytree.treespec_dumps(spec)]

    def _to_device(self, leaf: Any) -> Any:
        """Return a leaf of the result: a tensor on the op's device, or a plain value."""
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(self._device)
        if not isinstance(leaf, _PLAIN_TYPES):
            raise TypeError(
                f"{self._function.name} returned a {type(leaf).__name__}; what workers return are "
                f"tensors, numbers, strings and None, in lists, tuples and dicts"
            )
        return leaf


def structure_of(text: str) -> Any:
    """Return the structure of a worker's result, as ``treespec_dumps`` wrote it.

    Raises:
        ProtocolError: the text is no structure, or names anything but a class of a loaded module.
            torch would import any module, and call any function as a default factory.
    """
    try:
        _check_classes(json.loads(text))
        return pytree.treespec_loads(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a worker told of no structure: {error}") from error


def _check_classes(structure: Any) -> None:
    """Check every class that a structure names; its contexts are JSON within JSON."""
    match structure:
        case {"default_factory_module": module, "default_factory_name": name}:
            _check_class(module, name)
        case {"__enum__": _, "fqn": str(name)}:
            _check_class(*name.split(":", 1))
    if isinstance(structure, dict):
        structure = list(structure.values())
    if isinstance(structure, list):
        for item in structure:
            _check_classes(item)
    elif isinstance(structure, str):
        with suppress(json.JSONDecodeError):
            _check_classes(json.loads(structure))


def _check_class(module: str, name: str = "") -> None:
    """Raise ProtocolError unless ``module.name`` is a class of an imported module."""
    candidate: Any = sys.modules.get(module)
    for attribute in name.split("."):
        candidate = getattr(candidate, attribute, None)
    if not isinstance(candidate, type):
        raise ProtocolError(
            f"a function returned a value of {module}.{name}, which is no class of a module that "
            f"this process has imported: import it, or return plain lists, tuples and dicts"
        )
