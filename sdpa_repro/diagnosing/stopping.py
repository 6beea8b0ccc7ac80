"""When there is no need to go on, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.verdict import Verdict
from sdpa_repro.situation import release

CLEAR, CLEAR_WITH_TOKEN = 0.2, 0.1
"""How far padding moves the logits (root mean square, in units of their own spread over the vocabulary) beyond doubt:
alone, and when the likeliest token changes too. Rounding in bfloat16 moves them by some hundredths."""


class Stop(str, Enum):
    """Why a diagnosis ends early."""

    HEALTHY = "healthy"
    KNOWN_FIXED = "known_fixed"
    NOT_SDPA = "not_sdpa"


@dataclass(frozen=True)
class Moved:
    """How far padding moved the logits of the next token. shift: in units of the logits' own spread."""

    total: int
    shift: float
    flipped: bool

    @property
    def clearly(self) -> bool:
        """Whether that is beyond what rounding does."""
        return not self.shift <= CLEAR or (self.flipped and self.shift > CLEAR_WITH_TOKEN)


def stop_after(result: Replay, moved: Moved | None, *, issue: bool) -> Stop | None:
    """Why to stop after the replay, None to go on. issue: a known and fixed bug is written up all the same."""
    if result.verdict is Verdict.HEALTHY:
        return Stop.NOT_SDPA if moved is not None and moved.clearly else Stop.HEALTHY
    if fixed(result) is not None and not issue:
        return Stop.KNOWN_FIXED
    return None


def fixed(result: Replay) -> Match | None:
    """The known issue that fits exactly and that a newer torch than this one no longer has."""
    if result.verdict is not Verdict.BACKEND_WRONG or not result.known or result.preloaded:
        return None
    first = result.known[0]
    newer = first.fixed_in is not None and release(first.fixed_in)[0] > release(torch.__version__)[0]
    return first if first.match == "exact" and newer else None


def headline(result: Replay, stop: Stop | None) -> str:
    """The first line: what the replay found; of a bug that is fixed, first what to do."""
    known = fixed(result)
    if stop is Stop.KNOWN_FIXED and known is not None:
        return f"upgrade torch to {known.fixed_in} or later: {result.sentence}"
    return result.sentence


def most_moved(report: Mapping[str, Any] | None) -> Moved | None:
    """Where padding moved the logits most, from a capture's report; None when that was not looked at."""
    rows = [Moved(each["total"], each["shift"], each["flipped"]) for each in (report or {}).get("moved") or ()]
    return max(rows, key=lambda row: (row.shift != row.shift, row.shift), default=None)
