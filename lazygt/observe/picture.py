"""Drawings of graphs by networkx: as DOT, SVG, PNG or an HTML page.

    input ──> addmm ──> relu ──> addmm ──> sum ──> output
              └─ net.py:8 ─────────────┘   └─ train.py:20

Large graphs are drawn with one box a source line. Colours name the families of ``graph.cost``;
letters grow with the logarithm of the cost. Collectives are hexagons with their bytes and axis of
the mesh. Values that the client waits for (outputs, and results with shapes that depend on values)
have a double frame.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import graphviz  # type: ignore[import-untyped]
import networkx as nx

from lazygt.errors import LazyGTError
from lazygt.graph.collectives import communications_by_node
from lazygt.graph.cost import Cost, family, member_costs
from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.host.files import write_output
from lazygt.observe.page import BACKWARD, Label, Paths, labels, legend, quotient, to_html

#: Number of ops above which ``collapse="auto"`` draws one box a line.
MANY = 150
#: Number of boxes above which edges are straight: dot takes minutes to route them around boxes.
_MAX_ROUTED = 300
SUFFIXES = (".dot", ".svg", ".png", ".html")

#: Text of the legend besides the colours.
_FRAMES = (
    "larger letters: dearer; double frame: the client waits for it; hexagon: ranks exchange it; "
    "dashed: back to an earlier line"
)

#: True: one box a source line; False: one an op; "auto": lines when there are more than MANY ops.
Collapse = Literal["auto"] | bool


def to_networkx(
    graph: Graph, mesh: Mesh | None = None, backward: Collection[int] = ()
) -> nx.DiGraph:
    """Convert to networkx: inputs, ops and outputs, with an edge from producer to consumer.

    A fused node is not a node here: its members are, and their ``group`` is its id. The ids of
    all fused nodes are ``drawing.graph["groups"]``.

    Node attributes: ``kind`` (``"input"``, ``"op"`` or ``"output"``), ``op``, ``family`` (see
    ``graph.cost``), ``line`` (``file:line``, ``"?"`` when unknown), ``backward`` (True if autograd
    ran it; its line is that of the forward op), ``meta`` (text of the results' metas),
    ``cost`` (a Cost), ``flops``, ``bytes``, ``sync`` (True if the client waits for it),
    ``collective`` (the Communication that it launches, or None), ``group`` (id or None). Ids are
    ``in0``, ``n3``, ``n3.1`` (a member of the fused node ``n3``) and ``out0``. The sum of all costs
    is the graph's.

    Edge attributes: ``values`` (a tuple: the numbers of the values that flow; between members of
    one fused node, in its own numbering) and ``meta`` (their metas as text).

    Args:
        mesh: mesh of the ranks that run the graph, if known; gives the number of ranks of each
            collective.
        backward: numbers of the recorded ops that autograd ran, as ``Plan.backward``.
    """
    return _Drawing(graph, mesh, backward).drawing


class _Drawing:
    """Builder of the networkx graph; see ``to_networkx``."""

    def __init__(self, graph: Graph, mesh: Mesh | None, backward: Collection[int]) -> None:
        self.graph, self.metas, self.backward = graph, graph.values, backward
        self.collectives = communications_by_node(graph, mesh)
        self.drawing = nx.DiGraph(groups=[])
        #: id of each value's producer, by number of the value
        self.producers: list[str] = []
        for number, meta in enumerate(graph.inputs):
            self._add(f"in{number}", "input", "input", str(meta))
            self.producers.append(f"in{number}")
        costs = member_costs(graph)
        for number, node in enumerate(graph.nodes):
            self._node(f"n{number}", node, number, costs[number])
            if number in self.collectives:
                self.drawing.nodes[f"n{number}"]["collective"] = self.collectives[number]
        for number, value in enumerate(graph.outputs):
            self._add(f"out{number}", "output", "output", _text(self.metas[value]), sync=True)
            self._edge(self.producers[value], f"out{number}", value, self.metas[value])

    def _node(self, name: str, node: Node, number: int, costs: list[Cost]) -> None:
        """Add a node of the graph, or the members of a fused one, with edges from its operands.

        Args:
            costs: of the node, or of each member.
        """
        if node.body is not None:
            self._members(name, node, node.body, costs)
            return
        self._op(name, node, self.graph, number, costs[0], None)
        for value in dict.fromkeys(node.refs()):
            self._edge(self.producers[value], name, value, self.metas[value])
        self.producers.extend([name] * len(node.results))

    def _members(self, group: str, node: Node, body: Graph, costs: list[Cost]) -> None:
        """Add the members of a fused node, with edges to the producers of its operands.

        Args:
            group: id of the fused node.
            costs: of each member.
        """
        self.drawing.graph["groups"].append(group)
        outer, metas = list(node.refs()), body.values
        #: id of each value's producer in the body's own numbering, in which operands come first
        producers = [self.producers[value] for value in outer]
        for number, member in enumerate(body.nodes):
            name = f"{group}.{number}"
            self._op(name, member, body, number, costs[number], group)
            for value in dict.fromkeys(member.refs()):
                shown = outer[value] if value < len(outer) else value
                self._edge(producers[value], name, shown, metas[value])
            producers.extend([name] * len(member.results))
        self.producers.extend(producers[value] for value in body.outputs)

    def _op(
        self, name: str, node: Node, graph: Graph, number: int, cost: Cost, group: str | None
    ) -> None:
        """Add an op; ``group`` is the id of its fused node."""
        metas = ", ".join(map(_text, node.results)) or "no result"
        self._add(name, node.op, family(node), metas, graph.line(number), cost, node.dynamic, group)
        self.drawing.nodes[name]["backward"] = graph.origin(number) in self.backward

    def _add(
        self,
        name: str,
        op: str,
        family: str,
        meta: str,
        line: str = "?",
        cost: Cost = Cost(),  # noqa: B008 - frozen
        sync: bool = False,
        group: str | None = None,
    ) -> None:
        """Add a node with all attributes of ``to_networkx``."""
        kind = op if op in ("input", "output") else "op"
        self.drawing.add_node(
            name, kind=kind, op=op, family=family, line=line, meta=meta, cost=cost,
            flops=cost.flops, bytes=cost.bytes, sync=sync, collective=None, group=group,
            backward=False,
        )  # fmt: skip

    def _edge(self, source: str, target: str, value: int, meta: TensorMeta | None) -> None:
        """Add a value to the edge between two nodes."""
        old = self.drawing.get_edge_data(source, target, {"values": (), "meta": ""})
        metas = ", ".join(text for text in (old["meta"], _text(meta)) if text)
        self.drawing.add_edge(source, target, values=(*old["values"], value), meta=metas)


def _text(meta: TensorMeta | None) -> str:
    return "unknown" if meta is None else str(meta)


def to_dot(
    graph: Graph,
    collapse: Collapse = "auto",
    mesh: Mesh | None = None,
    backward: Collection[int] = (),
) -> str:
    """Return the picture in Graphviz's DOT language.

    Args:
        mesh, backward: see ``to_networkx``.
    """
    drawing = to_networkx(graph, mesh, backward)
    by_line = _is_by_line(drawing, collapse)
    paths = _paths(drawing, by_line)
    node_labels = labels(drawing, paths)
    dot = graphviz.Digraph("graph")
    dot.attr(nodesep="0.2", ranksep="0.35", label=_legend_table(legend(drawing)))
    dot.attr(fontname="Helvetica", fontsize="10")
    dot.attr("node", fontname="Helvetica", style="filled,rounded", shape="box", color="#78909c")
    dot.attr("edge", color="#90a4ae", arrowsize="0.6")
    if by_line:
        drawing = quotient(drawing, {name: path[0] for name, path in paths.items()})
        paths = dict.fromkeys(drawing, ())
    if len(drawing) > MANY:  # without limits dot takes minutes for 1,000 nodes
        dot.attr(nslimit="1", nslimit1="1", mclimit="0.1")
    if len(drawing) > _MAX_ROUTED:
        dot.attr(splines="line")
    _draw_nodes(dot, paths, node_labels)
    _draw_edges(dot, drawing)
    return str(dot.source)


def _draw_nodes(dot: graphviz.Digraph, paths: Paths, node_labels: Mapping[str, Label]) -> None:
    """Draw every node; the members of a fused node inside a frame of its own."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, path in paths.items():
        groups.setdefault(path, []).append(name)
    for path, members in groups.items():
        if not path:
            _draw_each(dot, members, node_labels)
            continue
        with dot.subgraph(name=f"cluster_{path[-1]}") as frame:
            label = node_labels[path[-1]]
            frame.attr(
                label=_lines(f"{label.text}: {label.note}"), style="rounded", color="#546e7a"
            )
            frame.attr(bgcolor="#f7f9fa", tooltip=_lines(*label.tip))
            _draw_each(frame, members, node_labels)


def _draw_each(dot: graphviz.Digraph, names: list[str], node_labels: Mapping[str, Label]) -> None:
    """Draw nodes with their labels into a graph or a frame."""
    for name in names:
        label = node_labels[name]
        attributes = {
            "fillcolor": label.colour,
            "fontsize": f"{9 + 9 * label.scale**2:.1f}",
            "tooltip": _lines(*label.tip),
        }
        if label.mark == "collective":
            attributes |= {"shape": "hexagon", "style": "filled", "penwidth": "2"}
        elif label.mark == "sync":
            attributes |= {"peripheries": "2"}
        text = _lines(*filter(None, (label.text, label.note, label.source)))
        dot.node(_quoted(name), text, **attributes)


def _lines(*texts: str) -> str:
    """Return a text of several lines, with Graphviz's escapes and HTML disabled."""
    escaped: str = graphviz.nohtml("\\n".join(map(graphviz.escape, texts)))
    return escaped


def _draw_edges(dot: graphviz.Digraph, drawing: nx.DiGraph) -> None:
    """Draw every edge: thicker for more values, dashed if it goes back to an earlier line."""
    position = {name: number for number, name in enumerate(drawing)}
    for source, target, values in drawing.edges(data="values"):
        attributes = {}
        if len(values) > 1:
            attributes["penwidth"] = f"{1 + 0.3 * len(values).bit_length():g}"
        if position[source] > position[target]:
            attributes |= {"style": "dashed", "constraint": "false"}
        dot.edge(_quoted(source), _quoted(target), **attributes)


def _quoted(name: str) -> str:
    """Return a name without ports: ``file:12`` would be port 12 of node ``file``."""
    return name.replace(":", " line ")


def _legend_table(colours: Mapping[str, str]) -> str:
    """Return the legend as a label in Graphviz's HTML."""
    cells = "".join(f'<td bgcolor="{colour}">{name}</td>' for name, colour in colours.items())
    table = f'<table border="0" cellborder="1" cellspacing="2"><tr>{cells}</tr></table>'
    rows = f"<tr><td>{table}</td></tr><tr><td>{_FRAMES}</td></tr>"
    return f'<<table border="0">{rows}</table>>'


def render(
    graph: Graph,
    path: str | Path,
    collapse: Collapse = "auto",
    mesh: Mesh | None = None,
    backward: Collection[int] = (),
) -> Path:
    """Write the picture to a file; its suffix (one of SUFFIXES) gives the format.

    ``.html`` is a standalone page that needs no other program: groups open at a click, the mouse
    pans and zooms, and there is a search box. ``.svg`` and ``.png`` need Graphviz.

    Args:
        mesh: mesh of the ranks that run the graph, if known: collectives then show the bytes that
            a rank sends.
        backward: numbers of the recorded ops that autograd ran (``Plan.backward``); they get a box
            of their own a line.

    Returns:
        The path.

    Raises:
        ValueError: the path has another suffix.
        LazyGTError: Graphviz's program ``dot`` is not installed.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"render: {path.name!r} must end in one of {', '.join(SUFFIXES)}: the suffix says "
            f"what to write"
        )
    if path.suffix == ".html":
        write_output(path, _page(graph, collapse, path.stem, mesh, backward))
    elif path.suffix == ".dot":
        write_output(path, to_dot(graph, collapse, mesh, backward))
    else:
        write_output(path, _with_graphviz(to_dot(graph, collapse, mesh, backward), path))
    return path


def _with_graphviz(source: str, path: Path) -> bytes:
    """Render DOT source by Graphviz's ``dot`` in the format of the path's suffix."""
    # subprocess.run ends dot when it is interrupted; graphviz.pipe leaves dot running
    command = ("dot", f"-T{path.suffix.removeprefix('.')}")
    try:
        process = subprocess.run(command, input=source.encode(), capture_output=True, check=True)
    except FileNotFoundError as error:
        raise LazyGTError(
            f"render: {path.name} needs Graphviz's program 'dot', which is not on PATH. Install "
            f"it (for example: apt-get install graphviz), or write a .html or .dot file, which "
            f"need nothing."
        ) from error
    except subprocess.CalledProcessError as error:
        raise LazyGTError(
            f"render: {' '.join(command)} failed for {path.name}: "
            f"{error.stderr.decode(errors='replace').strip()}. Write a .html or .dot file instead."
        ) from error
    return process.stdout


def _page(
    graph: Graph, collapse: Collapse, title: str, mesh: Mesh | None, backward: Collection[int]
) -> str:
    """Return the HTML page; drawn op by op, its fused groups are open."""
    drawing = to_networkx(graph, mesh, backward)
    by_line = _is_by_line(drawing, collapse)
    opened = () if by_line else drawing.graph["groups"]
    return to_html(drawing, _paths(drawing, by_line), title, opened)


def _is_by_line(drawing: nx.DiGraph, collapse: Collapse) -> bool:
    """Return whether to draw one box per source line; resolves ``collapse="auto"``."""
    if collapse != "auto":
        return collapse
    lines = [data["line"] for _, data in drawing.nodes(data=True) if data["kind"] == "op"]
    return len(lines) > MANY and len(set(lines)) > 1


def _paths(drawing: nx.DiGraph, by_line: bool) -> dict[str, tuple[str, ...]]:
    """Return the boxes around each node: its line if lines are drawn, then its fused node.

    A fused node stands in the box of its first member's line.
    """
    line_of_group: dict[str, str] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for name, data in drawing.nodes(data=True):
        group = data["group"]
        line = f"{data['line']}{BACKWARD}" if data["backward"] else data["line"]
        outer_box = {"input": "inputs", "output": "outputs"}.get(data["kind"], line)
        if group is not None:
            outer_box = line_of_group.setdefault(group, outer_box)
        outer_boxes = (outer_box,) if by_line else ()
        paths[name] = outer_boxes if group is None else (*outer_boxes, group)
    return paths
