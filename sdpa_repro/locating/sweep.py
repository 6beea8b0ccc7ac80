"""The runs of a sweep: one row for each padding and path, and what they say together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sdpa_repro.locating.running import Path

__all__ = ["Row", "Sweep", "WrongCall"]

TOP = 5
NEARLY = 0.5
"""Of the largest distance: rows beyond it are as good an example, and the shortest one is the handiest."""


@dataclass(frozen=True)
class WrongCall:
    """An SDPA call that the live check found wrong during a run. rows: wrong query rows, the first ones."""

    module: str
    kernel: str
    max_abs: float
    ratio: float
    rows: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """The call as plain values."""
        return {**vars(self), "rows": list(self.rows)}


@dataclass(frozen=True, eq=False)
class Row:
    """One prefill. prompt, pad, total: tokens. companions: rows beside it in the batch.

    place: "padded", or "companion" for a longer row of the batch that has no padding itself. logits: (B, vocabulary)
    float32, None when the run was not possible (`reason`). max_abs, mean_abs: against the unpadded run on `against`.
    spread: root mean square of the distance from what this path usually gives, the number that decides. why: why the
    row is flagged, "" when it is not.
    """

    prompt: int
    pad: int
    path: Path
    companions: int = 0
    place: str = "padded"
    logits: Tensor | None = None
    wrong_calls: tuple[WrongCall, ...] = ()
    calls: int = 0
    inputs_differ: tuple[str, ...] = ()
    reason: str = ""
    against: str = ""
    max_abs: float | None = None
    mean_abs: float | None = None
    spread: float | None = None
    argmax_flipped: bool | None = None
    top5_plain: tuple[int, ...] = ()
    top5: tuple[int, ...] = ()
    why: str = ""

    @property
    def total(self) -> int:
        return self.prompt + self.pad

    @property
    def flagged(self) -> bool:
        return bool(self.why)

    @property
    def exact(self) -> bool:
        """Whether more than logits accuses it: a call that is wrong, or inputs that differ."""
        return bool(self.wrong_calls or self.inputs_differ)

    def document(self) -> dict[str, Any]:
        """The row as plain values, without the logits."""
        return {
            "prompt": self.prompt,
            "pad": self.pad,
            "total": self.total,
            "total_mod_32": self.total % 32,
            "total_mod_64": self.total % 64,
            "companions": self.companions,
            "place": self.place,
            "path": self.path.value,
            "max_abs": self.max_abs,
            "mean_abs": self.mean_abs,
            "spread": self.spread,
            "argmax_flipped": self.argmax_flipped,
            "top5_plain": list(self.top5_plain),
            "top5": list(self.top5),
            "against": self.against,
            "flagged": self.flagged,
            "why": self.why,
            "wrong_calls": [call.document() for call in self.wrong_calls],
            "inputs_differ": list(self.inputs_differ),
            "reason": self.reason,
        }


@dataclass(frozen=True, eq=False)
class Sweep:
    """All rows of a sweep, judged.

    noise: `spread` beyond which logits are not explained by rounding, infinite when it was not measured. baseline: the
    path whose unpadded run the default rows are compared with. complete: False after Ctrl-C.
    """

    rows: tuple[Row, ...]
    prompt: int
    noise: float
    baseline: Path = Path.DEFAULT
    complete: bool = True
    notes: tuple[str, ...] = ()

    def find(self, pad: int, path: Path) -> Row | None:
        """The row of a padding and path in a batch of one, None when it was not run."""
        chosen = (row for row in self.rows if (row.pad, row.path, row.companions) == (pad, path, 0))
        return next((row for row in chosen if row.logits is not None), None)

    def alone(self, path: Path) -> tuple[Row, ...]:
        """The rows of one path in a batch of one that ran, by padding."""
        chosen = [row for row in self.rows if row.path is path and not row.companions and row.logits is not None]
        return tuple(sorted(chosen, key=lambda row: row.pad))

    @property
    def poisoned(self) -> bool:
        """Whether the unpadded default run is itself wrong, so that a comparison with it means nothing."""
        return self.baseline is not Path.DEFAULT

    @property
    def totals_wrong(self) -> tuple[int, ...]:
        """Total lengths at which the default path is beyond noise."""
        return tuple(row.total for row in self.alone(Path.DEFAULT) if row.flagged)

    @property
    def totals_clean(self) -> tuple[int, ...]:
        """Total lengths at which the default path is as it should be."""
        return tuple(row.total for row in self.alone(Path.DEFAULT) if not row.flagged)

    @property
    def worst(self) -> Row | None:
        """The default row to look into: padded, flagged if one is, and the shortest of those that moved about the most.

        Logits alone count when no row has more against it; when they accuse the unpadded run, a row that is not flagged
        shows the difference. None when nothing was padded.
        """
        plain = self.find(0, Path.DEFAULT)
        baseline = plain is not None and plain.flagged
        rows = [row for row in self.alone(Path.DEFAULT) if row.pad > 0]
        rows = [row for row in rows if row.exact] or [row for row in rows if row.flagged is not baseline] or rows
        most = max((row.spread or 0.0 for row in rows), default=0.0)
        return next((row for row in rows if (row.spread or 0.0) >= NEARLY * most), None)

    @property
    def beside(self) -> Row | None:
        """The smallest batch in which the default path has a wrong call, None when there is none."""
        rows = [row for row in self.rows if row.companions and row.path is Path.DEFAULT and row.exact]
        return min(rows, key=lambda row: (row.companions, row.total), default=None)

    @property
    def any_flagged(self) -> bool:
        return any(row.flagged for row in self.rows)

    @property
    def accusation(self) -> str:
        """The first run that has more than its logits against it, in words; "" when there is none."""
        row = next((row for row in self.rows if row.exact), None)
        if row is None:
            return ""
        beside = f" in a batch of {row.companions + 1}" if row.companions else ""
        return f"{row.why} at total length {row.total}{beside} ({row.path.value})"

    def wrong(self, path: Path) -> bool | None:
        """Whether the logits of `path` at the worst padding are beyond noise; None when it was not run there."""
        worst = self.worst
        row = self.find(worst.pad, path) if worst is not None else None
        return row.flagged if row is not None else None

    def document(self) -> list[Mapping[str, Any]]:
        """All rows as plain values."""
        return [row.document() for row in self.rows]
