"""Are the NaN rows exactly those whose log-sum-exp is beyond some value? Underflow and overflow look like that."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sdpa_repro.explaining.believed import log_sum_exp
from sdpa_repro.explaining.evidence import Evidence
from sdpa_repro.replaying.reference import rows_of

FEWEST = 3
"""NaN rows and right rows needed at least: a single row is the lowest of all by chance too often."""

ROWS = 256
"""Rows of one head whose scores are held at a time."""

FLOAT32_LOG_MAX = math.log(torch.finfo(torch.float32).max)
"""88.72: exp of more overflows float32."""


def separated_by_log_sum_exp(evidence: Sequence[Evidence]) -> str | None:
    """ "low (...)" or "high (...)" when one bound on the log-sum-exp parts NaN rows from right rows in all evidence.

    None when no bound does. Rows that see no key are left out.
    """
    wrong, right = [], []
    for here in evidence:
        for batch in range(here.flat.query.shape[0]):
            for head in range(here.flat.query.shape[1]):
                sums, seen = _log_sums(here, batch, head)
                bad = torch.zeros_like(seen)
                if (batch, head) in here.wrong:
                    bad[here.wrong[batch, head]] = True
                wrong.append(sums[bad])
                right.append(sums[seen & ~bad])
    nan, fine = torch.cat(wrong), torch.cat(right)
    if min(len(nan), len(fine)) < FEWEST:
        return None
    if float(nan.max()) < float(fine.min()):
        return _bound("low", float(nan.max()), float(fine.min()), -FLOAT32_LOG_MAX)
    if float(nan.min()) > float(fine.max()):
        return _bound("high", float(nan.min()), float(fine.max()), FLOAT32_LOG_MAX)
    return None


def _log_sums(here: Evidence, batch: int, head: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exp (L,) of one head's rows, and which rows see a key."""
    sums, seen = [], []
    for rows in torch.arange(here.flat.query.shape[2], device=here.output.device).split(ROWS):
        total, top = log_sum_exp(rows_of(here.flat, batch, head, rows))
        sums.append(total)
        seen.append((total != 0.0) | (top != 0.0))
    return torch.cat(sums), torch.cat(seen)


def _bound(side: str, wrong: float, right: float, limit: float) -> str:
    """The words: between which two values the bound lies, and whether float32's range would explain it."""
    order = ("up to", "from") if side == "low" else ("from", "up to")
    text = f"{side} ({order[0]} {wrong:.4g} NaN, {order[1]} {right:.4g} right"
    if min(wrong, right) <= limit <= max(wrong, right):
        text += f"; exp of more than {FLOAT32_LOG_MAX:.1f} overflows float32"
    return f"{text})"
