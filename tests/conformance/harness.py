"""torch's own operator database, run on device lazygt against the CPU."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

Tensor = torch.Tensor


@dataclass
class Tally:
    """Samples that agree, agree bit for bit, and do not agree."""

    passed: int = 0
    exact: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.passed + len(self.failures)


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def operators() -> list[OpInfo]:
    """Every entry that takes a dtype of ours: float32 if it does."""
    return [op for op in op_db if dtype_of(op) is not None]


def dtype_of(op: OpInfo) -> torch.dtype | None:
    supported = op.supported_dtypes("cpu")
    order = (torch.float32, torch.complex64, torch.int64, torch.bool)
    return next((dtype for dtype in order if dtype in supported), None)


def samples(op: OpInfo, grad: bool, limit: int | None) -> Iterator[SampleInput]:
    torch.manual_seed(0)
    yield from itertools.islice(op.sample_inputs("cpu", dtype_of(op), requires_grad=grad), limit)


def moved(value: Any) -> Any:
    """The same arguments on device lazygt; tensors that were one stay one."""
    known: dict[int, Tensor] = {}

    def leaf(t: Any) -> Any:
        if isinstance(t, torch.device):
            return torch.device("lazygt", 0)
        if not isinstance(t, Tensor):
            return t
        if id(t) not in known:
            known[id(t)] = t.detach().to("lazygt").requires_grad_(t.requires_grad)
        return known[id(t)]

    return tree_map(leaf, value)


def call(op: OpInfo, sample: SampleInput, on: Callable[[Any], Any]) -> tuple[Any, list[Tensor]]:
    """The op's result and the leaves that want a gradient."""
    arguments = on((sample.input, sample.args, sample.kwargs))
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(1)
    value, args, kwargs = arguments
    return op(value, *args, **kwargs), leaves


def gradients(op: OpInfo, sample: SampleInput, result: Any, leaves: list[Tensor]) -> list[Any]:
    """Gradients of the sum of all that the op returned."""
    outputs = sample.output_process_fn_grad(result)
    parts = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if not parts or not leaves:
        return []
    total = sum(part.abs().sum() if part.is_complex() else part.sum() for part in parts)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def fetched(result: Any) -> list[Any]:
    """All leaves of a result, tensors on the CPU."""
    return [t.detach().cpu() if isinstance(t, Tensor) else t for t in tree_leaves(result)]


def compare(ours: list[Any], theirs: list[Any]) -> bool:
    """Raise unless they agree; whether they agree bit for bit."""
    assert len(ours) == len(theirs), f"{len(ours)} results instead of {len(theirs)}"
    exact = True
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True)
            if b.layout == torch.strided:
                exact &= same_bits(a, b)
        else:
            assert a == b or (a != a and b != b), f"{a!r} instead of {b!r}"
    return exact


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal elements, NaN equal to itself."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def eager(op: OpInfo, sample: SampleInput, grad: bool) -> list[Any] | None:
    """What eager torch gives; None where it refuses the sample itself."""
    try:
        result, leaves = call(op, sample, lambda value: value)
        found = gradients(op, sample, result, leaves) if grad else result
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return fetched(found)


def check(op: OpInfo, grad: bool, limit: int | None) -> Tally:
    """Run an op's samples inside an open session."""
    tally = Tally()
    for number, sample in enumerate(samples(op, grad, limit)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = eager(op, sample, grad)
            if expected is None:
                continue
            try:
                result, leaves = call(op, sample, moved)
                found = gradients(op, sample, result, leaves) if grad else result
                tally.exact += compare(fetched(found), expected)
                tally.passed += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                text = str(error).strip().splitlines()
                tally.failures.append(
                    f"sample {number}: {type(error).__name__}: {text[0] if text else ''}"[:300]
                )
    return tally
