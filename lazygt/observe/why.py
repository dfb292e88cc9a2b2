"""Report of ``why``: reasons of flushes, plan misses, fallbacks and compiles.

While it runs, the session records only call sites and steps of the trie; texts are built on
request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazygt.graph.source import expand
from lazygt.recovery.recover import RecoveryRecord
from lazygt.runtime.compiling.tiers import CompileRecord
from lazygt.runtime.messages import Captured
from lazygt.runtime.plan_records import PlanRecord
from lazygt.session import Session
from lazygt.submit.history import Flush, Miss

if TYPE_CHECKING:
    from lazygt.passes.sharding.gathers import Gather

#: Prefix of the reason of a flush for a data-dependent op: ``data-dependent: aten.nonzero...``.
DATA_DEPENDENT = "data-dependent: "


def why(session: Session) -> Why:
    """Report a session's flushes with their causes, plan misses, fallbacks and compiles."""
    if not isinstance(session, Session):
        raise TypeError(f"lazygt.why: expected a session, not {type(session).__name__}")
    history = session.history
    return Why(
        tuple(history.recent), sum(history.flushes.values()), tuple(history.misses),
        session.compiles(), tuple(history.gathers.values()), tuple(history.resized),
        session.cuda_graphs(), session.recoveries,
        str(session.machine) if session.config.machine is not None else "",
    )  # fmt: skip


@dataclass
class Why:
    """Reasons of a session's work; prints as a text.

    Attributes:
        flushes: the latest ones, oldest first.
        flushed: number of all flushes.
        misses: the latest plan misses.
        compiles: the groups for which compiled code was requested.
        gathers: ops with implicitly all-gathered operands, once each; shown among the fallbacks.
        cuda_graphs: the CUDA graphs of hot plans, by plan and rank.
        recoveries: replacements of workers.
        machine: the cost model, if one was named.
        resized: the latest plans that reuse a known program in other sizes, without running passes.
    """

    flushes: Sequence[Flush]
    flushed: int
    misses: Sequence[Miss]
    compiles: Sequence[CompileRecord] = ()
    gathers: Sequence[Gather] = ()
    resized: Sequence[Miss] = ()
    cuda_graphs: Sequence[tuple[PlanRecord, int, Captured]] = ()
    recoveries: Sequence[RecoveryRecord] = ()
    machine: str = ""

    def __str__(self) -> str:
        shown = f"the latest {len(self.flushes)} of " if len(self.flushes) < self.flushed else ""
        sections = [
            (f"flushes ({shown}{self.flushed})", self._flush_rows()),
            (f"plan misses ({len(self.misses)})", [r for miss in self.misses for r in miss.rows()]),
            ("fallbacks", self._fallback_rows()),
            ("compiles", [_compile_row(each) for each in self.compiles]),
        ]
        if self.resized:
            sections.insert(2, (f"other sizes ({len(self.resized)})", self._resized_rows()))
        if self.cuda_graphs:
            sections.append(("CUDA graphs", [_capture_row(*each) for each in self.cuda_graphs]))
        if self.recoveries:
            sections.append(
                (f"recoveries ({len(self.recoveries)})", list(map(str, self.recoveries)))
            )
        if self.machine:
            sections.append(("costs", [f"plans are made by those of {self.machine}"]))
        return "\n".join(
            row
            for title, rows in sections
            for row in (title, *(f"  {r}" for r in rows or ["none"]))
        )

    __repr__ = __str__

    def _flush_rows(self) -> list[str]:
        """Return one row for each set of equal flushes, in the order of the first."""
        alike: Counter[tuple[str, str, int, str]] = Counter()
        hits: Counter[tuple[str, str, int, str]] = Counter()
        for flush in self.flushes:
            plan = "nothing to run" if flush.digest is None else f"plan {flush.digest.hex()[:12]}"
            key = flush.reason, expand(flush.call_site), flush.ops, plan
            alike[key] += 1
            hits[key] += flush.hit
        return [
            f"{count}x {reason}  {line}  {ops} ops, {plan}"
            + (f", {hits[key]} hits" if plan.startswith("plan") else "")
            for key, count in alike.items()
            for reason, line, ops, plan in [key]
        ]

    def _resized_rows(self) -> list[str]:
        """Return one row for each line and flush, with the latest of its resized plans."""
        alike = Counter((miss.line, miss.flush) for miss in self.resized)
        latest = {(miss.line, miss.flush): miss for miss in self.resized}
        return [
            f"{count}x {latest[key].reason}  {key[0]}, flush {key[1]!r}"
            for key, count in alike.items()
        ]

    def _fallback_rows(self) -> list[str]:
        """Return rows for data-dependent ops, implicit all-gathers and ops that stay eager."""
        reads = Counter(
            (flush.reason.removeprefix(DATA_DEPENDENT), expand(flush.call_site))
            for flush in self.flushes
            if flush.reason.startswith(DATA_DEPENDENT)
        )
        rows = [
            f"{count}x {op}  {line}  its result's shape depends on values: shipped and asked"
            for (op, line), count in reads.items()
        ]
        rows += [f"{each}" for each in self.gathers]
        return rows + [
            f"{each.line}  {each.ops} ops stay eager: {_eager_reason(each)}"
            for each in self.compiles
            if each.status == "failed" or (each.took and each.tier == "eager")
        ]


def _compile_row(compile: CompileRecord) -> str:
    """Return the text of a compile: line, ops, status, seconds and speedup."""
    gain = f", {compile.gain:.2f}x as fast" if compile.gain else ""
    return f"{compile.line}  {compile.ops} ops {compile.status}, {compile.seconds:.2f} s{gain}"


def _capture_row(entry: PlanRecord, rank: int, captured: Captured) -> str:
    """Return the text of a plan's CUDA graphs on a rank: count, steps, bytes and speedup."""
    plan = f"plan {entry.plan.digest.hex()[:12]}, rank {rank}"
    if captured.error:
        return f"{plan}: none, {captured.error}"
    gain = f", {captured.gain:.2f}x as fast" if captured.gain else ""
    steps = f"{captured.steps} of {len(entry.plan.steps.graph.nodes)} steps"
    return f"{plan}: {captured.graphs} with {steps}, {captured.nbytes} bytes in all{gain}"


def _eager_reason(compile: CompileRecord) -> str:
    """Return the reason that ops stay eager: a compile error, or a slowdown."""
    if compile.status == "failed":
        return f"{compile.error} ({compile.names})"
    return f"compiled they would be {compile.gain:.2f}x as fast"
