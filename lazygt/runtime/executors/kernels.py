"""Kernels of ops by name: lazygt's own ops, wrapped aten ops, and torch's for all others."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lazygt.errors import LazyGTError
from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.ops import overload
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LAUNCH,
    LAUNCH_,
    PUT_ROWS,
    RECV,
    REDUCE_SCATTER,
    REPLICATE_TO_PARTIAL,
    SEND,
    SEND_RECV,
    SHARD,
    TAKE_ROWS,
    WAIT,
)
from lazygt.host.gpus import why_none, why_unusable
from lazygt.runtime import custom_ops, wire
from lazygt.runtime.collectives import collective_ops, group

# -- cuDNN's recurrent layers ----------------------------------------------------------------------

#: Argument indices of the states (h, c), and of the backward's output and reserve.
_STATE_ARGS, _OUTPUT_ARG, _RESERVE_ARG = (4, 5), 6, 20


def _cudnn_rnn(*args: Any) -> Any:
    """Call ``aten::_cudnn_rnn``, without its warning that weights are packed in each call."""
    arguments = _row_major(args, _STATE_ARGS)
    call: Any = torch._cudnn_rnn  # the op's overload would write the warning to stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments)


def _cudnn_rnn_backward(*args: Any) -> Any:
    """Call ``aten::_cudnn_rnn_backward`` as a pure op: its results have their own memory.

    cuDNN writes into the reserve, so it gets a copy. It reads the output as row-major, whatever its
    strides are. The gradients of the weights are views of one tensor, so they are copied.
    """
    arguments = _row_major(args, (*_STATE_ARGS, _OUTPUT_ARG))
    arguments[_RESERVE_ARG] = arguments[_RESERVE_ARG].clone()
    *gradients, weights = torch.ops.aten._cudnn_rnn_backward.default(*arguments)
    return (*gradients, [weight if weight is None else weight.clone() for weight in weights])


def _row_major(args: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    """Return the arguments; tensors at these indices are made contiguous, as cuDNN requires."""
    arguments = [*args]
    for index in indices:
        if arguments[index] is not None:
            arguments[index] = arguments[index].contiguous()
    return arguments


#: Op -> the function called instead.
CUDNN_RNN: dict[str, Callable[..., Any]] = {
    "aten._cudnn_rnn.default": _cudnn_rnn,
    "aten._cudnn_rnn_backward.default": _cudnn_rnn_backward,
}


# -- kernels of lazygt's own ops, and of the device ------------------------------------------------


def clone(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with the very same strides: kernels round differently on other layouts."""
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    # torch refuses to write an expanded tensor, in which several elements share memory
    once = tuple([slice(None) if step else slice(0, 1) for step in value.stride()])
    copy[once].copy_(value[once])
    return copy


def restride(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return ``value`` with these strides: itself, or a copy."""
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(
        value
    )


def viewed(base: torch.Tensor, chain: tuple[Any, ...]) -> torch.Tensor:
    """Apply a chain of view ops to ``base`` (see ``graph.alias.view_step``); return the view."""
    for op, base_index, args, kwargs, output_index in chain:
        operands = (*args[:base_index], base, *args[base_index + 1 :])
        result = kernel(op)(*(_as_list(a) for a in operands), **dict(kwargs))
        base = result[output_index] if isinstance(result, (list, tuple)) else result
    return base


def _as_list(arg: Any) -> Any:
    return [_as_list(item) for item in arg] if isinstance(arg, tuple) else arg


def write_back(base: torch.Tensor, value: torch.Tensor, chain: tuple[Any, ...]) -> torch.Tensor:
    """Copy ``value`` in place into the view of ``base`` that ``chain`` makes; return ``base``."""
    viewed(base, chain).copy_(value)
    return base


def initialize(device: torch.device) -> None:
    """Create the device's context and make it this thread's current one.

    CUDA's generators exist only from then on.

    Raises:
        RuntimeError: the device can't be used.
    """
    if device.type != "cuda":
        return
    index = device.index or 0
    try:
        torch.cuda.init()
        torch.cuda.set_device(index)
    except (AssertionError, RuntimeError) as error:
        why = why_unusable(index, error) if torch.cuda.device_count() else why_none()
        raise RuntimeError(f"a worker can't use device={str(device)!r}: {why}") from error


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that a worker's ops draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def manual_seed(device: torch.device, seed: int) -> None:
    """Seed the worker's generator."""
    generator(device).manual_seed(seed)


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the worker's generator, as bytes."""
    return generator(device).get_state().clone()


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the worker's generator."""
    generator(device).set_state(state.cpu().contiguous())


def clear_error(device: torch.device) -> None:
    """Consume a pending device error, which the next kernel launch would raise otherwise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all launched work; a no-op on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def is_lost(device: torch.device) -> bool:
    """Return whether a failed kernel has made a device unusable for this process.

    Does not wait: kernels in flight may still fail.
    """
    if device.type == "cpu":
        return False
    try:
        torch.get_device_module(device).current_stream(device).query()
    except RuntimeError:
        return True
    return False


KERNELS: dict[str, Callable[..., Any]] = {
    WRITE_BACK: write_back,
    "lazygt.manual_seed": manual_seed,
    "lazygt.get_rng_state": get_rng_state,
    "lazygt.set_rng_state": set_rng_state,
    ALL_REDUCE: collective_ops.all_reduce,
    ALL_GATHER: collective_ops.all_gather,
    REDUCE_SCATTER: collective_ops.reduce_scatter,
    ALL_TO_ALL: collective_ops.all_to_all,
    SEND_RECV: collective_ops.send_recv,
    TAKE_ROWS: collective_ops.take_rows,
    PUT_ROWS: collective_ops.put_rows,
    LAUNCH: collective_ops.launch,
    LAUNCH_: collective_ops.launch_,
    WAIT: collective_ops.wait,
    SHARD: collective_ops.shard,
    REPLICATE_TO_PARTIAL: collective_ops.first,
    SEND: collective_ops.send,
    RECV: collective_ops.recv,
}
#: Ops of aten with a Python wrapper.
WRAPPED: dict[str, Callable[..., Any]] = {**CUDNN_RNN}


#: Prefix of torch's functional collectives, which run on torch's own process group (GPUs only).
COLLECTIVES = "_c10d_functional."


def check(name: str) -> None:
    """Raise KeyError unless there is an op of this name."""
    if name.startswith("lazygt."):
        _ = KERNELS[name]
    elif "@" in name:
        custom_ops.loaded_op(name)
    else:
        overload(name)


def _require_torch_group(name: str) -> None:
    """Raise LazyGTError unless torch's process group exists, once all ranks have joined."""
    group.wait()
    if not dist.is_initialized():
        raise LazyGTError(
            f"{name}: CPU workers have no process group of torch's, which would listen on a TCP "
            f"port; place values with lazygt.distribute, and the collectives follow from that"
        )


def kernel(name: str) -> Callable[..., Any]:
    """Return the callable of an op. For a torch collective, wait for the process group first.

    Raises:
        KeyError: there is no such op.
        LazyGTError: a collective, and this worker has no process group.
        CodeError: the code of a custom op could not be loaded.
    """
    if name.startswith("lazygt."):
        return KERNELS[name]
    if "@" in name:
        return custom_ops.loaded_op(name).kernel
    if name.startswith(COLLECTIVES):
        _require_torch_group(name)
    op: Callable[..., Any] = WRAPPED.get(name) or overload(name)
    return op


# -- random stream of a worker ---------------------------------------------------------------------


class RandomStream:
    """The generator that a worker's ops draw from.

    Args:
        inline: the client uses the same generator, so each run swaps the worker's state in and the
            client's back.
    """

    def __init__(self, device: torch.device, inline: bool) -> None:
        self._device = device
        self._inline_state = torch.default_generator.get_state() if inline else None
        self._initial_state = get_rng_state(device)

    @property
    def is_lent(self) -> bool:
        """True if a run that draws needs ``lent``: the client uses the same generator."""
        return self._inline_state is not None

    @property
    def state(self) -> torch.Tensor:
        """The generator's state, as bytes."""
        return get_rng_state(self._device) if self._inline_state is None else self._inline_state

    def set(self, state: bytes) -> None:
        """Set the generator to a snapshot's state, or to its initial state if that is empty."""
        new_state = wire.received(state) if state else self._initial_state
        if self._inline_state is None:
            set_rng_state(self._device, new_state)
        else:
            self._inline_state = new_state

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Context of a run that draws: inline, swap the worker's state in and the client's back."""
        if self._inline_state is None:
            yield
            return
        client_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._inline_state)
        try:
            yield
        finally:
            self._inline_state = torch.default_generator.get_state()
            torch.default_generator.set_state(client_state)
