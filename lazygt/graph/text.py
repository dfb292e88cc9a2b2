"""Parser of a graph's canonical text, which ``node.print_graph`` prints.

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
with numbers of their own. A value's placement on a mesh follows its meta, and the parser skips it:

      %2: f32[64, 784] {data: S(0), model: P(sum) -> R} = aten.mul.Tensor(%0, $0)
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lazygt.graph.meta import TensorMeta, contiguous_stride, dtype_of, intern, torch_name
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref


def _parse_number(token: str) -> Any:
    """Return the number whose text ``node._number_text`` printed."""
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
    """Return the graph of a canonical text, equal to the printed one.

    Raises:
        ValueError: naming the line that can't be read.
    """
    lines = iter(text.strip().splitlines()[1:])
    return _parse_lines(lines)


def _parse_lines(lines: Iterator[str]) -> Graph:
    """Return the graph of the next lines, up to its closing brace."""
    parsed = _ParsedLines()
    for text_line in lines:
        body, _, remark = text_line.strip().partition("  # ")
        if body.startswith("}"):
            break
        if body.startswith("return"):
            parsed.outputs = tuple(int(value) for value in re.findall(r"%(\d+)", body))
            continue
        results, _, call = body.partition(" = ")
        results = _LABELS.sub("", results)
        if call == "input":
            parsed.inputs.append(parse_meta(results.split(": ", 1)[1]))
        elif call == "param":
            parsed.params.append(results.split(": ", 1)[1])
        elif call.endswith(" {"):
            node = _parse_node(results, call.removesuffix(" {"), body)
            inner = _parse_lines(lines)
            parsed.add(replace(node, body=inner), inner.lines[-1] if inner.lines else "")
        else:
            line = "" if remark.startswith("[") else remark.partition("  [")[0]
            parsed.add(_parse_node(results, call, body), line)
    return parsed.graph()


class _ParsedLines:
    """Parsed lines of a graph: its fields under construction."""

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
        lines = tuple(self.lines) if any(self.lines) else ()
        return Graph(tuple(self.inputs), tuple(self.params), tuple(self.nodes), self.outputs, lines)


def parse_meta(text: str) -> TensorMeta:
    """Return the meta that ``str(meta)`` printed; ValueError for anything else."""
    match = _META.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a tensor meta such as f32[2, 3]")
    shape = _ints(match["shape"])
    stride = contiguous_stride(shape) if match["stride"] is None else _ints(match["stride"])
    offset = int(match["offset"] or 0)
    return intern(shape, stride, dtype_of(match["dtype"]), offset, bool(match["conj"]),
                  bool(match["neg"]))  # fmt: skip


def _ints(text: str) -> tuple[int, ...]:
    """Return the ints of a comma-separated text."""
    return tuple(int(item) for item in text.split(",") if item.strip())


def _parse_node(results: str, call: str, line: str) -> Node:
    """Return the node of a line, from its results (left) and its call (right)."""
    head = re.match(r"([\w.]+)\(", call)
    if head is None:
        raise ValueError(f"not a node: {line!r}")
    reader = _Reader(call, head.end(), line)
    args, kwargs = reader.arguments()
    rest = call[reader.at :].strip()
    dynamic = rest.endswith("dynamic")
    writes = tuple(int(value) for value in re.findall(r"%(\d+)", rest))
    metas = tuple(
        None if meta_text == "none" else parse_meta(meta_text)
        for meta_text in re.findall(r"%\d+: (none|.*?)(?=, %\d+: |$)", results)
    )
    fresh = len(metas) - (0 if dynamic else len(writes))
    written = tuple(meta for meta in metas[fresh:] if meta is not None)
    return Node(head[1], args, kwargs, metas[:fresh], writes, written, dynamic)


class _Reader:
    """Recursive-descent parser of the arguments of one node."""

    def __init__(self, text: str, at: int, line: str) -> None:
        self.text, self.at, self.line = text, at, line

    def next(self) -> tuple[str, str]:
        """Return the next token as (kind, text)."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"can't read {self.text[self.at :]!r} in {self.line!r}")
        self.at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def peek(self, mark: str) -> bool:
        """Return whether the next token is ``mark``."""
        return self.text[self.at :].lstrip().startswith(mark)

    def arguments(self) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Parse arguments up to the closing parenthesis: (args, kwargs)."""
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
        """Parse one argument."""
        kind, token = self.next()
        if kind == "ref":
            return Ref(int(token[1:]))
        if kind == "param":
            return Param(int(token[1:]))
        if kind == "torch":
            return torch_name(token)
        if kind == "special":
            return _parse_number(token)
        if kind == "mark" and token == "[":
            return self._list()
        if kind == "name" and token == "device":
            return DEVICE
        return self._literal(token)

    def _list(self) -> tuple[Any, ...]:
        """Parse a list up to its closing bracket."""
        items: list[Any] = []
        while not self.peek("]"):
            items.append(self.value())
            if self.peek(","):
                self.next()
        self.next()
        return tuple(items)

    def _literal(self, token: str) -> Any:
        """Parse a Python literal."""
        try:
            return ast.literal_eval(token)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"can't read {token!r} in {self.line!r}") from error


# -- formatting of numbers -------------------------------------------------------------------------

_PREFIXES = ("", "k", "M", "G", "T", "P")


def amount(number: int, unit: str) -> str:
    """Return ``2.1 Mflop``: at most three digits, in powers of 1000; without a unit ``2.1 M``."""
    power = min((len(str(abs(number))) - 1) // 3, len(_PREFIXES) - 1)
    return f"{number / 1000**power:.3g} {_PREFIXES[power]}{unit}".rstrip()


def count(number: int, singular: str, plural: str = "") -> str:
    """Return ``1 launch``, ``2 launches``."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def duration(seconds: float) -> str:
    """Return ``3.2 us``: three digits, in seconds, milliseconds or microseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
