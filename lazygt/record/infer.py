"""Inference of an op's results: by a shape rule, or by a run on meta tensors.

Rules are in ``graph.shapes``. A run (``graph.shapes.meta_run``) happens once for each signature;
an LRU cache keeps its results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lazygt.graph.alias import op_facts
from lazygt.graph.meta import TensorMeta, intern, typed_key
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.graph.ops import OpFacts
from lazygt.graph.shapes import Shapes
from lazygt.graph.shapes.meta_run import cpu_error, run_on_metas
from lazygt.graph.shapes.rules import Results
from lazygt.graph.source import with_line
from lazygt.record.trie import TraceTrie, TrieNode

_LIMIT = 50_000
#: (op, args, kwargs, metas of the Refs, values of the Params).
_Call = tuple[
    OpFacts, tuple[Arg, ...], tuple[tuple[str, Arg], ...], dict[int, TensorMeta], list[Any]
]


class Inference:
    """Rules, and a bounded cache of inferred results.

    Args:
        device_type: type of the device that the workers compute on.

    Attributes:
        quick, runs: number of answers by a rule, and of runs of a meta kernel.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._shapes = Shapes()
        self._cache: OrderedDict[Any, Results | None] = OrderedDict()
        #: corrections by workers; the same signature is never corrected twice
        self._corrected: dict[Any, Results] = {}
        self.quick = self.runs = 0

    def results(
        self,
        f: OpFacts,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        metas: dict[int, TensorMeta],
        params: list[Any],
    ) -> Results | None:
        """Return the metas of an op's results; None when only values can tell.

        Args:
            args, kwargs: the arguments, with Ref for tensors and Param for run-time numbers.
            metas: the meta of every Ref.
            params: the value of every Param.

        Raises:
            Exception: torch's own, when the op does not take such arguments. It names the user's
                line; on CPU workers it is the one that eager torch raises.
        """
        by_rule = self.by_rule(f, args, kwargs, metas, params)
        if by_rule is not None:
            return by_rule
        key = _key(f, args, kwargs, metas, params)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        self.runs += 1
        results = self._run(f, args, kwargs, metas, params)
        self._cache[key] = results
        if results is not None:
            self._shapes.learn(f, args, kwargs, metas, params, results)
        if len(self._cache) > _LIMIT:
            self._cache.popitem(last=False)
        return results

    def by_rule(
        self,
        f: OpFacts,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        metas: dict[int, TensorMeta],
        params: list[Any],
    ) -> Results | None:
        """Return the results if no meta kernel has to run for them, else None; raise nothing."""
        if self._corrected:
            corrected = self._corrected.get(_key(f, args, kwargs, metas, params))
            if corrected is not None:
                return corrected
        results = self._shapes.results(f, args, kwargs, metas, params)
        self.quick += results is not None
        return results

    def correct(self, node: Node, graph: Graph, strides: Mapping[int, tuple[int, ...]]) -> bool:
        """Note the strides that a kernel gave to results of a node.

        Args:
            strides: fresh result -> its strides.

        Returns:
            True if other strides were inferred before.
        """
        f = op_facts(node)
        if f is None or len(self._corrected) >= _LIMIT:
            return False
        values = graph.values
        metas = {n: meta for n in node.refs() if (meta := values[n]) is not None}
        params = [_NAMED[kind] for kind in graph.params]
        key = _key(f, node.args, node.kwargs, metas, params)
        if key in self._corrected:
            return False
        inferred = self.results(f, node.args, node.kwargs, metas, params)
        if inferred is None:
            return False
        results = list(inferred.fresh)
        for position, stride in strides.items():
            meta = results[position]
            if meta is not None:
                results[position] = intern(meta.shape, stride, meta.dtype)
        self._corrected[key] = inferred._replace(fresh=tuple(results))
        return tuple(results) != inferred.fresh

    def _run(
        self,
        f: OpFacts,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        metas: dict[int, TensorMeta],
        params: list[Any],
    ) -> Results | None:
        """Run the op on meta tensors; an exception is torch's own, with the user's line."""
        call = f, args, kwargs, metas, params
        try:
            return run_on_metas(*call, self._device_type)
        except Exception as error:  # noqa: BLE001 - each is raised again
            raise self._refusal(error, call) from None

    def _refusal(self, error: Exception, call: _Call) -> Exception:
        """Return torch's refusal on the workers' device, with the user's line."""
        refusal = cpu_error(*call) if self._device_type == "cpu" else None
        refusal = refusal or error
        refusal.args = (with_line(str(refusal)),)
        return refusal.with_traceback(None)


#: Type of a graph's params -> a sample.
SAMPLES: dict[type, Any] = {int: 1, float: 1.0, bool: True, complex: 1j}
_NAMED = {kind.__name__: sample for kind, sample in SAMPLES.items()}


def _key(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: dict[int, TensorMeta],
    params: list[Any],
) -> tuple[Any, ...]:
    """Return the cache key: all that an op's results are inferred from."""
    return f, _signature(args, metas, params), _signature(kwargs, metas, params)


def _signature(arg: Arg, metas: dict[int, TensorMeta], params: list[Any]) -> Any:
    """Return an argument in a cache key: a Ref's meta, a Param's type, else the constant."""
    kind = type(arg)
    if kind is Ref:
        return metas[arg.index]
    if kind is Param:
        return type(params[arg.index])
    if kind is tuple:
        return tuple(_signature(item, metas, params) for item in arg)
    return typed_key(arg)


# -- corrected strides -----------------------------------------------------------------------------
# A worker compares the results of a plan's first run with the recorded metas. A result with other
# strides retains its kernel's layout, so that later sums have eager torch's bits, unless a later
# view needs the recorded strides (``runtime.executors.interpreter``); outputs have the recorded
# layout. The worker reports the strides; the client infers those from then on, and removes the
# steps that were recorded with others, which are recorded again.

#: (node of a plan's steps, result, strides of its kernel).
Relaid = tuple[int, int, tuple[int, ...]]


class _Stale(NamedTuple):
    """Result that was recorded with other strides than the kernel's."""

    op: str
    position: int
    meta: TensorMeta | None


def apply_stride_reports(
    inference: Inference, trie: TraceTrie, reports: Iterable[tuple[Graph, Iterable[Relaid]]]
) -> list[Any]:
    """Apply the workers' reports of strides; called only while nothing is recorded.

    Later results are inferred with the reported strides, and the steps that were recorded with
    others are removed from the trie.

    Args:
        reports: (graph of a plan's steps, results with other strides).

    Returns:
        The plans that are invalid now.
    """
    stale: set[_Stale] = set()
    for graph, results in reports:
        stale |= _corrected(inference, graph, results)
    if not stale:
        return []

    def is_stale(step: TrieNode) -> bool:
        node = step.node
        return node is not None and any(
            _Stale(node.op, position, meta) in stale for position, meta in enumerate(node.fresh)
        )

    return trie.remove_stale(is_stale)


def _corrected(inference: Inference, graph: Graph, results: Iterable[Relaid]) -> set[_Stale]:
    """Correct the inference of a plan's nodes; return the results recorded with wrong strides."""
    by_node: dict[int, dict[int, tuple[int, ...]]] = {}
    for number, position, strides in results:
        by_node.setdefault(number, {})[position] = strides
    stale = set()
    for number, strides_of in by_node.items():
        node = graph.nodes[number]
        if inference.correct(node, graph, strides_of):
            stale |= {_Stale(node.op, position, node.fresh[position]) for position in strides_of}
    return stale
