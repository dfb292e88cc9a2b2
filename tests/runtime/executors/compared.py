"""Code that runs everything twice, native and generated, and compares what can be told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lazygt import native
from lazygt.runtime.executors.interpreter import CheckedInterpreter, Stopped
from lazygt.runtime.executors.kernels import clone
from lazygt.runtime.executors.lowering import GeneratedCode
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Value
from lazygt.runtime.worker import shipped_plans
from tests.support.bits import assert_same_bits

needs_native = pytest.mark.skipif(native.load().module is None, reason=native.load().reason)


class ComparedCode:
    """Gives what native code gives, once that is what generated code gives.

    Inputs that it writes without owning them would be seen by whoever holds them, so they are
    compared, too.

    Args:
        bits: False: the plan shows memory that nobody has written, so only draws are compared.
    """

    def __init__(
        self, schedule: Schedule, interpreter: CheckedInterpreter, name: str, bits: bool = True
    ) -> None:
        self.bits = bits
        self.native = NativeCode(schedule, interpreter, name)
        self.generated = GeneratedCode(schedule, interpreter, name)

    def run(self, inputs: list[Value], params: tuple[Any, ...]) -> list[Value] | Stopped:
        mine, copies = list(inputs), [clone(value) for value in inputs]  # type: ignore[arg-type]
        generator = torch.default_generator  # torch.set_rng_state is the session's here
        before = generator.get_state()
        expected = self.generated.run(list(copies), params)
        drawn = generator.get_state()
        generator.set_state(before)
        outcome = self.native.run(inputs, params)
        assert inputs == []
        assert torch.equal(generator.get_state(), drawn), "other numbers were drawn"
        if self.bits:
            assert_same(outcome, expected)
            assert_same_values(mine, copies)
        return outcome


def assert_same(ours: list[Value] | Stopped, theirs: list[Value] | Stopped) -> None:
    """Raise unless both gave the same, or stopped at the same node with the same values."""
    if isinstance(theirs, Stopped):
        assert isinstance(ours, Stopped)
        assert ours.node == theirs.node
        # native code also names values that are dead: as None
        assert theirs.values.keys() <= ours.values.keys()
        assert all(ours.values[key] is None for key in ours.values.keys() - theirs.values.keys())
        ours, theirs = [ours.values[key] for key in theirs.values], list(theirs.values.values())
    assert isinstance(ours, list)
    assert_same_values(ours, theirs)


def assert_same_values(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if a is not None and not b._is_zerotensor():
            assert (a.stride(), a.is_conj(), a.is_neg()) == (b.stride(), b.is_conj(), b.is_neg())
            assert_same_bits(a, b)


@contextmanager
def comparing(bits: bool = True) -> Iterator[list[str]]:
    """Plans of inline sessions run as compared code meanwhile; the names of those that do."""
    names: list[str] = []

    def make(schedule: Schedule, interpreter: CheckedInterpreter, name: str) -> Any:
        names.append(name)
        if native.load().module is None:
            return GeneratedCode(schedule, interpreter, name)
        return ComparedCode(schedule, interpreter, name, bits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped_plans, "code_of", lambda executor: make)
        yield names
