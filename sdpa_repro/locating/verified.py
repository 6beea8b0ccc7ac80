"""What a check of the invariants came to, in words and as a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdpa_repro.capturing.prefill import Prefill
from sdpa_repro.environment import software
from sdpa_repro.locating.caches import CacheComparison
from sdpa_repro.locating.invariants import CACHES, GREEDY, LOGITS, Item, Point, Status

__all__ = ["Verified"]

TILE = 32
TRIED = 3
"""Fewest healthy points with other remainders before one remainder is said to decide."""


@dataclass(frozen=True, eq=False)
class Verified:
    """The checklist. points: where it was checked. noise: root mean square over the vocabulary that rounding explains
    in the logits. caches: the comparison of a dynamic and a static cache that differs, or the last one. complete: False
    after Ctrl-C."""

    prefill: Prefill
    items: tuple[Item, ...]
    points: tuple[Point, ...]
    noise: float | None = None
    caches: CacheComparison | None = None
    notes: tuple[str, ...] = ()
    preloaded: tuple[Mapping[str, str], ...] = ()
    complete: bool = True

    @property
    def broken(self) -> tuple[Item, ...]:
        """The items that are broken by themselves."""
        return tuple(item for item in self.items if item.guilty)

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        if self.broken:
            return "; ".join(self._told(item) for item in self.broken)
        holding = [item for item in self.items if item.status is Status.HOLDS]
        if not holding:
            return "stopped before anything was checked"
        lengths = sorted({point.total for point in self.points})
        where = f"{len(lengths)} total lengths from {lengths[0]} to {lengths[-1]}"
        if len(lengths) == 1:
            where = f"total length {lengths[0]}, and nothing was padded: the invariants of padding were not tried"
        return (
            f"{'all' if self.complete else 'stopped: so far all'} {len(holding)} invariants that apply hold at {where}"
        )

    @property
    def exit_status(self) -> int:
        """0 all hold, 1 one is broken, 130 stopped by Ctrl-C."""
        return int(bool(self.broken)) if self.complete else 130

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable."""
        return {
            "sentence": self.sentence,
            "holds": not self.broken,
            "items": [item.document() for item in self.items],
            "points": [vars(point) for point in self.points],
            "noise": self.noise,
            "caches": self.caches.document() if self.caches is not None else None,
            "model": self.prefill.name,
            "prompt": self.prefill.length,
            "padding_side": self.prefill.padding_side,
            "notes": list(self.notes),
            "complete": self.complete,
            "preloaded": [dict(each) for each in self.preloaded],
            "environment": software(self.prefill.device),
        }

    def _told(self, item: Item) -> str:
        """An item that is broken by itself, in words."""
        first = item.first
        if first is None:
            return ""
        if item.name == CACHES:
            return f"transformers makes other masks for a static than for a dynamic cache (no SDPA fault): {first.how}"
        look = f" ({', '.join(part for part in (first.module, first.file) if part)})" if first.module else ""
        others = len(item.findings) - 1
        more = f" and {others} other point{'s' if others > 1 else ''}" if others else ""
        after = [other.name for other in self.items if other.follows == item.name]
        then = f"; what follows from it: {', '.join(after)}" if after else ""
        then += "; all before it holds: locate walks the layers and keeps a call that is wrong" * (item.name == LOGITS)
        return f"{item.name} broken at {first.point}{more}{self._residue(item)}: {first.how}{look}{then}"

    def _residue(self, item: Item) -> str:
        """The remainder of the total length that decides, where one does and other remainders were tried."""
        broken = {finding.point for finding in item.findings}
        left = {point.total % TILE for point in broken}
        same = {point for point in self.points if point.total % TILE in left}
        if item.name == GREEDY or len(left) > 1 or same != broken or len(self.points) - len(same) < TRIED:
            return ""
        return f" (wherever total % {TILE} == {min(left)}, nowhere else)"
