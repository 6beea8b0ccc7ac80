"""What a hypothesis is held against: the wrong rows of a call, and the same call on other values.

A second set of values lies in a copy of the call's memory with the same layout; a second mask has rows that all
differ, so that two explanations which agree on a causal mask by chance no longer do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, overlaps_itself, span_elements, viewed_once
from sdpa_repro.explaining.believed import Believed
from sdpa_repro.replaying.backends import Backend, run
from sdpa_repro.replaying.reference import blocks, four_dims, reference, rows_of
from sdpa_repro.replaying.variants import recast
from sdpa_repro.replaying.verdict import EXPLAINED, NOISE_FACTOR, compare, floor, judge, ratio_of, rms_share, row_errors

MARGINAL = EXPLAINED * max(NOISE_FACTOR.values())
"""Rows within this many floors may be cleared by the noise of MATH and of the explicit formula, as in a replay."""

MASK_BLOCK = 1 << 22
"""Mask entries drawn at a time."""


@dataclass(frozen=True)
class Evidence:
    """One call with its output and the rows that are wrong."""

    call: AttentionCall
    flat: AttentionCall
    """The call as from `reference.four_dims`."""
    output: Tensor
    """(B, H, L, Ev)"""
    wrong: dict[tuple[int, int], Tensor]
    """(batch, head) → int64 wrong rows, sorted; heads without any left out."""
    slack: float
    """Floors by which right rows of this output are off, at least 1: the noise a match may have."""

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Every wrong row as (batch, head, row)."""
        return [(batch, head, row) for (batch, head), rows in self.wrong.items() for row in rows.tolist()]

    @property
    def count(self) -> int:
        return sum(len(rows) for rows in self.wrong.values())

    def matches(self, batch: int, head: int, rows: Tensor, believed: Believed) -> Tensor:
        """Bool (n,): which of `rows` hold what was believed, to noise."""
        largest, rms, finite = compare(self.output[batch, head, rows], believed.output)
        limit, share = believed.limit, rms_share(self.output.shape[-1])
        ratio = torch.maximum(ratio_of(largest, limit), ratio_of(rms, limit * share))
        same = (self.output[batch, head, rows].isnan() == believed.output.isnan()).all(-1)
        return finite & same & (ratio <= self.slack)


def gather(call: AttentionCall, output: Tensor) -> Evidence:
    """Find every wrong row of `output` in float64; rows that noise explains are not wrong."""
    if output.dtype != call.query.dtype:  # autocast: the kernel saw rounded values
        call = recast(call, output.dtype)
    flat = four_dims(call)
    shaped = output.detach().reshape(*flat.query.shape[:3], output.shape[-1])
    wrong: dict[tuple[int, int], list[Tensor]] = {}
    marginal: dict[tuple[int, int], list[Tensor]] = {}
    share, slack = rms_share(output.shape[-1]), 1.0
    for block in blocks(flat):
        here = shaped[block.batch, block.head : block.head + block.heads, block.first : block.last]
        largest, rms, finite = compare(here, block.output)
        limit = floor(block.scale, output.dtype)
        ratio = torch.maximum(ratio_of(largest, limit), ratio_of(rms, limit * share))
        ratio = torch.where(finite, ratio, float("inf")).masked_fill(~block.live | block.poisoned, 0.0)
        for group in (ratio > 1.0).any(-1).nonzero().flatten().tolist():
            place = (block.batch, block.head + group)
            wrong.setdefault(place, []).append((ratio[group] > MARGINAL).nonzero().flatten() + block.first)
            near = (ratio[group] > 1.0) & (ratio[group] <= MARGINAL)
            marginal.setdefault(place, []).append(near.nonzero().flatten() + block.first)
    found = {}
    for place, parts in wrong.items():
        doubtful, cleared = _not_noise(flat, shaped, place, torch.cat(marginal[place]))
        slack = max(slack, cleared)
        rows = torch.cat([*parts, doubtful]).sort().values
        if len(rows):
            found[place] = rows
    return Evidence(call, flat, shaped, found, min(slack, EXPLAINED))


def _not_noise(flat: AttentionCall, output: Tensor, place: tuple[int, int], rows: Tensor) -> tuple[Tensor, float]:
    """The rows that the noise of other paths does not explain, and the largest ratio to the floor among the rest."""
    if not len(rows):
        return rows, 1.0
    part = rows_of(flat, *place, rows)
    expected = reference(part)
    noise = {}
    for name, backend in (("MATH", Backend.MATH), ("eager", Backend.EAGER)):
        with suppress(Exception):  # a path that cannot run supplies no noise
            noise[name] = row_errors(run(part, backend), expected)
    errors = row_errors(output[place[0], place[1], rows][None, None], expected)
    bad = judge(errors, expected, output.dtype, "", noise).bad
    keep = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    keep[list(bad.rows if bad else ())] = True
    ratio = ratio_of(errors.max_abs, floor(expected.scale, output.dtype))[0, 0][~keep]
    return rows[keep], float(ratio.max()) if ratio.numel() else 1.0


def other_values(call: AttentionCall) -> Iterator[AttentionCall]:
    """The call's layout over other values, the most telling first.

    Normal values with soft scores and a mask whose rows all differ; normal values of the call's own size under its
    own mask; its own query, key and mask with another value tensor.
    """
    soft = recast(call)
    _renew(soft, seed=1, soft=True)
    if soft.attn_mask is not None and getattr(soft.attn_mask, "variant", None) is None:
        _renew_mask(soft.attn_mask, seed=1)
    yield soft
    own = recast(call)
    _renew(own, seed=2)
    yield own
    only_value = recast(call)
    _renew(only_value, seed=3, names=("value",))
    yield only_value


def _renew(
    call: AttentionCall, *, seed: int, soft: bool = False, names: tuple[str, ...] = ("query", "key", "value")
) -> None:
    """Fill tensors in place with normal values of their own root mean square; `soft`: scores of about 1 instead."""
    random = torch.Generator().manual_seed(seed)
    width = max(1, call.query.shape[-1])
    for name in names:
        tensor = call.tensors[name]
        size = 1.0 if soft else _size(tensor)
        if soft and name == "query":
            size = 1.0 / max(abs(call.softmax_scale) * width**0.5, 1e-6)
        target = viewed_once(tensor)
        if overlaps_itself(target):
            target = tensor.as_strided((span_elements(tensor),), (1,), tensor.storage_offset())
        limit = float(torch.finfo(tensor.dtype).max) / 64
        target.copy_((torch.randn(target.shape, generator=random) * min(size, limit)).to(tensor.dtype))


def _size(tensor: Tensor) -> float:
    """Root mean square of the finite values."""
    values = viewed_once(tensor).float()
    values = values[values.isfinite()]
    return float(values.square().mean().sqrt()) if values.numel() else 1.0


def _renew_mask(mask: Tensor, *, seed: int) -> None:
    """Make all rows of a mask different, in place, and none of them blind; its numbers stay those it had."""
    random = torch.Generator().manual_seed(seed)
    target = viewed_once(mask)
    if overlaps_itself(target) or target.dim() == 0:
        return
    lines = target.unsqueeze(0) if target.dim() == 1 else target
    step = max(1, MASK_BLOCK // max(1, lines.shape[-1]))
    for index in torch.cartesian_prod(*(torch.arange(n) for n in (1, *lines.shape[:-2]))).reshape(-1, lines.dim() - 1):
        plane = lines[tuple(index[1:].tolist())]
        for first in range(0, plane.shape[0], step):
            part = plane[first : first + step]
            part.copy_(_other_rows(part, random))


def _other_rows(rows: Tensor, random: torch.Generator) -> Tensor:
    """Rows (n, S) of a mask made different.

    Bool: a random third hidden. Additive: each row's own numbers in another order, finite ones in place of those
    that hide, since an infinity hides what became of the others.
    """
    order = torch.rand(rows.shape, generator=random).to(rows.device)
    if rows.dtype == torch.bool:
        return (order > 0.35).scatter_(-1, order.argmax(-1, keepdim=True), True)
    same = rows.amax(-1, keepdim=True) == rows.amin(-1, keepdim=True)
    mixed = rows.gather(-1, order.argsort(-1))
    hidden = mixed <= torch.finfo(rows.dtype).min / 2
    jitter = (-4 * order).to(rows.dtype)
    return torch.where(hidden, jitter, torch.where(same, mixed + jitter, mixed))
