"""Rows of the table, and the comparison of two devices' outcomes that gives most of them."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lazygt
from tests.support.bits import assert_same_bits

Make = Callable[[str], Any]
#: The tensors that a program gives, on the CPU, or the error that it raises.
Outcome = list[Tensor] | str
BITS, BOTH_RAISE = "eager's bits", "both raise"
#: Relative error of a result in another order of additions, float32.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        figure: with its unit.
        beside: the ratio to a peer.
        goal: bound of the figure or the ratio; empty: none.
        met: None without a goal.
    """

    case: str
    figure: str
    beside: str = ""
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Goal:
    """Bound of a ratio to a peer. It is meant for GPUs: rows of a CPU have the ratio alone."""

    peer: str
    bound: float
    at_least: bool = False

    def row(self, case: str, figure: str, ratio: float | None, device: str) -> Row:
        """Row of a figure that is ``ratio`` times the peer's; None: the peer has none."""
        if ratio is None:
            return Row(case, figure, f"no figure of {self.peer}")
        beside = f"{ratio:.2f}x {self.peer}"
        if device == "cpu":
            return Row(case, figure, beside)
        met = ratio >= self.bound if self.at_least else ratio <= self.bound
        return Row(case, figure, beside, f"{'>=' if self.at_least else '<='} {self.bound:g}x", met)


def text_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:150]}"


def outcome(make: Make, device: str) -> Outcome:
    """Run a program on a device, from the same seed each time."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leaves = tree_leaves(make(device))
        return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, Tensor)]
    except Exception as error:  # noqa: BLE001 - an error is an outcome, too
        return text_of(error)


def difference(ours: Outcome, theirs: Outcome) -> str:
    """The way in which lazygt's outcome differs from eager's; a relative error as a number."""
    if isinstance(ours, str) and isinstance(theirs, str):
        return BOTH_RAISE
    metas = _described(ours), _described(theirs)
    if isinstance(ours, str) or isinstance(theirs, str) or metas[0] != metas[1]:
        return f"lazygt: {metas[0]}; eager: {metas[1]}"
    worst = max((_error(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    return f"{worst:.1e}" if worst else BITS


def _described(outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return outcome
    metas = [f"{str(t.dtype).removeprefix('torch.')}{[*t.shape]}" for t in outcome]
    return ", ".join(metas) or "nothing"


def _error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``; infinite where only one is a number."""
    a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))
    try:
        assert_same_bits(a, b)
    except AssertionError:
        kind = torch.complex128 if b.is_complex() else torch.float64
        a, b = a.to(kind), b.to(kind)
        same = (a == b) | (a.isnan() & b.isnan())
        error = ((a - b)[~same].norm() / b[b.isfinite()].norm().clamp(min=1e-30)).item()
        return max(error, 1e-30) if error == error else float("inf")  # 1e-30: the sign of a zero
    return 0.0


def differences(cases: Mapping[str, Make], device: str) -> dict[str, str]:
    """Differences by case: all on eager's device first, then all in one session."""
    theirs = {name: outcome(make, device) for name, make in cases.items()}
    with lazygt.session(compile="off", tracing=lazygt.Tracing(default_device=False)):
        return {
            name: difference(outcome(make, "lazygt"), theirs[name]) for name, make in cases.items()
        }


def agreement(cases: Mapping[str, str], tolerance: float = ROUNDING) -> Iterator[Row]:
    """A row for each difference above the tolerance, and one for all cases together."""
    equal = [name for name, text in cases.items() if text in {BITS, BOTH_RAISE}]
    near = [name for name, text in cases.items() if _number(text) <= tolerance]
    for name, text in cases.items():
        if name not in {*equal, *near}:
            yield Row(name, text, goal=f"<= {tolerance:g}", met=False)
    raising = sum(text == BOTH_RAISE for text in cases.values())
    notes = {f"{len(near)} within {tolerance:g}": near, f"{raising} raise on both": raising}
    beside = ", ".join(note for note, count in notes.items() if count)
    met = len(equal) + len(near) == len(cases)
    yield Row("all", f"{len(equal)} of {len(cases)} equal", beside, "all", met)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")
