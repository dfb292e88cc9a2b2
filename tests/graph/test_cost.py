"""What a graph costs, against numbers worked out by hand and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lazygt
from lazygt.graph import Graph, parse_graph
from lazygt.graph.cost import FAMILIES, Cost, by_line, family, graph_costs
from lazygt.graph.liveness import peak_bytes
from lazygt.graph.node import Node
from lazygt.runtime.plan import Schedule

FUSED = """\
graph {
  %0: f32[100] = input
  %1: f32[100] = input
  $0: float = param
  %2: f32[] = lazygt.fused(%0, %1, $0) {
    %0: f32[100] = input
    %1: f32[100] = input
    $0: float = param
    %2: f32[100] = aten.mul.Tensor(%0, $0)  # a.py:1
    %3: f32[100] = aten.add.Tensor(%2, %1)  # a.py:2
    %4: f32[] = aten.sum.default(%3)  # a.py:2
    return %4
  }
  %3: f32[] = aten.exp.default(%2)  # a.py:3
  return %3
}"""


def costs_of(*rows: str) -> list[Cost]:
    return graph_costs(parse_graph("\n".join(["graph {", *rows, "}"])))


def test_cost_adds_field_by_field() -> None:
    assert Cost(1, 2, 3, 4) + Cost(10, 20, 30, 40) == Cost(11, 22, 33, 44)
    assert Cost(1, 2, 3, 4).bytes == 5


# Each row: inputs, one node, and (flops, bytes read, bytes written, launches) by hand.
@pytest.mark.parametrize(
    ("inputs", "node", "expected"),
    [
        # 2mkn; both operands and the result at 4 bytes an element
        (
            ("f32[2, 3]", "f32[3, 5]"),
            "%2: f32[2, 5] = aten.mm.default(%0, %1)",
            Cost(60, 24 + 60, 40, 1),
        ),
        (
            ("f32[5]", "f32[2, 3]", "f32[3, 5]"),
            "%3: f32[2, 5] = aten.addmm.default(%0, %1, %2)",
            Cost(60, 20 + 24 + 60, 40, 1),
        ),
        (
            ("f32[7, 2, 3]", "f32[7, 3, 5]"),
            "%2: f32[7, 2, 5] = aten.bmm.default(%0, %1)",
            Cost(420, 168 + 420, 280, 1),
        ),
        (
            ("f64[4, 3]", "f64[3]"),
            "%2: f64[4] = aten.mv.default(%0, %1)",
            Cost(24, 96 + 24, 32, 1),
        ),
        # 3x3 kernel on 6x6 gives 4x4: 2 * 4*4 * 3*3 * batch 2 * out 5 * in 3
        (
            ("f32[2, 3, 6, 6]", "f32[5, 3, 3, 3]"),
            "%2: f32[2, 5, 4, 4] = aten.convolution.default"
            "(%0, %1, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)",
            Cost(8640, 864 + 540, 640, 1),
        ),
        # scores and mixture: 2 * (2 * 8*16*8) a head, 3 heads
        (
            ("f32[1, 3, 8, 16]", "f32[1, 3, 8, 16]", "f32[1, 3, 8, 16]"),
            "%3: f32[1, 3, 8, 16], %4: f32[1, 3, 8] = "
            "aten._scaled_dot_product_flash_attention_for_cpu.default(%0, %1, %2)",
            Cost(12288, 3 * 1536, 1536 + 96, 1),
        ),
        # an operand that is named twice is read once
        (("f32[10]",), "%1: f32[10] = aten.mul.Tensor(%0, %0)", Cost(10, 40, 40, 1)),
        # the repeats of an expanded operand are not read
        (
            ("f32[4, 5]", "f32[4, 5]@(0, 1)"),
            "%2: f32[4, 5] = aten.add.Tensor(%0, %1)",
            Cost(20, 80 + 20, 80, 1),
        ),
        (("f32[4, 5]",), "%1: f32[5] = aten.sum.dim_IntList(%0, [0])", Cost(20, 80, 20, 1)),
        (("f32[4, 5]",), "%1: f32[4, 5] = aten._softmax.default(%0, 1, False)",
         Cost(20, 80, 80, 1)),
        (("f32[4, 5]",), "%1: f32[20] = aten.view.default(%0, [20])", Cost()),
        (("f32[4, 5]",), "%1: f32[5, 4]@(1, 5) = aten.t.default(%0)", Cost()),
        (("f32[4, 5]",), "%1: f32[4, 5] = aten.empty_like.default(%0)", Cost()),
        (("f32[4, 5]",), "%1: f32[4, 5] = aten.zeros_like.default(%0)", Cost(0, 0, 80, 1)),
        (("f32[4, 5]",), "%1: f32[4, 5] = aten.clone.default(%0)", Cost(0, 80, 80, 1)),
        # overwritten, not read
        (
            ("f32[4]", "f32[4]"),
            "%2: f32[4] = aten.copy_.default(%0, %1) writes %0",
            Cost(0, 16, 16, 1),
        ),
        # read and written
        (
            ("f32[4]", "f32[4]"),
            "%2: f32[4] = aten.add_.Tensor(%0, %1) writes %0",
            Cost(4, 32, 16, 1),
        ),
        # two rows of the table and their numbers, not the table
        (
            ("f32[1000, 8]", "i64[2]"),
            "%2: f32[2, 8] = aten.embedding.default(%0, %1)",
            Cost(0, 64 + 16, 64, 1),
        ),
        (("f32[6]",), "%1: f32[6] = aten.rand_like.default(%0)", Cost(6, 0, 24, 1)),
        (
            ("f32[6]",),
            "%1: f32[6] = _c10d_functional.all_reduce.default(%0, 'sum', '0')",
            Cost(0, 24, 24, 1),
        ),
        (("f32[6]",), "%1: f32[6] = _c10d_functional.wait_tensor.default(%0)", Cost()),
        (("f32[6]",), "%1: f32[6] = lazygt.all_reduce(%0, 'sum', 'data')", Cost(0, 24, 24, 1)),
        (("f32[6]",), "%1: f32[6] = lazygt.wait(%0, [], [], 'data')", Cost()),
        # its own block of what it has whole
        (("f32[6]",), "%1: f32[2] = lazygt.shard(%0, 0, 'data')", Cost(0, 8, 8, 1)),
        # its size is not known before it ran
        (("f32[6]",), "%1: none = aten.nonzero.default(%0) dynamic", Cost(0, 24, 0, 1)),
    ],
)  # fmt: skip
def test_cost_of_one_node(inputs: tuple[str, ...], node: str, expected: Cost) -> None:
    given = [f"%{number}: {meta} = input" for number, meta in enumerate(inputs)]
    result = f"return %{len(inputs)}"
    assert costs_of(*given, node, result) == [expected]


def test_a_write_that_needs_a_copy_pays_for_it() -> None:
    """%0 is read again, so the write goes to a copy: 16 bytes more read, 16 more written."""
    rows = (
        "%0: f32[4] = input",
        "%1: f32[4] = aten.add_.Tensor(%0, 1) writes %0",
        "%2: f32[4] = aten.mul.Tensor(%0, %1)",
        "return %2",
    )
    assert costs_of(*rows)[0] == Cost(4, 32, 32, 1)


def test_a_fused_node_is_one_launch_of_its_inputs_and_outputs() -> None:
    fused, exp = graph_costs(parse_graph(FUSED))
    assert fused == Cost(300, 800, 4, 1)
    assert exp == Cost(1, 4, 4, 1)


def test_lines_share_a_fused_node() -> None:
    """Members count to their lines; the bytes and the launch to the first member's."""
    assert by_line(parse_graph(FUSED)) == {
        "a.py:1": Cost(100, 800, 4, 1),
        "a.py:2": Cost(200, 0, 0, 0),
        "a.py:3": Cost(1, 4, 4, 1),
    }


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.mm.default", "matmul"),
        ("aten.convolution_backward.default", "matmul"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "matmul"),
        ("aten.mul_.Tensor", "pointwise"),
        ("aten.eq_.Tensor", "pointwise"),
        ("aten.gelu_backward.default", "pointwise"),
        ("aten._foreach_addcmul_.Scalar", "pointwise"),
        ("aten.bitwise_and.Tensor", "pointwise"),
        ("aten.sum.default", "reduction"),
        ("aten.native_layer_norm_backward.default", "reduction"),
        ("aten._log_softmax_backward_data.default", "reduction"),
        ("aten.transpose.int", "view"),
        ("aten._unsafe_view.default", "view"),
        ("aten.cat.default", "memory"),
        ("aten.slice_backward.default", "memory"),
        ("aten._to_copy.default", "memory"),
        ("lazygt.write_back", "memory"),
        ("aten.uniform_.default", "random"),
        ("lazygt.manual_seed", "random"),
        ("_c10d_functional.all_reduce.default", "collective"),
        ("lazygt.reduce_scatter", "collective"),
        ("lazygt.launch_", "collective"),
        ("lazygt.wait", "collective"),
        ("lazygt.first", "memory"),
        ("aten.sort.default", "other"),
    ],
)
def test_family_of_op(op: str, expected: str) -> None:
    assert expected in FAMILIES
    assert family(Node(op, ())) == expected


def test_flops_agree_with_torch_on_a_training_step() -> None:
    """The same step, counted by torch in eager mode and by us on what the session recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 10),
    )
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([1, 7])
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(model(x), y).backward()
    recorded = recorded_step(model, x, y)
    ours = sum(
        cost.flops
        for graph in recorded
        for node, cost in zip(graph.nodes, graph_costs(graph), strict=True)
        if family(node) == "matmul"
    )
    assert ours == counter.get_total_flops() > 0


def recorded_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[Graph]:
    with lazygt.session(launcher="inline") as s:
        there = model.to("lazygt")
        before = len(s.plans())
        loss = nn.functional.cross_entropy(there(x.to("lazygt")), y.to("lazygt"))
        loss.backward()
        gradients = [parameter.grad for parameter in there.parameters()]
        s.flush()
        assert all(gradient is not None for gradient in gradients)
        plans = s.plans()[before:]
        for plan in plans:  # prices a graph while ops are being recorded
            graph_costs(plan.graph)
        model.to("cpu")
    return [plan.graph for plan in plans]


def peak(*rows: str, frees: list[tuple[int, ...]]) -> int:
    return peak_bytes(parse_graph("\n".join(["graph {", *rows, "}"])), frees)


def test_peak_of_a_chain() -> None:
    """Bytes alive while each node runs: exp 40 + 40, sin 40 + 40 + 40, sum 40 + 40 + 4."""
    rows = (
        "%0: f32[10] = input",
        "%1: f32[10] = aten.exp.default(%0)",
        "%2: f32[10] = aten.sin.default(%1)",
        "%3: f32[] = aten.sum.default(%2)",
        "return %3",
    )
    assert peak(*rows, frees=[(), (1,), (2,)]) == 120
    assert peak(*rows, frees=[(0,), (1,), (2,)]) == 80
    assert peak(*rows, frees=[(), (), ()]) == 124


def test_views_and_writes_in_place_take_no_memory() -> None:
    rows = (
        "%0: f32[10] = input",
        "%1: f32[10] = aten.exp.default(%0)",
        "%2: f32[5] = aten.slice.Tensor(%1, 0, 0, 5)",
        "%3: f32[5] = aten.add_.Tensor(%2, 1) writes %2",
        "%4: f32[10] = lazygt.write_back(%1, %3, "
        "[['aten.slice.Tensor', 0, [None, 0, 0, 5], [], 0]])",
        "%5: f32[10] = aten.sin.default(%4)",
        "return %5",
    )
    # exp's memory lives on as %4: 40 (input) + 40, and 40 more for sin
    assert peak(*rows, frees=[(), (), (2,), (1, 3), (4,)]) == 120
    # dropping the whole while its view lives frees nothing
    kept = [(0,), (1,), (), (), ()]
    assert peak(*rows, frees=kept) == 80


def test_peak_of_a_real_step_is_between_its_inputs_and_everything() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    for graph in recorded_step(model, torch.randn(16, 32), torch.zeros(16, dtype=torch.int64)):
        schedule = Schedule.of(graph)
        kept = [()] * len(graph.nodes)
        freeing, keeping = peak_bytes(graph, schedule.frees), peak_bytes(graph, kept)
        inputs = sum(meta.nbytes for meta in graph.inputs)
        total = inputs + sum(cost.bytes_written for cost in graph_costs(graph))
        assert inputs <= freeing <= keeping <= total
        if len(graph.nodes) > 10:
            assert freeing < keeping
