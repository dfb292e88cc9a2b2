"""Factories inside a session: new tensors are lazy by default.

The functions are replaced in ``torch``, and wherever a module has imported one by name
(``from torch import randn``) or holds it in a dict (a library's table of functions).
``torch.Tensor(...)``, ``torch.FloatTensor(...)`` and the like make tensors, too: their arguments
name no device, so torch makes CPU tensors; these are uploaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils._device

from lazygt import native
from lazygt.record.context import session_stack
from lazygt.record.patches import Patch, Patches
from lazygt.record.tensor import DEVICE_0, is_lazy

_builtins: Any = torch.jit._builtins
_TYPES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_torch_new: Any = torch._C.TensorBase.__new__
_torch_set_default_type: Any = torch.set_default_tensor_type
#: (namespace, name, original, stand-in)
_replaced: list[tuple[dict[Any, Any], Any, Any, Any]] = []
#: Constructors of layouts that lazygt does not have: they still make CPU tensors.
_NOT_STRIDED = frozenset(
    {
        "empty_quantized",
        "sparse_coo_tensor",
        "sparse_compressed_tensor",
        "sparse_csr_tensor",
        "sparse_csc_tensor",
        "sparse_bsr_tensor",
        "sparse_bsc_tensor",
    }
)
#: Packages that call no factory of torch's, or mean torch's own function.
_SKIPPED = sys.stdlib_module_names | {"torch", "lazygt"}
#: Copy of torch's list from before the first patch (torch caches that list as well).
_constructors: list[Callable[..., Any]] = []


def patch() -> None:
    """Make torch's factories default to ``lazygt``.

    ``torch.set_default_device`` does the same with a TorchFunctionMode, which every call of every
    torch function passes: 1.5 to 3 us an op, measured, against 5 for recording one.
    """
    if _replaced:
        return
    if not _constructors:
        _constructors.extend(torch.utils._device._device_constructors())
    for function in _constructors:
        name = function.__name__.removeprefix("fft_")
        for owner in (torch, torch.fft):
            if getattr(owner, name, None) is function and name not in _NOT_STRIDED:
                _patch(owner, name, _defaulting(function))
    _patch(torch, "normal", _defaulting_normal(torch.normal))
    for name, tensor_type in _tensor_types().items():
        _replace(vars(torch), name, tensor_type)
    _replace(vars(torch), "set_default_tensor_type", _set_default_type)
    _TENSOR.apply()
    _patch_imported({id(original): standin for _, _, original, standin in _replaced})


def _patch(owner: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Replace a factory of a module, and register the replacement with ``torch.jit``."""
    builtin_name = _builtins._find_builtin(getattr(owner, name))
    if builtin_name is not None:  # else torch.jit.script would try to compile the factory's Python
        _builtins._register_builtin(function, builtin_name)
    _replace(vars(owner), name, function)


def _replace(namespace: dict[Any, Any], name: Any, standin: Any) -> None:
    """Replace one entry of a namespace, and remember the original."""
    _replaced.append((namespace, name, namespace[name], standin))
    namespace[name] = standin


def _patch_imported(standins: dict[int, Any]) -> None:
    """Replace the functions where modules, torch's own excepted, have imported them by name."""
    loaded: dict[str, Any] = dict(sys.modules)  # anything may stand there
    modules = [
        vars(module)
        for module_name, module in loaded.items()
        if module_name.partition(".")[0] not in _SKIPPED and isinstance(module, ModuleType)
    ]
    # only modules that refer to torch or to a factory can have a table of factories
    functions, search = [original for _, _, original, _ in _replaced], _dict_search()
    for names in search(modules, [torch, *functions]):
        tables = [value for value in names.values() if type(value) is dict]
        for namespace in search([names, *tables], functions):
            for name, value in list(namespace.items()):
                if id(value) in standins:
                    _replace(namespace, name, standins[id(value)])


@functools.cache
def _dict_search() -> Callable[[list[dict[str, Any]], list[Any]], list[dict[str, Any]]]:
    """Return the search for dicts that have one of some objects as a value."""
    extension = native.load().module
    return _dicts_with if extension is None else extension.holders


def _dicts_with(namespaces: list[dict[str, Any]], objects: list[Any]) -> list[dict[str, Any]]:
    """Return the dicts that have one of some objects as a value; objects compare by identity."""
    ids = set(map(id, objects))
    return [names for names in namespaces if not ids.isdisjoint(map(id, list(names.values())))]


def unpatch() -> None:
    """Restore torch's own factories."""
    _TENSOR.undo()
    while _replaced:
        namespace, name, original, standin = _replaced.pop()
        if namespace.get(name) is standin:
            namespace[name] = original


@functools.cache
def _defaulting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory: a call that names no device gets the session's."""
    converts = function.__name__ in ("as_tensor", "asarray")

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            _note_device(device)
        elif _is_device_unspecified(kwargs) and not (
            converts and args and isinstance(args[0], torch.Tensor)
        ):
            kwargs["device"] = DEVICE_0
        return function(*args, **kwargs)

    return factory


@functools.cache
def _defaulting_normal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.normal``, which is a factory only with a size."""
    factory = _defaulting(function)

    @functools.wraps(function)
    def normal(*args: Any, **kwargs: Any) -> Any:
        sized = len(args) == 3 or "size" in kwargs
        return (factory if sized else function)(*args, **kwargs)

    return normal


# -- constructors --------------------------------------------------------------------------


def _uploaded(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Upload a constructor's tensor, unless it shares the memory of its argument."""
    shares_memory = isinstance(args[0], torch.Tensor | torch.UntypedStorage) if args else False
    if shares_memory or kwargs or not _is_device_unspecified({}):
        return tensor
    return tensor.to(DEVICE_0)


def _new_tensor(*args: Any, **kwargs: Any) -> Any:
    """Create a tensor (``torch.Tensor.__new__``); torch.compile accepts no narrower signature."""
    tensor = _torch_new(*args, **kwargs)
    return _uploaded(tensor, args[1:], kwargs) if args[0] is torch.Tensor else tensor


_TENSOR = Patches(Patch(torch.Tensor, "__new__", _new_tensor, "its arguments name no device"))


class _Typed(type):
    """Stand-in for a tensor type, such as ``torch.FloatTensor``."""

    torch_type: Any
    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _uploaded(cls.torch_type(*args, **kwargs), args, kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        lazily = is_lazy(value) and value.dtype == cls.dtype
        return lazily or isinstance(value, cls.torch_type)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "torch_type"), name)

    def __repr__(cls) -> str:
        return repr(cls.torch_type)


@functools.cache
def _tensor_types() -> dict[str, Any]:
    """Return the stand-ins for ``torch.FloatTensor`` and the like: name -> stand-in."""
    standins = {}
    for name in _TYPES:
        torch_type = getattr(torch, f"{name}Tensor")
        # Tensor.type() parses the type's name, which must contain the module
        standins[f"{name}Tensor"] = _Typed(
            f"torch.{name}Tensor", (), {"torch_type": torch_type, "dtype": torch_type.dtype}
        )
    return standins


def _set_default_type(tensor_type: Any) -> None:
    """Set the default tensor type; replaces torch's setter, which knows only torch's types."""
    resolved = (
        _tensor_types().get(tensor_type.removeprefix("torch."), tensor_type)
        if isinstance(tensor_type, str)
        else tensor_type
    )
    _torch_set_default_type(resolved.torch_type if isinstance(resolved, _Typed) else resolved)


def _note_device(device: Any) -> None:
    """Note that the program requested a CPU or CUDA tensor while a session is open."""
    device_type = device.type if isinstance(device, torch.device) else str(device)
    if session_stack and device_type.startswith(("cpu", "cuda")):
        session: Any = session_stack[-1]
        if not session.recorder.lock._is_owned():
            session.idle.made_elsewhere = True


# -- device of a new tensor ----------------------------------------------------------------


def _is_device_unspecified(kwargs: dict[str, Any]) -> bool:
    """Return whether a factory's call leaves the device open, so that the session's applies."""
    if not session_stack:  # a module imported in a session still refers to the stand-ins
        return False
    lock: Any = session_stack[-1].recorder.lock
    if lock._is_owned():  # the caller is lazygt, not the user
        return False
    if torch._C._len_torch_function_stack() and _inner_device_context():
        return False
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != DEVICE_0.type:
        return session_stack[-1].recorder.generator.is_own(generator)
    out = kwargs.get("out")
    return out is None


def _inner_device_context() -> bool:
    """Return whether a device context of the user's (``with torch.device("cpu")``) is active."""
    return any(
        isinstance(torch._C._get_function_stack_at(i), torch.utils._device.DeviceContext)
        for i in range(torch._C._len_torch_function_stack())
    )
