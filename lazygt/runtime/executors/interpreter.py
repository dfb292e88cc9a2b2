"""Checked interpreter of a plan: runs node by node, checks results and contains failures."""

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
from lazygt.runtime.collectives import group
from lazygt.runtime.executors import kernels
from lazygt.runtime.messages import COLLECTIVE_ERROR, Failure
from lazygt.runtime.plan import Schedule
from lazygt.runtime.store import Failed, Value

# -- strides of results ----------------------------------------------------------------------------
# A kernel may return other strides than the recorded ones. Strides determine the order in which
# later kernels sum, so a copy to the recorded strides gives other last bits than eager torch. A
# result keeps its kernel's strides if every later view of its memory exists for those strides too
# and takes no explicit strides.

#: (node, returned) -> the new tensors among a node's returns.
Fresh = Callable[[Node, Any], list[Any]]


def has_same_layout(value: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether each element has the same offset as in ``meta``: strides are equivalent."""
    return value.numel() <= 1 or meta.has_same_layout(value.stride())


def may_keep_strides(
    graph: Graph, number: int, slot: int, value: torch.Tensor, new_outputs: Fresh
) -> bool:
    """Return whether a result of node ``number`` may keep its strides in later nodes.

    The later views are replayed on meta tensors.
    """
    sharing = {slot: TensorMeta.of(value).empty("meta")}
    with undispatched(), torch.no_grad():
        try:
            return all(
                _accepts_strides(graph, node, results, sharing, new_outputs)
                for later, (node, results) in enumerate(graph.numbered())
                if later > number and not sharing.keys().isdisjoint(node.refs())
            )
        except Exception:  # noqa: BLE001 - torch has no such view of it
            return False


def _accepts_strides(
    graph: Graph, node: Node, results: range, sharing: dict[int, torch.Tensor], new_outputs: Fresh
) -> bool:
    """Return whether a node accepts operands with other strides; add its views to ``sharing``.

    Args:
        sharing: number -> meta tensor of the values that share the result's memory.

    Raises:
        Exception: torch's own, if a view does not exist for these strides.
    """
    if node.op == WRITE_BACK:
        base, chain = node.args[0].index, node.args[2]
        if base not in sharing:
            return True  # only its elements are copied
        sharing[results[0]] = sharing[base]
        kernels.viewed(sharing[base], chain)
        return not params_in(chain) and not any(
            _has_stride_argument(facts(overload(s[0]))) for s in chain
        )
    f = op_facts(node)
    if f is None or f.custom:
        return False  # collectives and compiled code require the recorded strides
    for target, version in zip(node.writes, results[len(node.fresh) :], strict=True):
        if target in sharing:
            sharing[version] = sharing[target]
    if f.aliases:
        views = new_outputs(node, _view_results(graph, node, f, sharing))
        sharing.update(zip(results, views, strict=False))
    return not (f.aliases and _has_stride_argument(f))


def _has_stride_argument(f: OpFacts) -> bool:
    """Return whether a view op has an argument for strides."""
    return any(argument.name == "stride" for argument in f.func._schema.arguments)


def _view_results(graph: Graph, node: Node, f: OpFacts, sharing: dict[int, torch.Tensor]) -> Any:
    """Run a view op on meta tensors; return its results."""

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            meta = graph.values[arg.index]
            assert meta is not None
            return sharing.get(arg.index, meta.empty("meta"))
        return torch.device("meta") if arg is DEVICE else arg

    args = [map_arg(arg, leaf) for arg in node.args]
    return f.func(*args, **{name: map_arg(arg, leaf) for name, arg in node.kwargs})


# -- checked interpreter ---------------------------------------------------------------------------

#: For each return of a node: its value number, a list's value numbers, or None if it is not new.
ReturnSlots = list[int | list[int] | None]


class Stopped(NamedTuple):
    """Point where generated or native code has stopped: the interpreter continues at ``node``."""

    node: int
    values: dict[int, Value]  # the live values at that moment
    #: True if the node has run (its results differ from the inferred metas): the interpreter
    #: checks these, and continues after the node
    has_results: bool = False


class CheckedInterpreter:
    """Interpreter of a schedule.

    Args:
        compiled: number of a fused node that is one step -> its callable.

    Attributes:
        compiled: the argument.
        restrided: node number -> positions of results that are copied to the recorded strides.
        restrided_outputs: position of an output that is copied to the recorded strides -> these
            strides.
        unexpected_strides: (node number, result, its kernel's strides) of results with other
            strides than recorded, until the worker reports them.
        returned, written: results and written tensors of the data-dependent last node.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        compiled: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:
        self.schedule, self.device = schedule, device
        self.restrided: dict[int, tuple[int, ...]] = {}
        self.restrided_outputs: dict[int, tuple[int, ...]] = {}
        self.unexpected_strides: list[tuple[int, int, tuple[int, ...]]] = []
        #: values with other strides than were recorded
        self._restrided_values: set[int] = set()
        self.returned: Any = None
        self.written: list[Any] = []
        self._results = [results for _, results in schedule.graph.numbered()]
        self.compiled = compiled or {}
        self._kernels: dict[str, Callable[..., Any]] = {}

    @property
    def changes_strides(self) -> bool:
        """True if runs copy some results to the recorded strides, as the last check found."""
        return bool(self.restrided or self.restrided_outputs)

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
        """Return the kind of each return, such as ``f`` for a new tensor (see ``graph.ops``)."""
        f = op_facts(node)
        if f is not None:
            return f.outputs
        return ("f",) * len(node.fresh)

    def return_slots(self, node: Node, results: range) -> ReturnSlots:
        """Return the value number of each of a node's returns; empty if no return is new."""
        kinds = self.output_kinds(node)
        new_outputs = list(results[: len(node.fresh)])
        singles = sum(1 for kind in kinds if kind in ("f", "v"))
        slots: ReturnSlots = []
        for kind in kinds if new_outputs else ():
            if kind[0] in "wi":
                slots.append(None)
            elif kind in ("f", "v"):
                slots.append(new_outputs.pop(0))
                singles -= 1
            else:
                count = len(new_outputs) - singles
                slots.append(new_outputs[:count])
                del new_outputs[:count]
        return slots

    def run(
        self, values: dict[int, Value], params: tuple[Any, ...], start: int, check: bool
    ) -> list[Failure]:
        """Run from node ``start`` on, adding results to ``values``; return the failures.

        A node with a failed operand does not run: its results fail, too.

        Args:
            params: run-time numbers of the plan.
            check: compare the results with the inferred metas.
        """
        failures: list[Failure] = []
        self.returned, self.written = None, []
        #: while nothing has failed, nodes need no check for failed operands
        has_failed = any(type(value) is Failed for value in values.values())
        for number in range(start, len(self.schedule.graph.nodes)):
            node, results = self.schedule.graph.nodes[number], self._results[number]
            failed_operand = _failed_operand(node, values) if has_failed else None
            if failed_operand is None:
                try:
                    self._node(number, node, results, values, params, check)
                except Exception as error:  # noqa: BLE001 - reported to the client
                    failure = _failure(number, node, error)
                    failures.append(failure)
                    failed_operand, has_failed = Failed(failure), True
            if failed_operand is not None:
                self._mark_failed(node, results, failed_operand, values, failures)
            for dead in self.schedule.frees[number]:
                values.pop(dead, None)
        return failures

    def step(
        self, number: int, values: dict[int, Any], params: tuple[Any, ...], check: bool = True
    ) -> None:
        """Run one node, and drop the values that die there; raises the node's error.

        Args:
            check: compare the results with the inferred metas; False: restride those that an
                earlier check has found.
        """
        node, results = self.schedule.graph.nodes[number], self._results[number]
        self._node(number, node, results, values, params, check)
        self.unexpected_strides.clear()  # the first run has reported them to the client
        for position in () if check else self.restrided.get(number, ()):
            meta, result = node.results[position], results[position]
            assert meta is not None
            values[result] = kernels.restride(values[result], meta.stride)
        for dead in self.schedule.frees[number]:
            values.pop(dead, None)

    def check_results(self, number: int, values: dict[int, Value]) -> list[Failure]:
        """Check the results of a node that native code has run, as ``run`` does; return failures.

        Results with strides that the later nodes do not allow are replaced in ``values``.
        """
        node, results = self.schedule.graph.nodes[number], self._results[number]
        try:
            checked = self._checked(number, node, [values[result] for result in results])
        except Exception as error:  # noqa: BLE001 - reported to the client
            failures = [_failure(number, node, error)]
            self._mark_failed(node, results, Failed(failures[0]), values, failures)
            return failures
        values.update(zip(results, checked, strict=True))
        return []

    def _mark_failed(
        self,
        node: Node,
        results: range,
        failed: Failed,
        values: dict[int, Value],
        failures: list[Failure],
    ) -> None:
        """Mark the results of a node as failed; if it is a collective, leave the process group.

        Args:
            failures: failures of the run; a failure that makes this rank leave is added.
        """
        if node.op in COLLECTIVES or node.op in POINT_TO_POINT or node.op == WAIT:
            self._leave_group(failed.failure, failures)
        values.update(dict.fromkeys(results, failed))
        if node.dynamic:
            self.returned = failed

    @staticmethod
    def _leave_group(failure: Failure, failures: list[Failure]) -> None:
        """Leave the process group, so that no rank waits for a failed collective."""
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
        /,
    ) -> None:
        """Call a node's kernel, and store its results in ``values``."""
        modes = self.schedule.writes.modes[number]
        if node.op == WRITE_BACK:
            values[results[0]] = self._write_back(node, modes[0], values, params)
            if node.args[0].index in self._restrided_values:
                self._restrided_values.add(results[0])
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
            self.returned, self.written = self._new_results(node, returned), written
            return
        result_values = [*self._new_outputs(node, returned), *written]
        if check:
            result_values = self._checked(number, node, result_values)
        values.update(zip(results, result_values, strict=True))

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
        """Copy a value into a view of its base; return the base."""
        base, value = values[node.args[0].index], values[node.args[1].index]
        if mode == DONE:
            return base  # type: ignore[no-any-return]
        if mode == COPY:
            base = kernels.clone(base)
        chain = node.args[2]
        if params_in(chain):  # view positions are run-time numbers
            chain = self._argument(chain, values, {}, params)
        return kernels.write_back(base, value, chain)

    def _new_results(self, node: Node, returned: Any) -> list[Any]:
        """Return an op's results, without operands that it returns after a write.

        Ints are included for a data-dependent op only; the client infers those of other ops.
        """
        kinds = self.output_kinds(node)
        items = (returned,) if len(kinds) == 1 else tuple(returned or ())
        known = "w" if node.dynamic else "wi"
        return [item for kind, item in zip(kinds, items, strict=True) if kind[0] not in known]

    def _new_outputs(self, node: Node, returned: Any) -> list[Any]:
        """Return the new tensors that a node returned, with lists flattened."""
        if not node.fresh:
            return []
        if isinstance(returned, torch.Tensor):
            return [returned]
        outputs: list[Any] = []
        for item in self._new_results(node, returned):
            outputs.extend(item if isinstance(item, (list, tuple)) else (item,))
        return outputs

    def expected_results(self, number: int) -> list[tuple[int, TensorMeta]]:
        """Return (value number, inferred meta) of each result of a node that has a known meta."""
        node, results = self.schedule.graph.nodes[number], self._results[number]
        if node.op == WRITE_BACK or node.dynamic:
            return []
        opaque = OPAQUE_RESULTS.get(node.op, ())
        return [
            (results[position], meta)
            for position, meta in enumerate(node.results)
            if meta is not None and position not in opaque
        ]

    def _checked(self, number: int, node: Node, results: list[Any]) -> list[Any]:
        """Check results against the inferred metas; only strides may differ.

        A result keeps its kernel's strides if the later nodes allow that; else it is copied to the
        recorded strides.
        """
        restrided = []
        for position, (value, meta) in enumerate(zip(results, node.results, strict=True)):
            if meta is None or value is None or _matches_meta(value, meta):
                continue
            if position in OPAQUE_RESULTS.get(node.op, ()):
                continue
            self._check_shape_and_dtype(node, value, meta)
            if not self._may_keep_strides(number, node, position, value, meta):
                restrided.append(position)
                results[position] = kernels.restride(value, meta.stride)
        if restrided:
            self.restrided[number] = tuple(restrided)
        return results

    def _may_keep_strides(
        self, number: int, node: Node, position: int, value: torch.Tensor, meta: TensorMeta
    ) -> bool:
        """Return whether a result with other strides than recorded may keep them.

        Raises:
            GraphError: it may not, and a copy would not share its base's memory.
        """
        slot, f = self._results[number][position], op_facts(node)
        follows_restrided = not self._restrided_values.isdisjoint(node.refs())
        is_view = position >= len(node.fresh) or (f is not None and f.views)
        if is_view and not follows_restrided and not has_same_layout(value, meta):
            raise _meta_mismatch(node, value, meta)
        if not (is_view or follows_restrided):  # else an earlier node is the cause
            self.unexpected_strides.append((number, position, value.stride()))
        graph = self.schedule.graph
        if (
            has_same_layout(value, meta)
            or is_view
            or may_keep_strides(graph, number, slot, value, self._new_outputs)
        ):
            self._restrided_values.add(slot)
            return True
        return False

    def restride_outputs(self, outputs: list[Value], check: bool = False) -> None:
        """Copy outputs to the recorded strides, which the client expects; ``outputs`` is changed.

        Args:
            check: determine the outputs that need a copy; later runs copy the same ones.
        """
        if check:
            slots, metas = self.schedule.graph.outputs, self.schedule.graph.values
            for position, (slot, value) in enumerate(zip(slots, outputs, strict=True)):
                meta = metas[slot]
                if (
                    slot not in self._restrided_values
                    or not isinstance(value, torch.Tensor)
                    or meta is None
                ):
                    continue
                if not has_same_layout(value, meta):
                    self.restrided_outputs[position] = meta.stride
        for position, stride in self.restrided_outputs.items():
            value = outputs[position]
            if isinstance(value, torch.Tensor):
                outputs[position] = kernels.restride(value, stride)

    @staticmethod
    def _check_shape_and_dtype(node: Node, value: torch.Tensor, meta: TensorMeta) -> None:
        if tuple(value.shape) != meta.shape or value.dtype != meta.dtype:
            raise _meta_mismatch(node, value, meta)


def _meta_mismatch(node: Node, value: torch.Tensor, meta: TensorMeta) -> GraphError:
    """Return the error for a result that has another shape or dtype than was inferred."""
    title, _, custom = node.op.partition("@")
    source = "its fake kernel" if custom else f"torch's meta kernel of {title}"
    remedy = "mend that (torch.library.register_fake)" if custom else "please report this"
    return GraphError(
        f"{source} promised {meta}, but the op returned {TensorMeta.of(value)}; {remedy}"
    )


def _failure(number: int, node: Node, error: Exception) -> Failure:
    if node.op in COLLECTIVE_OPS and not isinstance(error, IndexError):
        return Failure(number, COLLECTIVE_ERROR, f"{node.op} on axis {node.args[-1]!r}: {error}")
    return Failure(number, kind_of(error), str(error))


def _failed_operand(node: Node, values: Mapping[int, Value]) -> Failed | None:
    """Return the failed value that a node depends on, if there is one."""
    return next((v for ref in node.refs() if type(v := values.get(ref)) is Failed), None)


def _matches_meta(value: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether a value has the shape, dtype and exact strides of its meta."""
    return value.shape == meta.shape and value.dtype is meta.dtype and value.stride() == meta.stride
