"""``torch.compile`` in a session: functions run as if they were not compiled.

Dynamo would trace them for a compiler that has no code for this device. Instead their ops are
recorded, and the workers compile the resulting plans. ``torch._dynamo`` takes seconds to load, so
its patches wait until a program loads it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from lazygt.errors import CompileWarning
from lazygt.graph.source import PACKAGE, expand, user_call_site
from lazygt.record.context import session_stack, workers_device
from lazygt.record.patches import Patch, Patches
from lazygt.record.tensor import NATIVE, LazyTensor, is_lazy

#: Modules of torch that call torch.compile themselves, to trace functions.
_TRACING = ("torch._higher_order_ops", "torch.nn.attention.flex_attention")
_NO_CODE = "no compiler of torch's has code for this device"
_warned = False


def patch_dynamo() -> None:
    """Make compiled functions run uncompiled in sessions, however early they were compiled."""
    for name, patches in _PATCHES.items():
        if name in sys.modules:
            patches(sys.modules[name]).apply()
        else:
            sys.meta_path.insert(0, _WhenLoaded(name))


class _WhenLoaded(MetaPathFinder):
    """Import hook that patches a module when it has been loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec; None for any other."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _PATCHES[name](module).apply()

        loader.exec_module = execute_and_patch
        return spec


def _eval_frame_patches(eval_frame: Any) -> Patches:
    """Return the patches of dynamo's frame evaluation: eager mode inside sessions."""
    callback_from_stance = eval_frame._callback_from_stance

    def callback(compiler: Any) -> Any:
        """Return the compiler of the next frames, or None."""
        if not session_stack:
            return callback_from_stance(compiler)
        if compiler not in (None, False):
            _warn()
        return None

    def stance(self: Any) -> str:
        return "force_eager" if session_stack else vars(self)["stance"]

    def set_stance(self: Any, value: str) -> None:
        vars(self)["stance"] = value

    return Patches(
        Patch(eval_frame, "_callback_from_stance", callback, _NO_CODE),
        Patch(eval_frame.DynamoStance, "stance", property(stance, set_stance), _NO_CODE),
    )


def _flex_attention_patches(module: Any) -> Patches:
    """Return the patch of flex_attention's device check, for lazy operands."""
    validate_device = module._validate_device

    def validate(*operands: torch.Tensor) -> None:
        """Raise for operands that the workers' device would refuse."""
        if is_lazy(operands[0]):
            if workers_device() != "cpu":
                return
            operands = tuple(
                torch.empty(0, device="cpu", requires_grad=t.requires_grad) for t in operands
            )
        validate_device(*operands)

    if NATIVE is None:
        hop = module.flex_attention_hop
        hop.py_impl(LazyTensor)(hop.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd])
    return Patches(Patch(module, "_validate_device", validate, "it knows devices by their names"))


def _convert_frame_patches(module: Any) -> Patches:
    """Return the patch that leaves frames uncompiled inside sessions."""
    module.trace_rules.add("lazygt.session")
    convert = module.CatchErrorsWrapper.__call__

    def convert_unless_lazy(self: Any, frame: Any, *args: Any) -> Any:
        """Leave frames unconverted that a compiled function calls to open a session, or in it."""
        if session_stack or frame.f_code.co_filename.startswith(PACKAGE):
            return module.ConvertFrameReturn(apply_to_code=False)
        return convert(self, frame, *args)

    return Patches(Patch(module.CatchErrorsWrapper, "__call__", convert_unless_lazy, _NO_CODE))


#: module -> its patches
_PATCHES: dict[str, Callable[[Any], Patches]] = {
    "torch._dynamo.convert_frame": _convert_frame_patches,
    "torch._dynamo.eval_frame": _eval_frame_patches,
    "torch.nn.attention.flex_attention": _flex_attention_patches,
}


def _warn() -> None:
    """Warn once a process that a function is not compiled."""
    global _warned
    caller = sys._getframe(3).f_globals.get("__name__", "")
    if _warned or caller.startswith(_TRACING):
        return
    _warned = True
    warnings.warn(
        f"torch.compile is left out in a lazygt session: the function called at "
        f"{expand(user_call_site(1))} is recorded as it is, and the workers compile the plans that "
        f"come of it (lazygt.session(compile=...)). Said once a process.",
        CompileWarning,
        stacklevel=4,
    )
