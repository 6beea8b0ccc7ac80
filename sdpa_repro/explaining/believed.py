"""The vocabulary of counterfactuals: a prediction with its limit, and attention by its definition of rewritten rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.reference import reference, rows_of
from sdpa_repro.replaying.verdict import floor


@dataclass(frozen=True)
class Believed:
    """What some rows would hold: `output` (n, Ev) float64, and `limit` (n,), the error that rounding explains."""

    output: Tensor
    limit: Tensor


@dataclass(frozen=True)
class Counterfactual:
    """One way of being wrong. `compute(batch, head, rows)` gives what it predicts, None where it says nothing."""

    id: str
    key: tuple[str | int, ...]
    """What names the same way of being wrong in another call: the id and its parameters."""
    clause: str
    """Goes on after "query row 3 was" (or "is", for what is only a symptom)."""
    compute: Callable[[int, int, Tensor], Believed | None]
    symptom: bool = False


Part = Callable[[int, int, Tensor], AttentionCall | None]
"""(batch, head, rows) → the rewritten call of these rows, (1, 1, n, E)."""


def by_definition(part: AttentionCall | None) -> Believed | None:
    """Float64 attention of a call (1, 1, n, E), and the error that rounding in its dtype explains."""
    if part is None or part.key.shape[2] == 0:
        return None
    found = reference(part)
    output, mask = found.output[0, 0], part.attn_mask
    if mask is not None and mask.dtype != torch.bool:  # a misread mask may hold NaN, which the reference hides
        output = output.masked_fill(mask[0, 0].isnan().any(-1, keepdim=True), float("nan"))
    return Believed(output, floor(found.scale, part.query.dtype)[0, 0])


def own_rows(flat: AttentionCall) -> Part:
    """The call's own rows, for calls rewritten as a whole."""
    return lambda batch, head, rows: rows_of(flat, batch, head, rows)


def defined(id: str, clause: str, part: Part, *parameters: str | int) -> Counterfactual:
    """A counterfactual whose prediction is attention by its definition of a rewritten call."""
    return Counterfactual(id, (id, *parameters), clause, lambda b, h, rows: by_definition(part(b, h, rows)))


def log_sum_exp(part: AttentionCall) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and largest score (n,) in float64 of a call (1, 1, n, E); 0 and 0 where no key is seen."""
    scores = part.query[0, 0].double() @ part.key[0, 0].double().mT * part.softmax_scale
    if part.attn_mask is not None:
        mask = part.attn_mask[0, 0]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    top = scores.amax(-1)
    blind = top == -torch.inf
    return scores.logsumexp(-1).masked_fill(blind, 0.0), top.masked_fill(blind, 0.0)
