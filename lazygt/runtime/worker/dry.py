"""Dry worker: propagates the metas of values, computes nothing and answers with zeros.

Uploaded values are fetched unchanged; every other number is 0 and every other flag is False. A
script that branches on values sees these.
"""

from __future__ import annotations

from typing import Any

import torch

from lazygt.graph.alias import op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.ops import title
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.exchange import Exchange
from lazygt.runtime.messages import Failure, Fetched
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.store import Failed, Value
from lazygt.runtime.wire import Buffer
from lazygt.runtime.worker.worker import Worker

#: Largest fetch that is answered with zeros, in bytes.
MOST_ZEROS = 1 << 30


class DryWorker(Worker):
    """Worker that handles plans and runs like any other, but calls no kernel.

    Its values are meta tensors. Ops with a result of data-dependent shape fail with a RuntimeError.
    """

    def __init__(self, max_plans: int, max_plan_bytes: int) -> None:
        super().__init__(max_plans=max_plans, max_plan_bytes=max_plan_bytes)
        self.plans.ops_device = None
        self.exchange = _ZeroExchange(self.store, None, None, None, 0)

    def _plan_inputs(self, schedule: Schedule, ids: list[int], frees: list[int]) -> list[Value]:
        return self.store.get_all(ids)

    def _run_plan(
        self, executor: EagerExecutor, inputs: list[Value], params: tuple[Any, ...]
    ) -> Outcome:
        plan = executor.plan
        values = list(inputs)
        for node in plan.graph.nodes:
            values.extend(_placeholder(node, meta) for meta in node.results)
        outputs = [values[number] for number in plan.graph.outputs]
        returned = _dynamic_results(plan) if plan.asks else None
        return Outcome(outputs, [], returned, [])


class _ZeroExchange(Exchange):
    """Exchange that sends zeros for all computed values."""

    def send(self, value: Value, buffers: list[Buffer]) -> Fetched | Failure:
        if isinstance(value, torch.Tensor) and value.is_meta:
            if value.nbytes > MOST_ZEROS:
                raise MemoryError(
                    f"the script fetches a tensor of {value.nbytes} bytes; nothing is computed "
                    f"here, and so many zeros are not made up"
                )
            value = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        return super().send(value, buffers)


def _placeholder(node: Node, meta: TensorMeta | None) -> Value:
    """Return the meta tensor of a result; a generator state is a real one."""
    if meta is None:
        return Failed(Failure(-1, "RuntimeError", f"{node.op}: its result was not computed"))
    if node.op == "lazygt.get_rng_state":  # nothing was drawn, and zeros are no state
        state = torch.default_generator.get_state()
        if state.numel() == meta.numel:
            return state
    return meta.empty("meta")


def _dynamic_results(plan: Plan) -> Any:
    """Return the results of a plan's data-dependent last node: zeros if all are numbers."""
    node = plan.steps.graph.nodes[-1]
    known = op_facts(node)
    if known is not None and not node.writes and set(known.outputs) == {"p"}:
        kinds = [str(argument.type) for argument in known.func._schema.returns]
        return tuple(False if kind == "bool" else 0 for kind in kinds)
    detail = (
        f"{title(node.op)}: the shape of its result depends on values, and nothing is computed "
        f"here, so what comes after this line can't be known before the script really runs"
    )
    return Failed(Failure(len(plan.steps.graph.nodes) - 1, "RuntimeError", detail))
