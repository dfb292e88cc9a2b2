"""The canonical text of a graph: printed, and parsed back to an equal graph.

    graph {
      %0: f32[64, 784] = input
      %1: f32[784] = input
      $0: float = param
      %2: f32[64, 784] = aten.mul.Tensor(%0, $0)  # train.py:12
      %3: f32[64, 784] = aten.add.Tensor(%2, %1, alpha=1)
      return %3
    }

Values are ``%n``, run-time numbers ``$n``, the worker's device ``device``. The last results of a
node that ``writes`` values are their new versions. A fused node shows its members in braces,
with numbers of their own. Where a value lies on a mesh stands behind its meta, and is left out
again by the parser:

      %2: f32[64, 784] {data: S(0), model: P(sum) -> R} = aten.mul.Tensor(%0, $0)
"""

from __future__ import annotations

import ast
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta, contiguous_stride, dtype_of, intern
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref


def print_graph(
    graph: Graph, name: str = "graph", notes: Sequence[str] = (), placements: Sequence[str] = ()
) -> str:
    """The canonical text.

    Args:
        notes: a remark after each node's line.
        placements: what stands behind each value's meta, in braces.
    """
    lines = [f"{name} {{"]
    for number, meta in enumerate(graph.inputs):
        lines.append(f"  %{number}: {_placed(meta, number, placements)} = input")
    for number, kind in enumerate(graph.params):
        lines.append(f"  ${number}: {kind} = param")
    for number, (node, results) in enumerate(graph.numbered()):
        remark = graph.line(number) if graph.lines else ""
        if number < len(notes) and notes[number]:
            remark = f"{remark}  [{notes[number]}]" if remark else f"[{notes[number]}]"
        text = print_node(node, results, placements)
        if node.body is not None:
            text = print_graph(node.body, name=text).replace("\n", "\n  ")
        lines.append(f"  {text}" + (f"  # {remark}" if remark else ""))
    lines.append(("  return " + ", ".join(f"%{value}" for value in graph.outputs)).rstrip())
    lines.append("}")
    return "\n".join(lines)


def print_node(node: Node, results: range, placements: Sequence[str] = ()) -> str:
    """One node: its results with their metas, the op, the arguments."""
    shown = [
        f"%{number}: {_placed(meta, number, placements)}"
        for number, meta in zip(results, node.results, strict=True)
    ]
    args = [_arg(arg) for arg in node.args] + [f"{key}={_arg(arg)}" for key, arg in node.kwargs]
    text = f"{', '.join(shown) or '_'} = {node.op}({', '.join(args)})"
    if node.writes:
        text += " writes " + ", ".join(f"%{value}" for value in node.writes)
    return text + (" dynamic" if node.dynamic else "")


def _placed(meta: TensorMeta | None, number: int, placements: Sequence[str]) -> str:
    text = "none" if meta is None else str(meta)
    return (
        f"{text} {placements[number]}" if number < len(placements) and placements[number] else text
    )


def _arg(arg: Arg) -> str:
    if type(arg) is Ref:
        return f"%{arg.index}"
    if type(arg) is Param:
        return f"${arg.index}"
    if arg is DEVICE:
        return "device"
    if type(arg) is tuple:
        return "[" + ", ".join(_arg(item) for item in arg) + "]"
    if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
        return str(arg)
    odd = isinstance(arg, complex) or (isinstance(arg, float) and not math.isfinite(arg))
    return _spelled(arg) if odd else repr(arg)


def _spelled(number: float | complex) -> str:
    """A number that has no literal: as its type reads it, an unusual NaN by its bits."""
    kind, text = type(number), str(number)
    if exact(kind(text)) != exact(number):
        parts = (number.real, number.imag) if kind is complex else (number,)
        text = "0x" + struct.pack(f">{len(parts)}d", *parts).hex()
    return f"{kind.__name__}({text!r})"


def _read_spelled(token: str) -> Any:
    """The number that ``_spelled`` wrote."""
    name, _, inner = token.partition("(")
    kind: Any = {"float": float, "complex": complex}[name]
    text = ast.literal_eval(inner[:-1])
    if not text.startswith("0x"):
        return kind(text)
    raw = bytes.fromhex(text[2:])
    return kind(*struct.unpack(f">{len(raw) // 8}d", raw))


_TOKEN = re.compile(
    r"\s*(?:(?P<ref>%\d+)|(?P<param>\$\d+)|(?P<torch>torch\.\w+)|(?P<special>(?:float|complex)\('[^']*'\))"
    r"|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<number>-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
    r"|(?P<name>\w+)|(?P<mark>[\[\](),=]))"
)
_LABELS = re.compile(r" \{[^{}]*\}")
_META = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?:@\((?P<stride>[\d, -]*)\))?(?:\+(?P<offset>\d+))?"
    r"(?P<conj>~conj)?(?P<neg>~neg)?$"
)


def parse_graph(text: str) -> Graph:
    """The graph whose canonical text this is.

    Raises:
        ValueError: naming the line that can't be read.
    """
    rows = iter(text.strip().splitlines()[1:])
    return _parse_rows(rows)


def _parse_rows(rows: Iterator[str]) -> Graph:
    """The graph whose rows come next, up to the row that only closes it."""
    found = _Rows()
    for raw in rows:
        body, _, remark = raw.strip().partition("  # ")
        if body.startswith("}"):
            break
        if body.startswith("return"):
            found.outputs = tuple(int(value) for value in re.findall(r"%(\d+)", body))
            continue
        left, _, right = body.partition(" = ")
        left = _LABELS.sub("", left)
        if right == "input":
            found.inputs.append(parse_meta(left.split(": ", 1)[1]))
        elif right == "param":
            found.params.append(left.split(": ", 1)[1])
        elif right.endswith(" {"):
            node = _parse_node(left, right.removesuffix(" {"), body)
            inner = _parse_rows(rows)
            found.add(replace(node, body=inner), inner.lines[-1] if inner.lines else "")
        else:
            line = "" if remark.startswith("[") else remark.partition("  [")[0]
            found.add(_parse_node(left, right, body), line)
    return found.graph()


class _Rows:
    """What has been read of a graph."""

    def __init__(self) -> None:
        self.inputs: list[TensorMeta] = []
        self.params: list[str] = []
        self.nodes: list[Node] = []
        self.lines: list[str] = []
        self.outputs: tuple[int, ...] = ()

    def add(self, node: Node, line: str) -> None:
        self.nodes.append(node)
        self.lines.append(line)

    def graph(self) -> Graph:
        shown = tuple(self.lines) if any(self.lines) else ()
        return Graph(tuple(self.inputs), tuple(self.params), tuple(self.nodes), self.outputs, shown)


def parse_meta(text: str) -> TensorMeta:
    """The meta that ``str(meta)`` printed; ValueError for anything else."""
    found = _META.match(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a tensor meta such as f32[2, 3]")
    shape = _ints(found["shape"])
    stride = contiguous_stride(shape) if found["stride"] is None else _ints(found["stride"])
    offset = int(found["offset"] or 0)
    return intern(shape, stride, dtype_of(found["dtype"]), offset, bool(found["conj"]),
                  bool(found["neg"]))  # fmt: skip


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(",") if item.strip())


def _parse_node(left: str, right: str, line: str) -> Node:
    head = re.match(r"([\w.]+)\(", right)
    if head is None:
        raise ValueError(f"not a node: {line!r}")
    reader = _Reader(right, head.end(), line)
    args, kwargs = reader.arguments()
    rest = right[reader.at :].strip()
    dynamic = rest.endswith("dynamic")
    writes = tuple(int(value) for value in re.findall(r"%(\d+)", rest))
    metas = tuple(
        None if shown == "none" else parse_meta(shown)
        for shown in re.findall(r"%\d+: (none|.*?)(?=, %\d+: |$)", left)
    )
    fresh = len(metas) - (0 if dynamic else len(writes))
    written = tuple(meta for meta in metas[fresh:] if meta is not None)
    return Node(head[1], args, kwargs, metas[:fresh], writes, written, dynamic)


class _Reader:
    """Reads the arguments of one node."""

    def __init__(self, text: str, at: int, line: str) -> None:
        self.text, self.at, self.line = text, at, line

    def next(self) -> tuple[str, str]:
        found = _TOKEN.match(self.text, self.at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"can't read {self.text[self.at :]!r} in {self.line!r}")
        self.at = found.end()
        return found.lastgroup, found[found.lastgroup]

    def peek(self, mark: str) -> bool:
        return self.text[self.at :].lstrip().startswith(mark)

    def arguments(self) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        while not self.peek(")"):
            named = re.match(r"\s*(\w+)=", self.text[self.at :])
            if named is not None:
                self.at += named.end()
                kwargs.append((named[1], self.value()))
            else:
                args.append(self.value())
            if self.peek(","):
                self.next()
        self.next()
        return tuple(args), tuple(kwargs)

    def value(self) -> Arg:
        kind, token = self.next()
        if kind == "ref":
            return Ref(int(token[1:]))
        if kind == "param":
            return Param(int(token[1:]))
        if kind == "torch":
            return getattr(torch, token.removeprefix("torch."))
        if kind == "special":
            return _read_spelled(token)
        if kind == "mark" and token == "[":
            return self._list()
        if kind == "name" and token == "device":
            return DEVICE
        return self._literal(token)

    def _list(self) -> tuple[Any, ...]:
        items: list[Any] = []
        while not self.peek("]"):
            items.append(self.value())
            if self.peek(","):
                self.next()
        self.next()
        return tuple(items)

    def _literal(self, token: str) -> Any:
        try:
            return ast.literal_eval(token)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"can't read {token!r} in {self.line!r}") from error


# A graph prints as its text; set here because text knows nodes and not the reverse.
Graph.__str__ = print_graph  # type: ignore[assignment]


# -- numbers as people read them: three digits and a unit ------------------------------------------

_PREFIXES = ("", "k", "M", "G", "T", "P")


def amount(number: int, unit: str) -> str:
    """``2.1 Mflop``: three digits at most, in powers of 1000; without a unit ``2.1 M``."""
    power = min((len(str(abs(number))) - 1) // 3, len(_PREFIXES) - 1)
    return f"{number / 1000**power:.3g} {_PREFIXES[power]}{unit}".rstrip()


def count(number: int, one: str, many: str = "") -> str:
    """``1 launch``, ``2 launches``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """``3.2 us``: three digits, in seconds, milliseconds or microseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
