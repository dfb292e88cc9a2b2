"""torch's own operator database, run on device lazygt against eager torch on a CPU.

Each sample runs three times: first its ops are recorded and its plan runs checked, node by node;
then the plan is found again; from then on its generated code runs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import lazygt
from lazygt.runtime.executors import eager as eager_executor
from tests.bits import assert_same_bits
from tests.conformance import streams
from tests.conformance.refusals import UNWRITTEN

Tensor = torch.Tensor
RUNS = 3


@dataclass
class Tally:
    """Samples that agree bit for bit in every run, and how the others do not.

    Attributes:
        generated: samples whose last run went through generated code.
    """

    passed: int = 0
    generated: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.passed + len(self.failures)

    def fail(self, number: int, error: Exception) -> None:
        text = str(error).strip().splitlines()
        self.failures.append(
            f"sample {number}: {type(error).__name__}: {text[0] if text else ''}"[:300]
        )


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def operators() -> list[OpInfo]:
    """Every entry that takes a dtype of ours: float32 if it does."""
    return [op for op in op_db if dtype_of(op) is not None]


def dtype_of(op: OpInfo) -> torch.dtype | None:
    supported = op.supported_dtypes("cpu")
    order = (torch.float32, torch.complex64, torch.int64, torch.bool)
    return next((dtype for dtype in order if dtype in supported), None)


def with_gradient(op: OpInfo) -> bool:
    return bool(op.supports_autograd) and bool(dtype_of(op).is_floating_point)


def samples(op: OpInfo, grad: bool, limit: int | None) -> Iterator[SampleInput]:
    torch.manual_seed(0)
    yield from itertools.islice(op.sample_inputs("cpu", dtype_of(op), requires_grad=grad), limit)


def copied(value: Any) -> Any:
    """The same arguments in new tensors, so that writes into them touch nothing else."""
    return _mapped(value, torch.clone)


def moved(value: Any) -> Any:
    """The same arguments on device lazygt."""
    source, args, kwargs = _mapped(value, lambda t: t.to("lazygt"))
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": "lazygt"}
    return source, args, kwargs


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Tensors that were one stay one."""
    known: dict[int, Tensor] = {}

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) not in known:
            known[id(t)] = change(t.detach()).requires_grad_(t.requires_grad)
        return known[id(t)]

    return tree_map(leaf, value)


def call(op: OpInfo, sample: SampleInput, on: Callable[[Any], Any]) -> tuple[Any, list[Tensor]]:
    """The op's result and the leaves that want a gradient."""
    arguments = on((sample.input, sample.args, sample.kwargs))
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(1)
    value, args, kwargs = arguments
    return op(value, *args, **kwargs), leaves


def _slope(t: Tensor) -> Tensor:
    slope = torch.linspace(-1.3, 1.1, t.numel(), device="cpu").reshape(t.shape)
    return slope.to(t.device, t.dtype)


def gradients(op: OpInfo, sample: SampleInput, result: Any, leaves: list[Tensor]) -> list[Any]:
    """Gradients of all that the op returned, under cotangents of both signs."""
    outputs = sample.output_process_fn_grad(result)
    ends = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if not ends or not leaves:
        return []
    with streams.unseen():
        slopes = [_slope(t) for t in ends]
    return list(torch.autograd.grad(ends, leaves, slopes, allow_unused=True))


def outcome(op: OpInfo, sample: SampleInput, grad: bool, on: Callable[[Any], Any]) -> Any:
    """What a test of the op looks at: its result, or its gradients."""
    result, leaves = call(op, sample, on)
    return gradients(op, sample, result, leaves) if grad else result


def fetched(result: Any) -> list[Any]:
    """All leaves of a result, tensors on the CPU."""
    return [t.detach().cpu() if isinstance(t, Tensor) else t for t in tree_leaves(result)]


def compare(op: OpInfo, ours: list[Any], theirs: list[Any]) -> None:
    """Raise unless all bits agree."""
    compare_metas(ours, theirs)
    if op.name in UNWRITTEN:
        return
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor) and b.layout == torch.strided:
            assert_same_bits(a, b)
        elif isinstance(b, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True)
        else:
            assert a == b or (a != a and b != b), f"{a!r} instead of {b!r}"


def compare_metas(ours: list[Any], theirs: list[Any]) -> None:
    """Raise unless shapes and dtypes agree."""

    def meta(value: Any) -> Any:
        return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)

    assert [meta(a) for a in ours] == [meta(b) for b in theirs]


def eager(op: OpInfo, sample: SampleInput, grad: bool) -> list[Any] | None:
    """What eager torch gives; None where it refuses the sample itself."""
    try:
        return fetched(outcome(op, sample, grad, copied))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def check(op: OpInfo, grad: bool, limit: int | None) -> Tally:
    """Run an op's samples, in a session of their own."""
    tally = Tally()
    with warnings.catch_warnings(), generated_code() as generated:
        warnings.simplefilter("ignore")
        known = [(sample, eager(op, sample, grad)) for sample in samples(op, grad, limit)]
        with lazygt.session(launcher="inline", compile="off"):
            for number, (sample, expected) in enumerate(known):
                if expected is None:
                    continue
                before = len(generated)
                try:
                    for _ in range(RUNS):
                        compare(op, fetched(outcome(op, sample, grad, moved)), expected)
                    tally.passed += 1
                    tally.generated += len(generated) > before
                except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                    tally.fail(number, error)
    return tally


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """The plans that code is generated for, by name."""
    names: list[str] = []
    generate = eager_executor.generate

    def noted(schedule: Any, careful: Any, name: str) -> Any:
        names.append(name)
        return generate(schedule, careful, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_executor, "generate", noted)
        yield names


def infer(op: OpInfo, grad: bool, limit: int | None) -> Tally:
    """Record an op's samples for GPUs that are not there: the metas that eager torch's have."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = [(sample, eager(op, sample, grad)) for sample in samples(op, grad, limit)]
        with lazygt.session(launcher="dry", device="cuda"):
            for number, (sample, expected) in enumerate(known):
                if expected is None:
                    continue
                try:
                    ours = tree_leaves(outcome(op, sample, grad, moved))
                    compare_metas(ours, expected)
                    tally.passed += 1
                except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                    tally.fail(number, error)
    return tally
