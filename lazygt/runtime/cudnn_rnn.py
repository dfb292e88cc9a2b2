"""cuDNN's recurrent layers, as workers call them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Positions of the states, of the backward's output and of its reserve.
_STATES, _OUTPUT, _RESERVE = (4, 5), 6, 20


def forward(*args: Any) -> Any:
    """Call ``aten::_cudnn_rnn``, without its warning that weights are packed in each call."""
    given = _row_major(args, _STATES)
    call: Any = torch._cudnn_rnn  # the op's overload would write the warning to stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*given)


def backward(*args: Any) -> Any:
    """Call ``aten::_cudnn_rnn_backward`` as a pure op: its results have their own memory.

    cuDNN writes into the reserve, so it gets a copy. It reads the output as row-major, whatever its
    strides are. The gradients of the weights are views of one tensor, so they are copied.
    """
    given = _row_major(args, (*_STATES, _OUTPUT))
    given[_RESERVE] = given[_RESERVE].clone()
    *gradients, weights = torch.ops.aten._cudnn_rnn_backward.default(*given)
    return (*gradients, [weight if weight is None else weight.clone() for weight in weights])


def _row_major(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the arguments, with the tensors at these places contiguous, as cuDNN takes them."""
    given = [*args]
    for place in places:
        if given[place] is not None:
            given[place] = given[place].contiguous()
    return given


#: Op -> the function called in its place.
CUDNN_RNN: dict[str, Callable[..., Any]] = {
    "aten._cudnn_rnn.default": forward,
    "aten._cudnn_rnn_backward.default": backward,
}
