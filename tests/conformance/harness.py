"""torch's own operator database, run on device lazygt against eager torch on a CPU.

Each sample runs three times: first its ops are recorded and its plan runs checked, node by node;
then the plan is found again; from then on its code runs, native and generated. The ops of the first
run are compared with those of eager torch, and they are recorded for GPUs that this machine need
not have.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import lazygt
from tests.conformance import streams
from tests.conformance.refusals import UNWRITTEN
from tests.conformance.streams import Stream, differences
from tests.runtime.executors.compared import comparing
from tests.support.bits import assert_same_bits
from tests.support.operators import op_db

Tensor = torch.Tensor
RUNS = 3
REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)


@dataclass
class Tally:
    """Samples that agree bit for bit in every run, and how the others do not.

    Attributes:
        coded: samples whose last run went through code.
    """

    passed: int = 0
    coded: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.passed + len(self.failures)

    def fail(self, number: int, error: Exception) -> None:
        text = str(error).strip().splitlines()
        self.failures.append(
            f"sample {number}: {type(error).__name__}: {text[0] if text else ''}"[:300]
        )


@dataclass
class Findings:
    """What was found of an op's samples.

    Attributes:
        bits: of three runs, against eager torch's.
        metas: shapes and dtypes, recorded for GPUs that are not there.
        differences: the ops recorded that eager torch does not run, and the other way round; of
            the first sample that has any.
    """

    bits: Tally = field(default_factory=Tally)
    metas: Tally = field(default_factory=Tally)
    differences: Stream = field(default_factory=Stream)


#: Number, sample, and what eager torch gives: its results and its ops.
Accepted = tuple[int, SampleInput, list[Any], Stream]


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


def moved(value: Any, device: str = "lazygt") -> Any:
    """The same arguments on a device."""
    source, args, kwargs = _mapped(value, lambda t: t.to(device))
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": device}
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


def eager(op: OpInfo, sample: SampleInput, grad: bool) -> tuple[list[Any], Stream] | None:
    """What eager torch gives and the ops that it runs; None where it refuses the sample itself."""
    try:
        result, stream = _watched(streams.eager, op, sample, grad, copied)
        return fetched(result), stream
    except REFUSED:
        return None


def _watched(
    watch: Callable[..., tuple[Any, Stream]],
    op: OpInfo,
    sample: SampleInput,
    grad: bool,
    on: Callable[[Any], Any],
) -> tuple[Any, Stream]:
    """The outcome of a sample, and its ops without those that bring its arguments."""
    arguments = on((sample.input, sample.args, sample.kwargs))
    return watch(lambda: outcome(op, sample, grad, lambda _: arguments))


def walk(op: OpInfo, grad: bool, limit: int | None) -> Findings:
    """Everything that is asked of an op's samples; each is made once, and run eagerly once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = enumerate(samples(op, grad, limit))
        known = [(number, sample, eager(op, sample, grad)) for number, sample in drawn]
        accepted = [(number, sample, *each) for number, sample, each in known if each is not None]
        findings = Findings()
        _run(op, grad, accepted, findings)
        _infer(op, grad, accepted, findings.metas)
    return findings


def _run(op: OpInfo, grad: bool, accepted: Sequence[Accepted], findings: Findings) -> None:
    """Run the samples in a session of their own, and look at the ops of the first run."""
    tally = findings.bits
    with (
        comparing(op.name not in UNWRITTEN) as coded,
        lazygt.session(launcher="inline", compile="off"),
    ):
        for number, sample, expected, stream in accepted:
            before = len(coded)
            try:
                first, recorded = _watched(streams.recorded, op, sample, grad, moved)
                findings.differences = findings.differences or differences(recorded, stream)
                compare(op, fetched(first), expected)
                del first
                for _ in range(RUNS - 1):
                    compare(op, fetched(outcome(op, sample, grad, moved)), expected)
                tally.passed += 1
                tally.coded += len(coded) > before
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                tally.fail(number, error)


def _infer(op: OpInfo, grad: bool, accepted: Sequence[Accepted], tally: Tally) -> None:
    """Record the samples for GPUs that are not there: the metas that eager torch's have."""
    with lazygt.session(launcher="dry", device="cuda"):
        for number, sample, expected, _ in accepted:
            try:
                compare_metas(tree_leaves(outcome(op, sample, grad, moved)), expected)
                tally.passed += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                tally.fail(number, error)
