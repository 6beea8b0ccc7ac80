"""What became of a grid of trials: a row for each form of the call, the lengths at which it fails, the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sdpa_repro.explaining.kinds import Kind
from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.explaining.length_result import KEYS
from sdpa_repro.explaining.rules import Rule, fit
from sdpa_repro.visibility import ranges, ranges_text

FEWEST = 3
"""Failing lengths from which a rule is fitted; fewer are only listed."""

NOT_TESTED = "not_tested"


@dataclass(frozen=True)
class Cell:
    """One trial. status: "agrees", "diverges", "nonfinite", "crashed", "timeout", or "not_tested" (see `reason`)."""

    kind: Kind
    number: int
    status: str
    ratio: float = 0.0
    reason: str = ""

    @property
    def fails(self) -> bool:
        """Whether this is a failure of the backend."""
        return self.status not in ("agrees", NOT_TESTED)


@dataclass(frozen=True)
class Row:
    """One form of the call at all lengths that were tried, in order."""

    kind: Kind
    axis: Axis
    cells: tuple[Cell, ...]

    @property
    def fails(self) -> tuple[int, ...]:
        """The numbers at which it fails."""
        return tuple(cell.number for cell in self.cells if cell.fails)

    @property
    def passes(self) -> tuple[int, ...]:
        """The numbers at which it agrees with the reference."""
        return tuple(cell.number for cell in self.cells if cell.status == "agrees")

    @property
    def untested(self) -> dict[str, int]:
        """Why numbers could not be tested, and how many."""
        return dict(Counter(cell.reason for cell in self.cells if cell.status == NOT_TESTED))

    @property
    def worst(self) -> Cell | None:
        """The failing cell with the largest error over threshold."""
        return max((cell for cell in self.cells if cell.fails), key=lambda cell: cell.ratio, default=None)

    @cached_property
    def rule(self) -> Rule | None:
        """The simplest rule that holds at exactly the failing lengths of those tried; None for too few."""
        if len(self.fails) < FEWEST:
            return None
        return fit(list(map(self.axis.at, self.fails)), list(map(self.axis.at, self.passes)))

    @property
    def where(self) -> str:
        """The failing lengths in words: a rule, "every length tried", or the lengths themselves."""
        if not self.fails:
            return ""
        if self.rule is not None:
            return str(self.rule)
        if not self.passes and len(self.fails) > 1:
            return "every length tried"
        name = "S" if self.axis.vary == KEYS else "L"
        return f"{name} in {ranges_text(ranges(self.fails), limit=8)}"

    def document(self) -> dict[str, Any]:
        """Plain JSON types; lengths as inclusive ranges."""
        return {
            "backend": self.kind.backend.value,
            "dtype": self.kind.dtype,
            "head_dim": self.kind.head_dim,
            "layout": self.kind.layout,
            "fails": len(self.fails),
            "passes": len(self.passes),
            "failing": [list(part) for part in ranges(self.fails)],
            "passing": [list(part) for part in ranges(self.passes)],
            "rule": str(self.rule) if self.rule else None,
            "statuses": dict(Counter(cell.status for cell in self.cells)),
            "worst": {"length": self.worst.number, "ratio": self.worst.ratio} if self.worst else None,
            "not_tested": self.untested,
        }


@dataclass(frozen=True)
class Grid:
    """The whole result. `lengths` are the numbers that `axis` varies; `complete` is False after Ctrl-C or a budget."""

    path: Path
    device: str
    axis: Axis
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    complete: bool = True
    ranks: int = 1
    seconds: float = 0.0
    preloaded: tuple[Mapping[str, str], ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failing(self) -> list[Row]:
        """The rows that fail at some length."""
        return [row for row in self.rows if row.fails]

    @property
    def tested(self) -> int:
        """Cells that were judged."""
        return sum(len(row.fails) + len(row.passes) for row in self.rows)

    @property
    def exit_status(self) -> int:
        """1 when a cell fails, 0 when none does, 2 when none could be tested, 130 when stopped before one was."""
        if not self.tested:
            return 2 if self.complete else 130
        return 1 if self.failing else 0

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        planted = ", ".join(record["name"] for record in self.preloaded)
        suffix = f" (preloaded: {planted})" if planted else ""
        suffix = ("" if self.complete else "; stopped before the end") + suffix
        if not self.tested:
            reasons = dict.fromkeys(reason for row in self.rows for reason in row.untested)
            return f"nothing could be tested: {'; '.join(list(reasons)[:3]) or 'no time'}{suffix}"
        if not self.failing:
            return f"no failure in {self.tested} calls ({_forms(len(self.rows))}) on {self.device}{suffix}"
        row = self.failing[0]
        tried = len(row.fails) + len(row.passes)
        others = f"; {len(self.failing)} of {_forms(len(self.rows))} fail" if len(self.rows) > 1 else ""
        return f"{row.kind}: wrong at {len(row.fails)} of {tried} lengths, {row.where}{others}{suffix}"

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable."""
        return {
            "file": self.path.name,
            "sentence": self.sentence,
            "device": self.device,
            "vary": self.axis.vary,
            "dumped": {"L": self.axis.rows, "S": self.axis.keys},
            "lengths": [list(part) for part in ranges(self.lengths)],
            "rows": [row.document() for row in self.rows],
            "tested": self.tested,
            "complete": self.complete,
            "ranks": self.ranks,
            "seconds": self.seconds,
            "preloaded": [dict(record) for record in self.preloaded],
            "environment": dict(self.environment),
        }


def _forms(number: int) -> str:
    return f"{number} form{'s' * (number != 1)} of the call"
