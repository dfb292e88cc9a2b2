"""Descriptions of runs: which op each step of a plan is, and who wrote it."""

from __future__ import annotations

from lazygt.errors import ProtocolError
from lazygt.graph.node import Arg, Graph, Param, Ref
from lazygt.graph.ops import title
from lazygt.graph.source import CallSite, expand
from lazygt.record.trie import TrieNode, build_graph


class Provenance:
    """Says which op a step of a run is, and who wrote it; expanded only for an error."""

    def __init__(
        self,
        step: TrieNode,
        call_sites: list[CallSite | None],
        backward: CallSite | None,
        origins: tuple[tuple[int, ...], ...],
    ) -> None:
        self.step, self.call_sites, self.backward = step, call_sites, backward
        #: for each plan, step -> recorded op; empty: the same numbers
        self.origins = origins

    def is_last(self, number: int) -> bool:
        """Whether a step of the plan is the op that was recorded last."""
        return self._op(number, 0) == len(self.call_sites) - 1

    def _op(self, number: int, rank: int) -> int:
        """The recorded op behind a step of a rank's plan."""
        origins = self._origins(rank)
        try:
            return origins[number] if origins else range(len(self.call_sites))[number]
        except IndexError:
            raise ProtocolError(
                f"it speaks of step {number}, which its plan does not have"
            ) from None

    def _origins(self, rank: int) -> tuple[int, ...]:
        return self.origins[rank if len(self.origins) > 1 else 0]

    def lines(self, rank: int) -> tuple[str, ...]:
        """The user's line of each step of a rank's plan."""
        lines = lines_of(self.step.path(), self.call_sites, self.backward)
        origins = self._origins(rank)
        return tuple(lines[origin] for origin in origins) if origins else lines

    def __call__(self, number: int, rank: int) -> tuple[str, tuple[str, ...], str]:
        number = self._op(number, rank)
        steps = self.step.path()
        lines = lines_of(steps, self.call_sites, self.backward)
        graph: Graph = build_graph(steps, (), lines, ())
        node = graph.nodes[number]
        values = graph.values

        def show(arg: Arg) -> str:
            if isinstance(arg, Ref):
                return str(values[arg.index])
            if isinstance(arg, tuple):
                return f"[{', '.join(map(show, arg))}]"
            return "a number" if isinstance(arg, Param) else str(arg)

        shown = [show(arg) for arg in node.args]
        return title(node.op), tuple(shown), graph.line(number)


def lines_of(
    steps: list[TrieNode], call_sites: list[CallSite | None], backward: CallSite | None
) -> tuple[str, ...]:
    """The user's file:line of each op; a backward op has its forward op's."""
    lines = []
    ops = [step for step in steps if step.node is not None]
    for step, call_site in zip(ops, call_sites, strict=True):
        if step.forward >= 0 and (call_site is None or call_site == backward):
            call_site = call_sites[step.forward]
        lines.append(expand(call_site or backward))
    return tuple(lines)


def line_of(step: TrieNode) -> str:
    """The user's line of a step that was recorded earlier, as some kept plan has it, or "?"."""
    if step.node is None:
        return "?"
    number = sum(passed.node is not None for passed in step.path()) - 1
    below = [step]
    while below:
        found = below.pop()
        for kept in found.plans.values():
            for plan, made_of in zip(kept.entry.plans, kept.origins, strict=True):
                origins = made_of or range(len(plan.steps.graph.nodes))
                if number in origins:
                    line: str = plan.steps.graph.line(origins.index(number))
                    return line
        below.extend(found.children.values())
    return "?"
