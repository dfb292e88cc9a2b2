"""Pictures: the networkx graph, Graphviz's source, and the files.

in0 ──> n0 mul ──> n1 add ──> out0        a fused node n1 is its members n1.0, n1.1, ...
in1 ──────────────┘
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import lazygt
from lazygt.errors import LazyGTError
from lazygt.graph import Graph, parse_graph
from lazygt.graph.cost import Cost, graph_costs
from lazygt.graph.mesh import Mesh
from lazygt.observe.picture import MANY, render, to_dot, to_networkx

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")

TINY = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = input
  $0: float = param
  %2: f32[4] = aten.mul.Tensor(%0, $0)  # train.py:12
  %3: f32[4] = aten.add.Tensor(%2, %1)  # train.py:13
  return %3
}"""

#: With two spaces for each tab.
TINY_DOT = r"""digraph "graph" {
  label=<<table border="0"><tr><td><table border="0" cellborder="1" cellspacing="2"><tr><td bgcolor="#b8dba6">pointwise</td><td bgcolor="#ffffff">input</td><td bgcolor="#b8c4ca">output</td></tr></table></td></tr><tr><td>larger letters: dearer; double frame: the client waits for it; hexagon: ranks exchange it; dashed: back to an earlier line</td></tr></table>> nodesep=0.2 ranksep=0.35
  fontname=Helvetica fontsize=10
  node [color="#78909c" fontname=Helvetica shape=box style="filled,rounded"]
  edge [arrowsize=0.6 color="#90a4ae"]
  in0 [label="input\nf32[4]" fillcolor="#ffffff" fontsize=9.0 tooltip="input\nf32[4]"]
  in1 [label="input\nf32[4]" fillcolor="#ffffff" fontsize=9.0 tooltip="input\nf32[4]"]
  n0 [label="mul\nf32[4]" fillcolor="#b8dba6" fontsize=16.4 tooltip="aten.mul.Tensor\nf32[4]\n4 flop, 32 B, 1 launch\nreads 16 B, writes 16 B\ntrain.py:12"]
  n1 [label="add\nf32[4]" fillcolor="#b8dba6" fontsize=18.0 tooltip="aten.add.Tensor\nf32[4]\n4 flop, 48 B, 1 launch\nreads 32 B, writes 16 B\ntrain.py:13"]
  out0 [label="output\nf32[4]" fillcolor="#b8c4ca" fontsize=9.0 peripheries=2 tooltip="output\nf32[4]"]
  in0 -> n0
  in1 -> n1
  n0 -> n1
  n1 -> out0
}
"""  # noqa: E501

FUSED = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = input
  %2: f32[4] = aten.exp.default(%1)  # a.py:1
  %3: f32[4], %4: f32[] = lazygt.fused(%0, %2) {
    %0: f32[4] = input
    %1: f32[4] = input
    %2: f32[4] = aten.mul.Tensor(%0, %1)  # a.py:2
    %3: f32[4] = aten.add.Tensor(%2, %1)  # a.py:3
    %4: f32[] = aten.sum.default(%3)  # a.py:3
    return %3, %4
  }
  %5: f32[] = aten.neg.default(%4)  # a.py:4
  return %3, %5
}"""

COLLECTIVE = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = _c10d_functional.all_reduce.default(%0, 'sum', '0')
  %2: none = aten.nonzero.default(%1) dynamic
  return %2
}"""


def training_step() -> Graph:
    with lazygt.session(launcher="inline") as s:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        x, y = torch.randn(3, 8), torch.tensor([0, 1, 3])
        s.flush()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        loss.item()
        return max((plan.graph for plan in s.plans()), key=lambda graph: len(graph.nodes))


def chain(length: int, lines: int) -> Graph:
    """``length`` ops, the first ones on line 1, and so on."""
    rows = ["graph {", "%0: f32[4] = input"]
    for number in range(length):
        line = f"loop.py:{1 + number * lines // length}"
        rows.append(f"%{number + 1}: f32[4] = aten.exp.default(%{number})  # {line}")
    return parse_graph("\n".join([*rows, f"return %{length}", "}"]))


# -- networkx --------------------------------------------------------------------------------


def test_nodes_and_edges_are_those_of_a_recorded_step() -> None:
    graph = training_step()
    drawing = to_networkx(graph)
    assert all(node.body is None for node in graph.nodes) == (not drawing.graph["groups"])
    ops = sum(1 if node.body is None else len(node.body.nodes) for node in graph.nodes)
    assert len(drawing) == len(graph.inputs) + ops + len(graph.outputs)
    uses = len(graph.outputs) + sum(distinct_uses(graph))
    assert sum(len(values) for _, _, values in drawing.edges(data="values")) == uses
    assert nx.is_directed_acyclic_graph(drawing)
    assert sum((c for _, c in drawing.nodes(data="cost")), Cost()) == sum(
        graph_costs(graph), Cost()
    )


def distinct_uses(graph: Graph) -> list[int]:
    """For every op, members of fused nodes too, how many values it reads."""
    opened = [(node,) if node.body is None else node.body.nodes for node in graph.nodes]
    return [len(set(node.refs())) for nodes in opened for node in nodes]


def test_node_and_edge_attributes() -> None:
    drawing = to_networkx(parse_graph(TINY))
    assert list(drawing) == ["in0", "in1", "n0", "n1", "out0"]
    assert drawing.nodes["n1"] == {
        "kind": "op",
        "op": "aten.add.Tensor",
        "family": "pointwise",
        "line": "train.py:13",
        "meta": "f32[4]",
        "cost": Cost(4, 32, 16, 1),
        "flops": 4,
        "bytes": 48,
        "sync": False,
        "collective": None,
        "group": None,
        "backward": False,
    }
    assert drawing.nodes["in0"]["kind"] == drawing.nodes["in0"]["family"] == "input"
    assert drawing.nodes["out0"]["sync"]
    assert dict(drawing.edges) == {
        ("in0", "n0"): {"values": (0,), "meta": "f32[4]"},
        ("in1", "n1"): {"values": (1,), "meta": "f32[4]"},
        ("n0", "n1"): {"values": (2,), "meta": "f32[4]"},
        ("n1", "out0"): {"values": (3,), "meta": "f32[4]"},
    }


def test_two_values_on_one_edge() -> None:
    drawing = to_networkx(
        parse_graph(
            "graph {\n%0: f32[4, 2] = input\n"
            "%1: f32[4], %2: f32[4] = aten.unbind.int(%0, 1)\n"
            "%3: f32[4] = aten.add.Tensor(%2, %1)\nreturn %3\n}"
        )
    )
    assert drawing.edges["n0", "n1"] == {"values": (2, 1), "meta": "f32[4], f32[4]"}


def test_members_of_a_fused_node_are_nodes_in_its_group() -> None:
    drawing = to_networkx(parse_graph(FUSED))
    assert drawing.graph["groups"] == ["n1"]
    members = [name for name, group in drawing.nodes(data="group") if group == "n1"]
    assert members == ["n1.0", "n1.1", "n1.2"]
    assert set(drawing.edges) == {
        ("in1", "n0"),
        ("in0", "n1.0"),
        ("n0", "n1.0"),
        ("n0", "n1.1"),
        ("n1.0", "n1.1"),
        ("n1.1", "n1.2"),
        ("n1.1", "out0"),
        ("n1.2", "n2"),
        ("n2", "out1"),
    }
    assert drawing.edges["n0", "n1.0"]["values"] == (2,)  # as the graph numbers it
    assert drawing.edges["n1.1", "n1.2"]["values"] == (3,)  # as the fused node does


# -- Graphviz --------------------------------------------------------------------------------


def test_dot_of_a_tiny_graph() -> None:
    assert to_dot(parse_graph(TINY)).replace("\t", "  ") == TINY_DOT


def test_fused_nodes_are_frames() -> None:
    source = to_dot(parse_graph(FUSED))
    frame = re.search(r"subgraph cluster_n1 \{(.*?)\n\t\}", source, re.DOTALL)
    assert frame is not None
    assert re.findall(r"\"?(n\d[.\d]*)\"? \[", frame[1]) == ["n1.0", "n1.1", "n1.2"]
    assert "fused: 3 ops" in frame[1]


def test_collectives_and_sync_points_stand_out() -> None:
    rows = to_dot(parse_graph(COLLECTIVE)).splitlines()
    marked = {row.split()[0]: row for row in rows if "fillcolor" in row}
    assert "shape=hexagon" in marked["n0"]
    assert "peripheries=2" in marked["n1"]  # its shape depends on values
    assert "peripheries=2" in marked["out0"]
    assert not re.search("hexagon|peripheries", marked["in0"])


MEETING = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = lazygt.all_reduce(%0, 'sum', 'data')  # a.py:1
  %2: f32[8] = lazygt.launch('all_reduce', [%1, %0], [], 'max', 'data')  # a.py:1
  %3: f32[4], %4: f32[4] = lazygt.wait(%2, [%1, %0], [], 'data')  # a.py:1
  %5: f32[4] = aten.add.Tensor(%3, %4)  # a.py:2
  return %5
}"""


def test_collective_label_has_kind_and_bytes() -> None:
    mesh = Mesh.parse("data=4,model=2")
    drawing = to_networkx(parse_graph(MEETING), mesh)
    found = {name: each for name, each in drawing.nodes(data="collective") if each is not None}
    assert {name: (each.kind, each.nbytes, each.ring_bytes) for name, each in found.items()} == {
        "n0": ("all_reduce", 16, 24),
        "n1": ("all_reduce", 32, 48),
    }
    rows = to_dot(parse_graph(MEETING), False, mesh).splitlines()
    (one,) = [row for row in rows if "all_reduce sum" in row]
    assert "16 B along data" in one
    assert "each of 4 ranks sends 24 B in a ring" in one
    assert "shape=hexagon" in one
    (wait,) = [row for row in rows if '[label="wait' in row]
    assert "hexagon" not in wait
    (unknown,) = [
        row for row in to_dot(parse_graph(MEETING), False).splitlines() if "all_reduce max" in row
    ]
    assert "in a ring" not in unknown
    lines = to_dot(parse_graph(MEETING), True, mesh).splitlines()
    (box,) = [row for row in lines if "2 collectives, 48 B" in row]
    assert "shape=hexagon" in box


def test_dearer_ops_have_larger_letters() -> None:
    graph = parse_graph(
        "graph {\n%0: f32[512, 512] = input\n%1: f32[512, 512] = aten.mm.default(%0, %0)\n"
        "%2: f32[512] = aten.select.int(%1, 0, 0)\n%3: f32[512] = aten.exp.default(%2)\n"
        "return %3\n}"
    )
    sizes = {
        name: float(size)
        for name, size in re.findall(r"^\t(n\d) .*fontsize=([\d.]+)", to_dot(graph), re.MULTILINE)
    }
    assert sizes["n0"] > sizes["n2"] > sizes["n1"]


def boxes(source: str) -> int:
    return source.count("fillcolor=")


@pytest.mark.parametrize(
    ("length", "collapse", "expected"),
    [
        (MANY, "auto", MANY + 2),
        (MANY + 1, "auto", 5),
        (MANY + 1, False, MANY + 3),
        (30, True, 5),
    ],
)
def test_collapse_draws_a_box_a_line(length: int, collapse: bool, expected: int) -> None:
    """Three lines, the inputs and the outputs."""
    assert boxes(to_dot(chain(length, lines=3), collapse)) == expected


def test_nothing_to_collapse_without_lines() -> None:
    graph = chain(MANY + 1, lines=3)
    bare = Graph(graph.inputs, graph.params, graph.nodes, graph.outputs)
    assert boxes(to_dot(bare)) == MANY + 3


def test_a_line_names_its_ops_and_costs() -> None:
    source = to_dot(chain(30, lines=3), collapse=True)
    assert '"loop.py line 1" [label="loop.py:1\\n10 ops, 40 flop, 320 B"' in source
    assert '"loop.py line 1" -> "loop.py line 2"' in source


def test_an_edge_back_to_an_earlier_line_is_dashed() -> None:
    graph = parse_graph(
        "graph {\n%0: f32[4] = input\n%1: f32[4] = aten.exp.default(%0)  # a.py:1\n"
        "%2: f32[4] = aten.sin.default(%1)  # a.py:2\n"
        "%3: f32[4] = aten.cos.default(%2)  # a.py:1\nreturn %3\n}"
    )
    rows = to_dot(graph, collapse=True).splitlines()
    back = [row for row in rows if '"a.py line 2" -> "a.py line 1"' in row]
    assert len(back) == 1
    assert "dashed" in back[0]


# -- files -----------------------------------------------------------------------------------


def test_unknown_suffix_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'g\.pdf' must end in one of \.dot, \.svg, \.png, \.html"
    ):
        render(parse_graph(TINY), tmp_path / "g.pdf")
    assert not list(tmp_path.iterdir())


def test_dot_file(tmp_path: Path) -> None:
    path = render(parse_graph(TINY), str(tmp_path / "g.dot"))
    assert path.read_text().replace("\t", "  ") == TINY_DOT


def test_missing_graphviz_error_names_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LazyGTError, match=r"g\.svg needs .*'dot'.*Install it .*\.html or \.dot"):
        render(parse_graph(TINY), tmp_path / "g.svg")
    assert not list(tmp_path.iterdir())


def test_when_graphviz_fails_the_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(LazyGTError, match=r"dot -Tpng failed for g\.png: out of memory"):
        render(parse_graph(TINY), tmp_path / "g.png")
    assert not (tmp_path / "g.png").exists()


@needs_dot
@pytest.mark.timeout(60)
@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("text", [TINY, FUSED, COLLECTIVE, MEETING])
def test_graphviz_accepts_the_source(tmp_path: Path, text: str, collapse: bool) -> None:
    svg = render(parse_graph(text), tmp_path / "g.svg", collapse).read_text()
    assert svg.count('class="node"') == boxes(to_dot(parse_graph(text), collapse))
    png = render(parse_graph(text), tmp_path / "g.png", collapse).read_bytes()
    assert png.startswith(b"\x89PNG")


@needs_dot
@pytest.mark.timeout(60)
def test_graphviz_is_done_soon_with_many_ops(tmp_path: Path) -> None:
    """Every op reads a value from far above, for which dot's exact layout takes minutes."""
    text = ["graph {", "%0: f32[4] = input", "%1: f32[4] = input"]
    for number in range(2, 402):
        far = max(0, number - 49)
        text.append(f"%{number}: f32[4] = aten.add.Tensor(%{number - 1}, %{far})")
    graph = parse_graph("\n".join([*text, "return %401", "}"]))
    svg = render(graph, tmp_path / "g.svg", collapse=False).read_text()
    assert svg.count('class="node"') == 403


@needs_dot
@pytest.mark.timeout(60)
def test_odd_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Angle brackets and quotes in a line's name are neither HTML nor an escape."""
    graph = parse_graph(TINY)
    odd = Graph(graph.inputs, graph.params, graph.nodes, graph.outputs, ('<cell "\\N">:1', "b:2"))
    svg = render(odd, tmp_path / "g.svg", collapse=True).read_text()
    assert "&lt;cell &quot;\\N&quot;&gt;:1" in svg


def test_backward_ops_have_separate_boxes() -> None:
    graph = parse_graph(
        "graph {\n%0: f32[4] = input\n"
        "%1: f32[4] = aten.exp.default(%0)  # net.py:1\n"
        "%2: f32[] = aten.sum.default(%1)  # net.py:2\n"
        "%3: f32[4] = aten.expand.default(%2, [4])  # net.py:2\n"
        "%4: f32[4] = aten.mul.Tensor(%3, %1)  # net.py:1\nreturn %4\n}"
    )
    drawing = to_networkx(graph, backward={2, 3})
    assert [drawing.nodes[f"n{n}"]["backward"] for n in range(4)] == [False, False, True, True]
    assert "style=dashed" in to_dot(graph, collapse=True)
    parted = to_dot(graph, collapse=True, backward={2, 3})
    assert "style=dashed" not in parted
    for line in ("net.py line 1", "net.py line 1 backward", "net.py line 2 backward"):
        assert f'"{line}" [' in parted
