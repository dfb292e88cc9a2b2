"""Labels and layout of a picture, and one HTML page with both.

The page needs no network and no other file; its own script opens, moves and searches it.

    rows of boxes, top to bottom        [ in0 ] [ in1 ]          row 0
    an edge goes to a later row             [ mul ]              row 1
    a box may hold rows of its own     [ train.py:20 [..] ]      row 2
"""

from __future__ import annotations

import json
import linecache
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import networkx as nx

from lazygt.graph.collectives import Communication
from lazygt.graph.cost import Cost, base_name
from lazygt.graph.placement import WAIT
from lazygt.graph.text import amount, count

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

#: For each node the boxes around it, from the outside.
Paths = Mapping[str, tuple[str, ...]]

#: Suffix of a line's box with the ops that autograd ran for that line.
BACKWARD = " backward"
_SWEEPS = 4
_NARROWEST = 8
_LONGEST = 40
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Label:
    """Look of a box.

    Attributes:
        text, note: first and second line of its text.
        source: the user's code, for a box of one line.
        colour: fill colour.
        scale: 0 for the cheapest box to 1 for the dearest; letters grow with it.
        mark: ``"sync"``, ``"collective"`` or ``""``, for its frame.
        tip: lines of its tooltip.
    """

    text: str
    note: str
    source: str
    colour: str
    scale: float
    mark: str
    tip: tuple[str, ...]


def labels(drawing: nx.DiGraph, paths: Paths) -> dict[str, Label]:
    """Return the label of every node of ``picture.to_networkx`` and of every box."""
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
    """Return the logarithm of flops and bytes, scaled so that the dearest has 1."""
    work = {name: math.log1p(cost.flops + cost.bytes) for name, cost in costs.items()}
    most = max(work.values(), default=0.0) or 1.0
    return {name: amount / most for name, amount in work.items()}


def _node_label(data: Mapping[str, Any], scale: float) -> Label:
    op, note = data["op"], data["meta"]
    text = op
    tip: tuple[str, ...] = (op, note)
    if data["kind"] == "op":
        text, tip = base_name(op), (*tip, *_cost(data["cost"]), *_source(data["line"]))
    if data["collective"] is not None:
        text, note = _collective(data["collective"])
        tip = (*_sent(data["collective"]), *tip)
    return Label(text, _cut(note), "", COLOURS[data["family"]], scale, _mark([data]), tip)


def _box_label(title: str, members: list[dict[str, Any]], cost: Cost, scale: float) -> Label:
    """Return the label of a box, in the colour of its dearest member's family."""
    dearest = max(members, key=lambda data: data["cost"].flops + data["cost"].bytes)
    colour, mark = COLOURS[dearest["family"]], _mark(members)
    if dearest["kind"] != "op":
        note = count(len(members), "value")
        return Label(title, note, "", colour, scale, mark, (note,))
    kinds = Counter(data["family"] for data in members).most_common()
    tip = (", ".join(f"{number} {kind}" for kind, number in kinds), *_cost(cost))
    met = [record for data in members if (record := data["collective"]) is not None]
    tip += tuple(" ".join(_collective(record)) for record in met[:_NAMED])
    for line in dict.fromkeys(data["line"] for data in members):
        tip += _source(line)
    source = "".join(map(_cut, _source(title.removesuffix(BACKWARD))[1:]))
    note = f"{count(len(members), 'op')}, {_amounts(cost)}"
    if met:
        sent = amount(sum(record.nbytes for record in met), "B")
        note += f"; {count(len(met), 'collective')}, {sent}"
    return Label(os.path.basename(title), note, source, colour, scale, mark, tip)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _collective(record: Communication) -> tuple[str, str]:
    """Return a collective's kind, and its bytes."""
    kind = f"{record.kind} {record.reduce_op}" if record.reduce_op else record.kind
    return kind, f"{amount(record.nbytes, 'B')} along {record.mesh_dim}"


def _sent(record: Communication) -> tuple[str, ...]:
    """Return the known facts on its messages; a graph alone has no number of ranks."""
    if record.ranks == 1:
        return (record.why,)
    ring = f"each of {record.ranks} ranks sends {amount(record.ring_bytes, 'B')} in a ring"
    return ring, record.why


def _mark(members: Iterable[Mapping[str, Any]]) -> str:
    marks = {"collective" if _meets(m) else "sync" * m["sync"] for m in members}
    return max(marks & {"collective", "sync"}, default="")


def _meets(member: Mapping[str, Any]) -> bool:
    return bool(member["family"] == "collective" and member["op"] != WAIT)


def _cost(cost: Cost) -> tuple[str, ...]:
    moved = f"reads {amount(cost.bytes_read, 'B')}, writes {amount(cost.bytes_written, 'B')}"
    return f"{_amounts(cost)}, {count(cost.launches, 'launch', 'launches')}", moved


def _amounts(cost: Cost) -> str:
    return f"{amount(cost.flops, 'flop')}, {amount(cost.bytes, 'B')}"


def _source(line: str) -> tuple[str, ...]:
    """Return ``file:line``, and the user's code there if the file can be read."""
    path, _, number = line.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if path and number.isdigit() else ""
    return (line, text) if text else (line,)


def quotient(drawing: nx.DiGraph, box_of: Mapping[str, str]) -> nx.DiGraph:
    """Return the drawing with every node replaced by its box, without edges inside a box.

    Nodes that ``box_of`` does not name are left out. Boxes stand in the order of their first
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
    """Return the nodes in rows, so that edges along the order of the nodes point down.

    It is a layered drawing (Sugiyama). A node stands one row below its last predecessor; a node
    without predecessors, one row above its first successor. Inside a row nodes stand near the mean
    place of their neighbours. A row that is too wide continues in the next one.
    """
    place = {node: number for number, node in enumerate(graph)}
    ahead = nx.DiGraph()
    ahead.add_nodes_from(graph)
    ahead.add_edges_from(edge for edge in graph.edges if place[edge[0]] < place[edge[1]])
    layers = _layers(ahead)
    for _ in range(_SWEEPS):
        _sort_by_neighbours(layers, ahead.pred)
        _sort_by_neighbours(layers[::-1], ahead.succ)
    widest = max(_NARROWEST, math.isqrt(2 * len(graph)))
    return [
        layer[start : start + widest] for layer in layers for start in range(0, len(layer), widest)
    ]


def _layers(ahead: nx.DiGraph) -> list[list[Any]]:
    depth: dict[Any, int] = {}
    for node in ahead:
        depth[node] = 1 + max((depth[source] for source in ahead.pred[node]), default=-1)
    for node in ahead:
        if not ahead.pred[node] and ahead.succ[node]:
            depth[node] = min(depth[target] for target in ahead.succ[node]) - 1
    layers: list[list[Any]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for node, row in depth.items():
        layers[row].append(node)
    return layers


def _sort_by_neighbours(layers: list[list[Any]], neighbours: Mapping[Any, Any]) -> None:
    """Run one sweep of the barycentre method: sort rows by the neighbours' mean place."""
    place = {
        node: (number + 0.5) / len(layer) for layer in layers for number, node in enumerate(layer)
    }
    for layer in layers:
        mean = {}
        for node in layer:
            near = [place[other] for other in neighbours[node]] or [place[node]]
            mean[node] = sum(near) / len(near)
        layer.sort(key=mean.__getitem__)
        place.update((node, (number + 0.5) / len(layer)) for number, node in enumerate(layer))


def to_html(drawing: nx.DiGraph, paths: Paths, title: str, opened: Collection[str] = ()) -> str:
    """Return the HTML page of a drawing of ``picture.to_networkx``.

    Args:
        paths: for each node the boxes around it, from the outside; may be none.
        opened: boxes that are open at first.
    """
    boxes: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    shown = labels(drawing, paths)

    def arrange(nodes: Iterable[str], depth: int, parent: int) -> list[list[int]]:
        box_of = {node: (*paths[node], node)[depth] for node in nodes}
        level = quotient(drawing, box_of)
        for name in level:
            numbers[name] = number = len(boxes)
            box = {**asdict(shown[name]), "parent": parent, "open": name in opened, "rows": None}
            boxes.append(box)
            if name not in drawing:
                box["rows"] = arrange(level.nodes[name]["members"], depth + 1, number)
        return [[numbers[name] for name in row] for row in rows(level)]

    top = arrange(drawing, 0, -1)
    edges = [
        [numbers[source], numbers[target], meta]
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
    """Encode as JSON that is safe inside ``<script>``: without ``</script>`` and ``<!--``."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
