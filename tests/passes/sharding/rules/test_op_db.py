"""Every strategy of every aten call that torch's operator database leads to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazygt.graph.ops import facts
from lazygt.passes.sharding.rules import has_rule
from tests.passes.sharding.rules.blocks import Tensor
from tests.passes.sharding.rules.harness import Case
from tests.support.operators import op_db
from tests.support.timeouts import DEEP

SAMPLES, CALLS, ELEMENTS = 6, 12, 4000
#: One of so many entries of the database is taken.
APART = 1 if DEEP else 4
#: as_strided looks past its operand into memory that a copy of it does not have.
LEFT_OUT = ("empty", "as_strided", "resize")
PLACES = ("device", "layout", "pin_memory")


class Seen(TorchDispatchMode):
    """Keeps the calls of ops with rules, with copies of their tensors as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, f = str(func), facts(func)
        if has_rule(name) and not f.random and not f.dynamic and len(self.calls) < CALLS:
            rest = {k: copied(v) for k, v in (kwargs or {}).items() if k not in PLACES}
            self.calls.append((name, copied(args), rest))
        return func(*args, **(kwargs or {}))


def copied(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.detach().clone()
    return [copied(item) for item in arg] if isinstance(arg, (list, tuple)) else arg


def tensors(arg: Any) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    return [t for item in arg for t in tensors(item)] if isinstance(arg, (list, tuple)) else []


def fits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    found = tensors([args, list(kwargs.values())])
    small = all(t.layout == torch.strided and t.numel() <= ELEMENTS for t in found)
    return small and not any(part in name for part in LEFT_OUT)


def calls() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for op in op_db[::APART]:
        if torch.float64 not in op.dtypes or op.name.startswith("jiterator"):
            continue
        for sample in islice(op.sample_inputs("cpu", torch.float64), SAMPLES):
            seen = Seen()
            try:
                with seen:
                    op(sample.input, *sample.args, **sample.kwargs)
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # not for this build of torch, or not for modes
            yield from (call for call in seen.calls if fits(*call))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_every_row_of_the_operator_database() -> None:
    torch.manual_seed(0)
    seen: set[Any] = set()
    checked = 0
    for name, args, kwargs in calls():
        case = Case(name.removeprefix("aten."), *args, **kwargs)
        key = (str(case.node), tuple(case.metas))
        if key in seen:
            continue
        seen.add(key)
        for strategy in case.strategies(3):
            case.check(3, strategy)
            checked += 1
    assert checked > 8000 // APART
