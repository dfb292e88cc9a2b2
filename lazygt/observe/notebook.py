"""Notebook displays: a tensor's values and facts, and a session's counts.

A session's counts are shown without a sync point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import torch

from lazygt.graph.collectives import Communication
from lazygt.graph.meta import TensorMeta
from lazygt.graph.source import CallSite, expand
from lazygt.record.recorder import recorder_of
from lazygt.record.tensor import LazyTensor, State, storage_of, view_of
from lazygt.session import Session

#: Counts of ``stats()`` in the table of a session.
_SHOWN = ("ops_recorded", "plans_built", "plan_hits", "messages_sent", "bytes_sent",
          "messages_received", "bytes_received", "bytes_uploaded", "bytes_fetched")  # fmt: skip


def summary(t: LazyTensor) -> dict[str, str]:
    """Return shape, dtype, bytes, state of the value, and the user's line that made it."""
    state, call_site = _location(t)
    meta = TensorMeta.of(t)
    return {
        "shape": str(tuple(t.shape)),
        "dtype": str(t.dtype),
        "bytes": str(meta.nbytes),
        "requires_grad": str(t.requires_grad),
        "value": state,
        "made at": expand(call_site),
    }


def _location(t: LazyTensor) -> tuple[str, CallSite | None]:
    """Return the state of a tensor's value (recorded, remote, ...) and its call site, if known."""
    storage, view = storage_of(t), view_of(t)
    state = storage.state
    if state is State.RECORDED:
        current_view = (
            view is not None and view.serial == storage.serial and view.base == storage.index
        )
        index = view.index if view is not None and current_view else storage.index
        return state.value, recorder_of(t).call_site_of(index)
    if state is State.REMOTE and storage.remote is not None:
        return state.value, storage.remote.call_site
    return state.value, None


def tensor_html(t: LazyTensor) -> str:
    """Return a tensor's values and facts as HTML. A sync point, as ``print`` is."""
    return tensor_bundle(t)["text/html"]


def tensor_bundle(t: LazyTensor) -> dict[str, str]:
    """Return text and HTML for IPython, with one fetch. A sync point, as ``print`` is."""
    rows, text = summary(t), repr(t)
    rows["value"] = storage_of(t).state.value  # ``repr`` has computed the value
    return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>{_facts(_title(t), rows)}"}


def session_html(session: Session) -> str:
    """Return a session's counts and the collectives of its last plan as HTML tables."""
    stats, plan = session.stats(), session.last_plan
    flushes = ", ".join(f"{reason} {count}" for reason, count in stats["flushes"].items())
    rows = {key.replace("_", " "): f"{stats[key]:,}" for key in _SHOWN}
    table = _facts(repr(session), {"flushes": flushes or "none", **rows})
    return table + collectives_html(plan.collectives) if plan and plan.collectives else table


def collectives_html(collectives: Sequence[Communication]) -> str:
    """Return a plan's collectives as an HTML table, in the order of their launch."""
    rows = [
        (each.kind, each.reduce_op or "", f"{each.nbytes:,}", f"{each.ring_bytes:,}",
         each.mesh_dim, each.source, each.why)
        for each in collectives
    ]  # fmt: skip
    head = ("kind", "reduce op", "nbytes", "ring bytes", "mesh dim", "source", "why")
    return _table("collectives", [_row("th", head), *(_row("td", row) for row in rows)])


def _table(title: str, rows: Iterable[str]) -> str:
    return f"<table><caption>{escape(title)}</caption>{''.join(rows)}</table>"


def _facts(title: str, facts: Mapping[str, str]) -> str:
    """Return a table with a row for each fact: its name and its value."""
    rows = (f"{_cell('th', key)}{_cell('td', value)}" for key, value in facts.items())
    return _table(title, (f"<tr>{row}</tr>" for row in rows))


def _row(tag: str, texts: Iterable[str]) -> str:
    return f"<tr>{''.join(_cell(tag, text) for text in texts)}</tr>"


def _cell(tag: str, text: str) -> str:
    return f"<{tag} style='text-align:left'>{escape(text)}</{tag}>"


def _title(t: LazyTensor) -> str:
    return "Parameter" if isinstance(t, torch.nn.Parameter) else "LazyTensor"
