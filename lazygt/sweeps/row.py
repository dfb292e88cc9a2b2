"""Row of the table: the result of a combination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lazygt.graph.text import amount, duration
from lazygt.sweeps.knobs import Combination
from lazygt.sweeps.shares import Shares

MEASURED, SIMULATED = "measured", "simulated"
DONE, SKIPPED, FAILED = "done", "skipped", "failed"
_UNKNOWN = "-"


@dataclass(frozen=True)
class Row:
    """Result of a combination.

    Attributes:
        how: ``measured`` or ``simulated``.
        status: ``done``; ``skipped``: it would not fit; ``failed``.
        step_seconds: mean time of a step.
        tokens: of a step on all ranks; 0: the program looks up none.
        peak_bytes: that values take at most; measured on rank 0, simulated on any. None: not
            known.
        shares: None: not known.
        note: why it was skipped, or failed.
    """

    combination: Combination
    how: str
    status: str = DONE
    step_seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int | None = None
    shares: Shares | None = None
    note: str = ""

    @property
    def done(self) -> bool:
        return self.status == DONE

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks; 0 for a program that looks up none."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def rate(self) -> float:
        """Rate by which rows are compared: tokens a second, or steps where there are none."""
        if not self.done:
            return 0.0
        return self.tokens_per_second or 1 / self.step_seconds

    @property
    def speed(self) -> str:
        """The rate with its unit."""
        unit = "tokens/s" if self.tokens else "steps/s"
        return f"{self.rate:,.0f} {unit}" if self.rate >= 100 else f"{self.rate:.3g} {unit}"

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data: seconds, bytes, shares from 0 to 1; None: unknown."""
        shares = self.shares
        return {
            **self.combination.values,
            "tokens_per_second": self.tokens_per_second if self.done and self.tokens else None,
            "step_seconds": self.step_seconds if self.done else None,
            "peak_bytes": self.peak_bytes,
            "in_collectives": None if shares is None else shares.in_collectives,
            "exposed": None if shares is None else shares.exposed,
            "how": self.how,
            "status": self.status,
            "note": self.note,
        }

    def cells(self, baseline: Row) -> list[str]:
        """Return the cells of the table, after the knobs."""
        shares = self.shares
        against = _UNKNOWN
        if self.done and baseline.done:
            against = f"{self.rate / baseline.rate - 1:+.1%}"
        return [
            f"{self.tokens_per_second:,.0f}" if self.done and self.tokens else _UNKNOWN,
            against,
            duration(self.step_seconds) if self.done else _UNKNOWN,
            _UNKNOWN if self.peak_bytes is None else amount(self.peak_bytes, "B"),
            _UNKNOWN if shares is None else f"{shares.in_collectives:.0%}",
            _UNKNOWN if shares is None else f"{shares.exposed:.0%}",
            self.how,
            f"{self.status}: {self.note}" if not self.done else self.note,
        ]
