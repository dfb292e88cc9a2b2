"""The checked interpreter: runs node by node, checks results and contains failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lazygt.errors import GraphError, kind_of
from lazygt.graph.alias import COPY, DONE, WRITE_BACK, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref, map_arg, params_in
from lazygt.graph.ops import OPAQUE_RESULTS, OpFacts, facts, overload, undispatched
from lazygt.graph.placement import COLLECTIVE_OPS, COLLECTIVES, POINT_TO_POINT, WAIT
from lazygt.runtime import kernels
from lazygt.runtime.collectives import group
from lazygt.runtime.messages import COLLECTIVE_ERROR, Failure
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Failed, Value

# -- strides of kernels in the place of recorded ones, for as long as a plan runs ------------------
# The strides determine the order in which kernels sum: a restrided result gives later sums other
# last bits than eager torch. A result keeps its kernel's strides if every later view of it, and
# of values that share its memory, exists for those strides too and names no strides itself.

#: (node, returned) -> the tensors that a node returns anew.
Fresh = Callable[[Node, Any], list[Any]]


def lies_as(value: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether each element is at the offset that ``meta`` gives it, in any strides."""
    return value.numel() <= 1 or meta.lies_as(value.stride())


def may_stay(graph: Graph, number: int, slot: int, value: torch.Tensor, fresh: Fresh) -> bool:
    """Return whether a result of node ``number`` may keep its strides in the rest of the plan."""
    sharing = {slot: TensorMeta.of(value).empty("meta")}
    with undispatched(), torch.no_grad():
        try:
            return all(
                _follows(graph, node, results, sharing, fresh)
                for later, (node, results) in enumerate(graph.numbered())
                if later > number and not sharing.keys().isdisjoint(node.refs())
            )
        except Exception:  # noqa: BLE001 - torch has no such view of it
            return False


def _follows(
    graph: Graph, node: Node, results: range, sharing: dict[int, torch.Tensor], fresh: Fresh
) -> bool:
    """Return whether a node takes values with their strides; add its views of them.

    Args:
        sharing: number -> meta tensor, of the values that share the memory in question.

    Raises:
        Exception: torch's own, if a view does not exist.
    """
    if node.op == WRITE_BACK:
        base, chain = node.args[0].index, node.args[2]
        if base not in sharing:
            return True  # only its elements are copied
        sharing[results[0]] = sharing[base]
        kernels.viewed(sharing[base], chain)
        return not params_in(chain) and not any(_strided(facts(overload(s[0]))) for s in chain)
    f = op_facts(node)
    if f is None or f.foreign:
        return False  # collectives and compiled code take the recorded strides
    for target, version in zip(node.writes, results[len(node.fresh) :], strict=True):
        if target in sharing:
            sharing[version] = sharing[target]
    if f.aliases:
        views = fresh(node, _viewed(graph, node, f, sharing))
        sharing.update(zip(results, views, strict=False))
    return not (f.aliases and _strided(f))


def _strided(f: OpFacts) -> bool:
    """Return whether a view op takes strides."""
    return any(argument.name == "stride" for argument in f.func._schema.arguments)


def _viewed(graph: Graph, node: Node, f: OpFacts, sharing: dict[int, torch.Tensor]) -> Any:
    """Return a view op's results on meta tensors."""

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            meta = graph.values[arg.index]
            assert meta is not None
            return sharing.get(arg.index, meta.empty("meta"))
        return torch.device("meta") if arg is DEVICE else arg

    args = [map_arg(arg, leaf) for arg in node.args]
    return f.func(*args, **{name: map_arg(arg, leaf) for name, arg in node.kwargs})


# -- the checked interpreter: runs node by node, checks results and contains failures --------------

#: For each return of a node: the number of its value, the numbers of a list's, or None: not new.
Places = list[int | list[int] | None]


class Stopped(NamedTuple):
    """The point at which code has stopped: the interpreter takes over at ``node``.

    Attributes:
        values: the values at that moment.
        made: the node's results are there, and not as promised.
    """

    node: int
    values: dict[int, Value]
    made: bool = False


class CheckedInterpreter:
    """Interpreter of a schedule.

    Args:
        compiled: number of a fused node that is one step -> its callable.

    Attributes:
        compiled: as given.
        restrided: node number -> positions of results that are copied to the recorded strides.
        relaid_outputs: position of an output that is copied so -> its strides.
        relaid: (node number, result, strides that its kernel gave it) of such results, found since
            the worker looked last.
        returned, written: of the data-dependent last node of the last run.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        compiled: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:
        self.schedule, self.device = schedule, device
        self.restrided: dict[int, tuple[int, ...]] = {}
        self.relaid_outputs: dict[int, tuple[int, ...]] = {}
        self.relaid: list[tuple[int, int, tuple[int, ...]]] = []
        #: values with other strides than were recorded
        self._loose: set[int] = set()
        self.returned: Any = None
        self.written: list[Any] = []
        self._results = [results for _, results in schedule.graph.numbered()]
        self.compiled = compiled or {}
        self._kernels: dict[str, Callable[..., Any]] = {}

    @property
    def lays_out(self) -> bool:
        """True if some value has to be copied to other strides in each run."""
        return bool(self.restrided or self.relaid_outputs)

    def kernel(self, number: int, op: str) -> Callable[..., Any]:
        """Return the callable of a node."""
        kernel = self.compiled.get(number) or self._kernels.get(op)
        if kernel is None:
            kernel = kernels.kernel(op)
            # the builtin behind an overload saves a Python call a node
            kernel = self._kernels[op] = getattr(kernel, "_op", kernel)
        return kernel

    @staticmethod
    def output_kinds(node: Node) -> tuple[str, ...]:
        """Return one letter for each return (see ``graph.ops``)."""
        f = op_facts(node)
        if f is not None:
            return f.outputs
        return ("f",) * len(node.fresh)

    def places(self, node: Node, results: range) -> Places:
        """Return the values that a node's returns become; empty if nothing new is returned."""
        kinds = self.output_kinds(node)
        fresh = list(results[: len(node.fresh)])
        singles = sum(1 for kind in kinds if kind in ("f", "v"))
        places: Places = []
        for kind in kinds if fresh else ():
            if kind[0] in "wi":
                places.append(None)
            elif kind in ("f", "v"):
                places.append(fresh.pop(0))
                singles -= 1
            else:
                taken = len(fresh) - singles
                places.append(fresh[:taken])
                del fresh[:taken]
        return places

    def run(
        self, values: dict[int, Value], params: tuple[Any, ...], start: int, check: bool
    ) -> list[Failure]:
        """Run from node ``start`` on; results land in ``values``. Return the failures."""
        failures: list[Failure] = []
        self.returned, self.written = None, []
        #: while nothing has failed, nodes need no check for failed operands
        failed = any(type(value) is Failed for value in values.values())
        for number in range(start, len(self.schedule.graph.nodes)):
            node, results = self.schedule.graph.nodes[number], self._results[number]
            poison = _poison(node, values) if failed else None
            if poison is None:
                try:
                    self._node(number, node, results, values, params, check)
                except Exception as error:  # noqa: BLE001 - reported to the client
                    failure = _failure(number, node, error)
                    failures.append(failure)
                    poison, failed = Failed(failure), True
            if poison is not None:
                self._spoil(node, results, poison, values, failures)
            for dead in self.schedule.frees[number]:
                values.pop(dead, None)
        return failures

    def step(
        self, number: int, values: dict[int, Any], params: tuple[Any, ...], check: bool = True
    ) -> None:
        """Run one node, and drop the values that die there; raises the node's error.

        Args:
            check: compare its results with the recorded ones; False: restride them as an earlier
                check has found necessary.
        """
        node, results = self.schedule.graph.nodes[number], self._results[number]
        self._node(number, node, results, values, params, check)
        self.relaid.clear()  # the client was told when the plan ran first
        for position in () if check else self.restrided.get(number, ()):
            meta, result = node.results[position], results[position]
            assert meta is not None
            values[result] = kernels.restride(values[result], meta.stride)
        for dead in self.schedule.frees[number]:
            values.pop(dead, None)

    def look_at(self, number: int, values: dict[int, Value]) -> list[Failure]:
        """Check the results that a node has made already, as ``run`` does. Return the failures."""
        node, results = self.schedule.graph.nodes[number], self._results[number]
        try:
            laid_out = self._checked(number, node, [values[result] for result in results])
        except Exception as error:  # noqa: BLE001 - reported to the client
            failures = [_failure(number, node, error)]
            self._spoil(node, results, Failed(failures[0]), values, failures)
            return failures
        values.update(zip(results, laid_out, strict=True))
        return []

    def _spoil(
        self,
        node: Node,
        results: range,
        poison: Failed,
        values: dict[int, Value],
        failures: list[Failure],
    ) -> None:
        """Mark the results of a node as failed."""
        if node.op in COLLECTIVES or node.op in POINT_TO_POINT or node.op == WAIT:
            self._part(poison.failure, failures)
        values.update(dict.fromkeys(results, poison))
        if node.dynamic:
            self.returned = poison

    @staticmethod
    def _part(failure: Failure, failures: list[Failure]) -> None:
        """Leave the ranks that wait for a failed collective; the client gets the reason."""
        left = group.abandon(f"{failure.kind}: {failure.detail}")
        if left and failure.kind != COLLECTIVE_ERROR and failure not in failures:
            failures.append(failure)

    def _node(
        self,
        number: int,
        node: Node,
        results: range,
        values: dict[int, Any],
        params: tuple[Any, ...],
        check: bool,
    ) -> None:
        modes = self.schedule.writes.modes[number]
        if node.op == WRITE_BACK:
            values[results[0]] = self._write_back(node, modes[0], values, params)
            if node.args[0].index in self._loose:
                self._loose.add(results[0])
            return
        copies = {
            target: kernels.clone(values[target])
            for target, mode in zip(node.writes, modes, strict=True)
            if mode == COPY
        } if node.writes else {}  # fmt: skip
        args = [self._argument(arg, values, copies, params) for arg in node.args]
        kwargs = {name: self._argument(arg, values, copies, params) for name, arg in node.kwargs}
        returned = self.kernel(number, node.op)(*args, **kwargs)
        written = [copies.get(target, values[target]) for target in node.writes]
        if node.dynamic:
            self.returned, self.written = self._new(node, returned), written
            return
        values_made = [*self._fresh(node, returned), *written]
        if check:
            values_made = self._checked(number, node, values_made)
        values.update(zip(results, values_made, strict=True))

    def _argument(
        self, arg: Arg, values: dict[int, Any], copies: dict[int, Any], params: tuple[Any, ...]
    ) -> Any:
        """Return an argument's value; a method, since a closure would keep all values alive."""
        kind = type(arg)
        if kind is Ref:
            return copies.get(arg.index, values[arg.index])
        if kind is Param:
            return params[arg.index]
        if kind is tuple:
            return [self._argument(item, values, copies, params) for item in arg]
        return self.device if arg is DEVICE else arg

    def _write_back(
        self, node: Node, mode: str, values: dict[int, Any], params: tuple[Any, ...]
    ) -> torch.Tensor:
        base, value = values[node.args[0].index], values[node.args[1].index]
        if mode == DONE:
            return base  # type: ignore[no-any-return]
        if mode == COPY:
            base = kernels.clone(base)
        chain = node.args[2]
        if params_in(chain):  # views at positions that the run was given
            chain = self._argument(chain, values, {}, params)
        return kernels.write_back(base, value, chain)

    def _new(self, node: Node, returned: Any) -> list[Any]:
        """Return an op's results, without the tensors that it only wrote.

        Ints are included for a data-dependent op only; for others the client knows them.
        """
        kinds = self.output_kinds(node)
        items = (returned,) if len(kinds) == 1 else tuple(returned or ())
        known = "w" if node.dynamic else "wi"
        return [item for kind, item in zip(kinds, items, strict=True) if kind[0] not in known]

    def _fresh(self, node: Node, returned: Any) -> list[Any]:
        if not node.fresh:
            return []
        if isinstance(returned, torch.Tensor):
            return [returned]
        fresh: list[Any] = []
        for item in self._new(node, returned):
            fresh.extend(item if isinstance(item, (list, tuple)) else (item,))
        return fresh

    def promised(self, number: int) -> list[tuple[int, TensorMeta]]:
        """Return the results of a node that have known metas, with these."""
        node, results = self.schedule.graph.nodes[number], self._results[number]
        if node.op == WRITE_BACK or node.dynamic:
            return []
        opaque = OPAQUE_RESULTS.get(node.op, ())
        return [
            (results[position], meta)
            for position, meta in enumerate(node.results)
            if meta is not None and position not in opaque
        ]

    def _checked(self, number: int, node: Node, made: list[Any]) -> list[Any]:
        """Compare results with the inferred ones; only their strides may differ.

        A result keeps its kernel's strides if the rest of the plan allows it; else it is copied to
        the recorded ones.
        """
        wrong = []
        for position, (value, meta) in enumerate(zip(made, node.results, strict=True)):
            if meta is None or value is None or _is_as_promised(value, meta):
                continue
            if position in OPAQUE_RESULTS.get(node.op, ()):
                continue
            self._same_kind(node, value, meta)
            if not self._stays(number, node, position, value, meta):
                wrong.append(position)
                made[position] = kernels.restride(value, meta.stride)
        if wrong:
            self.restrided[number] = tuple(wrong)
        return made

    def _stays(
        self, number: int, node: Node, position: int, value: torch.Tensor, meta: TensorMeta
    ) -> bool:
        """Return whether a result with other strides than recorded may keep them.

        Raises:
            GraphError: it may not, and a copy would no longer share its memory.
        """
        slot, f = self._results[number][position], op_facts(node)
        derived = not self._loose.isdisjoint(node.refs())
        shares = position >= len(node.fresh) or (f is not None and f.views)
        if shares and not derived and not lies_as(value, meta):
            raise _broken_promise(node, value, meta)
        if not (shares or derived):  # else another node is the cause
            self.relaid.append((number, position, value.stride()))
        graph = self.schedule.graph
        if lies_as(value, meta) or shares or may_stay(graph, number, slot, value, self._fresh):
            self._loose.add(slot)
            return True
        return False

    def lay_out(self, outputs: list[Value], check: bool = False) -> None:
        """Copy outputs to the recorded strides: the client knows them by these.

        Args:
            check: note the outputs that need it.
        """
        if check:
            slots, metas = self.schedule.graph.outputs, self.schedule.graph.values
            for position, (slot, value) in enumerate(zip(slots, outputs, strict=True)):
                meta = metas[slot]
                if slot not in self._loose or not isinstance(value, torch.Tensor) or meta is None:
                    continue
                if not lies_as(value, meta):
                    self.relaid_outputs[position] = meta.stride
        for position, stride in self.relaid_outputs.items():
            value = outputs[position]
            if isinstance(value, torch.Tensor):
                outputs[position] = kernels.restride(value, stride)

    @staticmethod
    def _same_kind(node: Node, value: torch.Tensor, meta: TensorMeta) -> None:
        if tuple(value.shape) != meta.shape or value.dtype != meta.dtype:
            raise _broken_promise(node, value, meta)


def _broken_promise(node: Node, value: torch.Tensor, meta: TensorMeta) -> GraphError:
    title, _, foreign = node.op.partition("@")
    whose = "its fake kernel" if foreign else f"torch's meta kernel of {title}"
    mend = "mend that (torch.library.register_fake)" if foreign else "please report this"
    return GraphError(
        f"{whose} promised {meta}, but the op returned {TensorMeta.of(value)}; {mend}"
    )


def _failure(number: int, node: Node, error: Exception) -> Failure:
    if node.op in COLLECTIVE_OPS and not isinstance(error, IndexError):
        return Failure(number, COLLECTIVE_ERROR, f"{node.op} on axis {node.args[-1]!r}: {error}")
    return Failure(number, kind_of(error), str(error))


def _poison(node: Node, values: Mapping[int, Value]) -> Failed | None:
    """Return the failed value that a node depends on, if there is one."""
    return next((v for ref in node.refs() if type(v := values.get(ref)) is Failed), None)


def _is_as_promised(value: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether a value equals its meta, even in strides that address no element."""
    return value.shape == meta.shape and value.dtype is meta.dtype and value.stride() == meta.stride
