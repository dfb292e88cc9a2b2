"""How many of torch's ops can be sharded: what its operator database calls, and how it may run.

Entries are run on their first samples, forward and backward. Of the aten overloads that they call
those count that take a tensor with something to cut, do not draw, and whose results' sizes do not
depend on values. One is covered when a call of it has a strategy besides the one that has every
tensor whole: by hand, where it has a rule of its own or is pointwise, or derived.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Report, parser
from lazygt.errors import GraphError
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, ref
from lazygt.graph.ops import facts
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules import DERIVED, rules_of, strategies_of
from lazygt.passes.sharding.rules.strategy import shardable_dims

#: Samples of an entry, and calls of an overload that are looked at until one is covered.
SAMPLES, CALLS = 3, 6
PARTS = 2
_PLACES = ("device", "layout", "pin_memory")


class Call(NamedTuple):
    """One call of an overload, as a node of its own."""

    node: Node
    metas: tuple[TensorMeta | None, ...]

    @property
    def is_covered(self) -> bool:
        return len(strategies_of(self.node, self.metas, PARTS)) > 1


class _Calls(TorchDispatchMode):
    """Notes the calls of overloads that count."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        super().__init__()
        self._wanted = wanted
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: arg for name, arg in (kwargs or {}).items() if name not in _PLACES}
        f = facts(func)
        if f.name.startswith("aten.") and not f.random and not f.dynamic and self._wanted(f.name):
            call = _call(f.name, args, named)
            if call is not None:
                self.calls.append(call)
        return func(*args, **(kwargs or {}))


def _call(op: str, args: Any, kwargs: dict[str, Any]) -> Call | None:
    """The call as a node; None where there is nothing to cut, or no graph can say it."""
    tensors: list[torch.Tensor] = []

    def value(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
            return ref(len(tensors) - 1)
        return tuple(map(value, arg)) if isinstance(arg, (list, tuple)) else arg

    places, named = tuple(map(value, args)), {name: value(arg) for name, arg in kwargs.items()}
    if any(t.layout != torch.strided for t in tensors):
        return None
    metas = [TensorMeta.of(t) for t in tensors]
    if not any(shardable_dims(meta.shape) for meta in metas):
        return None
    build = Builder(metas, axis="all", parts=1, index=0)
    try:
        build.node(op, places, tuple(named.items()))
    except (GraphError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return Call(build.nodes[0], tuple(build.metas))


def calls(
    entries: int | None, wanted: Callable[[str], bool], stopped: Counter[str]
) -> Iterator[Call]:
    """What the first entries of the database call, of the overloads that are wanted.

    Counts in ``stopped`` the samples, by the name of their entry, that do not run to their end:
    this build of torch has no kernel, or modes are refused.
    """
    for op in islice((op for op in op_db if _runs(op)), entries):
        for sample in islice(_samples(op), SAMPLES):
            seen = _Calls(wanted)
            try:
                with seen:
                    _backward(op(sample.input, *sample.args, **sample.kwargs))
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError):
                stopped[op.name] += 1
            yield from seen.calls


def _runs(op: Any) -> bool:
    return torch.float64 in op.dtypes and not op.name.startswith("jiterator")  # for GPUs alone


def _samples(op: Any) -> Iterator[Any]:
    differentiable = torch.float64 in op.supported_backward_dtypes("cpu") and op.supports_autograd
    yield from op.sample_inputs("cpu", torch.float64, requires_grad=differentiable)


def _backward(made: Any) -> None:
    """From the sum of all that has a gradient, if anything has."""
    results = made if isinstance(made, (list, tuple)) else [made]
    sums = [t.sum() for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()


class Coverage(NamedTuple):
    """Overloads by what they have.

    Attributes:
        by_hand: a rule of their own, or they are pointwise.
        derived: strategies from torch's decomposition alone.
        without: none.
        stopped: samples that did not run to their end, by entry of the database.
    """

    by_hand: tuple[str, ...]
    derived: tuple[str, ...]
    without: tuple[str, ...]
    stopped: Counter[str]

    @property
    def count(self) -> int:
        return len(self.by_hand) + len(self.derived) + len(self.without)

    @property
    def share(self) -> float:
        """Of those that have a strategy."""
        return 1 - len(self.without) / self.count


def coverage(entries: int | None = None) -> Coverage:
    """Of what the first entries of the database call; of all of them by default."""
    covered: dict[str, bool] = {}
    looked: Counter[str] = Counter()
    stopped: Counter[str] = Counter()

    def wanted(op: str) -> bool:
        return not covered.get(op) and looked[op] < CALLS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of samples
        for call in calls(entries, wanted, stopped):
            op = call.node.op
            if wanted(op):
                looked[op] += 1
                covered[op] = call.is_covered
    having = sorted(op for op, is_covered in covered.items() if is_covered)
    derived = tuple(op for op in having if DERIVED in rules_of(op))
    return Coverage(
        tuple(op for op in having if DERIVED not in rules_of(op)),
        derived,
        tuple(sorted(op for op, is_covered in covered.items() if not is_covered)),
        stopped,
    )


def measure(args: argparse.Namespace) -> Report:
    covered = coverage(args.entries)
    report = Report(
        "rule_coverage",
        f"aten overloads that torch's operator database calls: {covered.count}",
        ["strategies", "overloads", "share"],
    )
    for name, ops in (("by hand", covered.by_hand), ("derived", covered.derived),
                      ("none", covered.without)):  # fmt: skip
        report.add(name, str(len(ops)), f"{len(ops) / covered.count:.1%}")
    if covered.stopped:
        samples = f"{covered.stopped.total()} samples did not run to their end"
        report.remarks.append(f"{samples}: {', '.join(sorted(covered.stopped))}")
    report.remarks.append(
        f"without: {', '.join(op.removeprefix('aten.') for op in covered.without)}"
    )
    return report


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--entries", type=int, help="of the database, from its start")
    args = options.parse_args()
    torch.manual_seed(0)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
