"""How graphs, plans and sessions show themselves: methods that load what they need when called.

They are set here because the classes stand below what draws and explains them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph
from lazygt.runtime.plan import Plan
from lazygt.session import Session

if TYPE_CHECKING:
    from lazygt.report import Report


def _explain_graph(graph: Graph) -> Report:
    """What one run of the graph costs, what is fused in it and why the rest is not."""
    from lazygt.explain import explain_graph  # why: rich takes a while to load

    return explain_graph(graph)


def _explain_plan(plan: Plan) -> Report:
    """What one run of the plan costs, what is fused in it and why the rest is not."""
    from lazygt.explain import explain_plan  # why: rich takes a while to load

    return explain_plan(plan)


def _explain_session(session: Session) -> Report:
    """The same for every run so far of every plan that is kept; costs no sync point."""
    from lazygt.explain import explain_session  # why: rich takes a while to load

    return explain_session(session)


def _to_networkx(graph: Graph, mesh: Mesh | None = None, backward: Collection[int] = ()) -> Any:
    """The graph as networkx has it; see ``graph.picture.to_networkx``."""
    # why: networkx takes a tenth of a second to load
    from lazygt.graph.picture import to_networkx

    return to_networkx(graph, mesh, backward)


def _render(
    graph: Graph,
    path: str | Path,
    collapse: Any = "auto",
    mesh: Mesh | None = None,
    backward: Collection[int] = (),
) -> Path:
    """Write a picture of the graph to a file; see ``graph.picture.render``."""
    # why: networkx takes a tenth of a second to load
    from lazygt.graph.picture import render

    return render(graph, path, collapse, mesh, backward)


Graph.to_networkx, Graph.render, Graph.explain = _to_networkx, _render, _explain_graph
Plan.explain = _explain_plan
Session.explain = _explain_session  # type: ignore[attr-defined]
