"""Labels and layered layout of a drawn graph, and a standalone HTML page with both.

The page needs no network and no other file; its own script opens, moves and searches it.

    rows of boxes, top to bottom        [ in0 ] [ in1 ]          row 0
    an edge goes to a later row             [ mul ]              row 1
    a box may hold rows of its own     [ train.py:20 [..] ]      row 2
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import networkx as nx

from lazygt.graph.collectives import Communication, collective_name
from lazygt.graph.cost import Cost, base_name
from lazygt.graph.placement import WAIT
from lazygt.graph.text import amount, count
from lazygt.observe.report import code_at
from lazygt.printing.tables import truncated

#: Fill colour of each family of ops, and of inputs and outputs.
COLOURS = {
    "matmul": "#f4a582",
    "reduction": "#fddc8a",
    "pointwise": "#b8dba6",
    "random": "#e3b5dd",
    "memory": "#b9c9e8",
    "collective": "#ff8f9c",
    "view": "#e6ecef",
    "other": "#d7ccc8",
    "input": "#ffffff",
    "output": "#b8c4ca",
}

#: Node -> the boxes around it, outermost first.
Paths = Mapping[str, tuple[str, ...]]

#: Suffix of the box with the ops that autograd ran for a line.
BACKWARD = " backward"
_BARYCENTRE_SWEEPS = 4
_MIN_ROW_WIDTH = 8
_MAX_TEXT = 40
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Label:
    """Look of a box.

    Attributes:
        text, note: first and second line of the box's text.
        source: the user's code, for a box of one source line.
        colour: fill colour.
        scale: 0 for the cheapest box to 1 for the most expensive; sets the font size.
        mark: style of the frame: ``"sync"``, ``"collective"`` or ``""``.
        tip: lines of the tooltip.
    """

    text: str
    note: str
    source: str
    colour: str
    scale: float
    mark: str
    tip: tuple[str, ...]


def labels(drawing: nx.DiGraph, paths: Paths) -> dict[str, Label]:
    """Return node or box -> its label, for a drawing of ``picture.to_networkx``."""
    nodes = dict(drawing.nodes(data=True))
    boxes: dict[str, list[dict[str, Any]]] = {}
    for name, path in paths.items():
        for box in path:
            boxes.setdefault(box, []).append(nodes[name])
    costs = {name: data["cost"] for name, data in nodes.items()}
    totals = {box: sum((data["cost"] for data in inside), Cost()) for box, inside in boxes.items()}
    scales = _scales(costs) | _scales(totals)
    texts = {name: _node_label(data, scales[name]) for name, data in nodes.items()}
    for box, inside in boxes.items():
        title = "fused" if box in drawing.graph["groups"] else box
        texts[box] = _box_label(title, inside, totals[box], scales[box])
    return texts


def _scales(costs: Mapping[str, Cost]) -> dict[str, float]:
    """Return name -> log(1 + flops + bytes), scaled so that the most expensive has 1."""
    work = {name: math.log1p(cost.flops + cost.bytes) for name, cost in costs.items()}
    most = max(work.values(), default=0.0) or 1.0
    return {name: amount / most for name, amount in work.items()}


def _node_label(data: Mapping[str, Any], scale: float) -> Label:
    """Return the label of an input, an op or an output, by its node's attributes."""
    op, note = data["op"], data["meta"]
    text = op
    tip: tuple[str, ...] = (op, note)
    if data["kind"] == "op":
        text, tip = base_name(op), (*tip, *_cost_lines(data["cost"]), *_source_lines(data["line"]))
    if data["collective"] is not None:
        text, note = _collective_text(data["collective"])
        tip = (*_ring_traffic(data["collective"]), *tip)
    return Label(
        text,
        truncated(note, _MAX_TEXT),
        "",
        COLOURS[data["family"]],
        scale,
        _frame_mark([data]),
        tip,
    )


def _box_label(title: str, members: list[dict[str, Any]], cost: Cost, scale: float) -> Label:
    """Return the label of a box, in the colour of its most expensive member's family.

    Args:
        title: the user's line, or ``fused``.
        members: attributes of the nodes inside.
        cost: sum of their costs.
        scale: see ``Label``.
    """
    costliest = max(members, key=lambda data: data["cost"].flops + data["cost"].bytes)
    colour, mark = COLOURS[costliest["family"]], _frame_mark(members)
    if costliest["kind"] != "op":
        note = count(len(members), "value")
        return Label(title, note, "", colour, scale, mark, (note,))
    families = Counter(data["family"] for data in members).most_common()
    tip = (", ".join(f"{number} {kind}" for kind, number in families), *_cost_lines(cost))
    collectives = [record for data in members if (record := data["collective"]) is not None]
    tip += tuple(" ".join(_collective_text(record)) for record in collectives[:_MAX_LISTED])
    for line in dict.fromkeys(data["line"] for data in members):
        tip += _source_lines(line)
    code = truncated(code_at(title.removesuffix(BACKWARD)), _MAX_TEXT)
    note = f"{count(len(members), 'op')}, {_amounts(cost)}"
    if collectives:
        payload = amount(sum(record.nbytes for record in collectives), "B")
        note += f"; {count(len(collectives), 'collective')}, {payload}"
    return Label(os.path.basename(title), note, code, colour, scale, mark, tip)


def _collective_text(record: Communication) -> tuple[str, str]:
    """Return a collective as (kind, bytes and mesh axis)."""
    payload = f"{amount(record.nbytes, 'B')} along {record.mesh_dim}"
    return collective_name(record.kind, record.reduce_op), payload


def _ring_traffic(record: Communication) -> tuple[str, ...]:
    """Return lines on a collective's messages; the ring's bytes only if the ranks are known."""
    if record.ranks == 1:
        return (record.why,)
    ring = f"each of {record.ranks} ranks sends {amount(record.ring_bytes, 'B')} in a ring"
    return ring, record.why


def _frame_mark(members: Iterable[Mapping[str, Any]]) -> str:
    """Return the frame's style: sync before collective before none."""
    marks = {"collective" if _is_collective(m) else "sync" * m["sync"] for m in members}
    return max(marks & {"collective", "sync"}, default="")


def _is_collective(member: Mapping[str, Any]) -> bool:
    return bool(member["family"] == "collective" and member["op"] != WAIT)


def _cost_lines(cost: Cost) -> tuple[str, ...]:
    """Return the tooltip's lines on a cost: flops, bytes and launches; reads and writes."""
    traffic = f"reads {amount(cost.bytes_read, 'B')}, writes {amount(cost.bytes_written, 'B')}"
    return f"{_amounts(cost)}, {count(cost.launches, 'launch', 'launches')}", traffic


def _amounts(cost: Cost) -> str:
    return f"{amount(cost.flops, 'flop')}, {amount(cost.bytes, 'B')}"


def _source_lines(line: str) -> tuple[str, ...]:
    """Return ``file:line``, and the user's code there if the file can be read."""
    code = code_at(line)
    return (line, code) if code else (line,)


def quotient(drawing: nx.DiGraph, box_of: Mapping[str, str]) -> nx.DiGraph:
    """Quotient graph of a drawing: one node per box, without edges inside a box.

    Nodes that ``box_of`` does not name are left out. Boxes are in the order of their first
    members. Each node has ``members``, a list, and each edge ``values``, a tuple.
    """
    boxes = nx.DiGraph()
    for node, box in box_of.items():
        if box not in boxes:
            boxes.add_node(box, members=[])
        boxes.nodes[box]["members"].append(node)
    for source, target, values in drawing.out_edges(box_of, data="values"):
        if target in box_of and box_of[source] != box_of[target]:
            edge = box_of[source], box_of[target]
            old = boxes.get_edge_data(*edge, {"values": ()})["values"]
            boxes.add_edge(*edge, values=old + values)
    return boxes


def rows(graph: nx.DiGraph) -> list[list[Any]]:
    """Layered drawing (Sugiyama's method): return the rows of nodes, top to bottom.

    Only forward edges count: those along the order of the nodes; all of them point down. A node is
    one row below its last predecessor; a node without predecessors, one row above its first
    successor. Inside a row, nodes are ordered by the mean position of their neighbours (barycentre
    method). A row that is too wide continues in the next one.
    """
    position = {node: number for number, node in enumerate(graph)}
    forward = nx.DiGraph()
    forward.add_nodes_from(graph)
    forward.add_edges_from(edge for edge in graph.edges if position[edge[0]] < position[edge[1]])
    layers = _layers(forward)
    for _ in range(_BARYCENTRE_SWEEPS):
        _sort_by_neighbours(layers, forward.pred)
        _sort_by_neighbours(layers[::-1], forward.succ)
    widest = max(_MIN_ROW_WIDTH, math.isqrt(2 * len(graph)))
    return [
        layer[start : start + widest] for layer in layers for start in range(0, len(layer), widest)
    ]


def _layers(forward: nx.DiGraph) -> list[list[Any]]:
    """Assign nodes to layers by the longest path from a source."""
    depth: dict[Any, int] = {}
    for node in forward:
        depth[node] = 1 + max((depth[source] for source in forward.pred[node]), default=-1)
    for node in forward:
        if not forward.pred[node] and forward.succ[node]:
            depth[node] = min(depth[target] for target in forward.succ[node]) - 1
    layers: list[list[Any]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for node, row in depth.items():
        layers[row].append(node)
    return layers


def _sort_by_neighbours(layers: list[list[Any]], neighbours: Mapping[Any, Any]) -> None:
    """Run one sweep of the barycentre method: sort rows by the neighbours' mean position."""
    position = {
        node: (number + 0.5) / len(layer) for layer in layers for number, node in enumerate(layer)
    }
    for layer in layers:
        barycentre = {}
        for node in layer:
            positions = [position[other] for other in neighbours[node]] or [position[node]]
            barycentre[node] = sum(positions) / len(positions)
        layer.sort(key=barycentre.__getitem__)
        position.update((node, (number + 0.5) / len(layer)) for number, node in enumerate(layer))


def to_html(drawing: nx.DiGraph, paths: Paths, title: str, opened: Collection[str] = ()) -> str:
    """Return the HTML page of a drawing of ``picture.to_networkx``.

    Args:
        paths: node -> the boxes around it, outermost first; may be empty.
        opened: boxes that are open at first.
    """
    boxes: list[dict[str, Any]] = []
    box_numbers: dict[str, int] = {}
    box_labels = labels(drawing, paths)

    def arrange(nodes: Iterable[str], depth: int, parent: int) -> list[list[int]]:
        """Add the boxes around nodes at a depth of their paths, and those inside, recursively.

        Args:
            parent: number of the box around them; -1 at the top.

        Returns:
            The numbers of the boxes, in rows from top to bottom.
        """
        box_of = {node: (*paths[node], node)[depth] for node in nodes}
        level = quotient(drawing, box_of)
        for name in level:
            box_numbers[name] = number = len(boxes)
            box = {
                **asdict(box_labels[name]),
                "parent": parent,
                "open": name in opened,
                "rows": None,
            }
            boxes.append(box)
            if name not in drawing:
                box["rows"] = arrange(level.nodes[name]["members"], depth + 1, number)
        return [[box_numbers[name] for name in row] for row in rows(level)]

    top = arrange(drawing, 0, -1)
    edges = [
        [box_numbers[source], box_numbers[target], meta]
        for source, target, meta in drawing.edges(data="meta")
    ]
    data = {"title": title, "legend": legend(drawing), "rows": top, "boxes": boxes, "edges": edges}
    template = files("lazygt.observe").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace('"__DATA__"', _embedded(data))


def legend(drawing: nx.DiGraph) -> dict[str, str]:
    """Return the colours that a drawing uses, by family."""
    used = {family for _, family in drawing.nodes(data="family")}
    return {family: colour for family, colour in COLOURS.items() if family in used}


def _embedded(data: Any) -> str:
    """Encode as JSON without ``<``, which is safe inside a ``<script>`` element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
