"""Every strategy of every node of recorded training steps, on what the step computes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt.graph import Graph
from lazygt.graph.alias import draws
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Param, Ref, map_arg
from lazygt.graph.ops import OPAQUE_RESULTS
from lazygt.passes.cse import DeadCode
from lazygt.passes.sharding.rules import has_rule
from lazygt.passes.sharding.rules.pointwise import SplitForeach
from tests.models import zoo
from tests.passes.sharding.rules.harness import Case
from tests.passes.sharding.rules.lockstep import run_node

NUMBERS = {"float": 0.5, "int": 1, "bool": True}
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def recorded(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that a run's traces have behind dce, and behind split_foreach."""
    graphs: list[Graph] = []
    run = DeadCode.run

    def kept(self: DeadCode, graph: Graph) -> Graph:
        made = run(self, graph)
        graphs.extend([made, SplitForeach().run(made)])
        return made

    monkeypatch.setattr(DeadCode, "run", kept)
    with lazygt.session(launcher="inline"):
        zoo.train(name, optimizer, zoo.batches(name, 3), "lazygt")
    return list(graphs)  # rules run dce too


def made_up(meta: TensorMeta) -> torch.Tensor:
    """An input: no number below 0, since second moments are among them."""
    if meta.dtype == torch.uint8:
        return torch.get_rng_state()
    if meta.dtype.is_floating_point:
        return meta.empty("cpu").uniform_(0.1, 1.0)
    return meta.empty("cpu").random_(0, 5)


def computed(graph: Graph) -> tuple[list[Any], list[Any]]:
    """Every value of a graph, and the numbers that it was run with."""
    params = [NUMBERS[kind] for kind in graph.params]
    for node in graph.nodes:
        if node.op.startswith(ATTENTION):  # takes no other dropout
            for arg in node.args:
                if isinstance(arg, Param):
                    params[arg.index] = 0.0
    values: list[Any] = [made_up(meta) for meta in graph.inputs]
    for node in graph.nodes:
        values.extend(run_node(node, values, params))
    return values, params


def different(graph: Graph, seen: set[Any]) -> Iterator[Node]:
    """The nodes of which none was seen with such arguments."""
    metas = graph.values
    for node in graph.nodes:

        def leaf(arg: Any) -> Any:
            return metas[arg.index] if type(arg) is Ref else (type(arg), repr(arg))

        key = (node.op, map_arg(node.args, leaf), repr(node.kwargs) if not node.kwargs else
               tuple((k, map_arg(a, leaf)) for k, a in node.kwargs))  # fmt: skip
        if key not in seen and not draws(node) and not node.dynamic:
            seen.add(key)
            yield node


def meaningless(node: Node) -> set[int]:
    """Results whose numbers are whatever was in memory, or the kernel's own."""
    return {0} if node.op.startswith("aten.empty") else set(OPAQUE_RESULTS.get(node.op, ()))


@pytest.mark.sampled(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("cnn", "adamw"), ("encoder", "adamw_foreach"), ("gpt", "adamw_fused"), ("gru", "sgd"),
     ("lstm", "adam")],
)  # fmt: skip
def test_every_row_of_a_training_step(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    seen: set[Any] = set()
    checked = 0
    for graph in recorded(name, optimizer, monkeypatch):
        values, params = computed(graph)
        for node in different(graph, seen):
            case = Case.of_node(graph, node, values, params)
            case.shapes_only = meaningless(node)
            for strategy in case.strategies(3):
                case.check(3, strategy)
                checked += 1
    assert checked > 150
    without = {key[0] for key in seen if not has_rule(key[0])}
    assert without <= {"aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"}
