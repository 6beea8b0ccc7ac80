"""One block of the reference: scores of some query rows, their softmax, and the sums that bound their rounding."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall

KEY_TILE = 128
"""Keys per visibility test; a tile is skipped when no row of the block may see it."""

KEY_CHUNK = 4096
"""Keys converted to the working precision at a time, where not all are at once."""

EXTRA = 5
"""Columns appended to value: 1, w, w², k, k·w with w = max |value| and k = |key| of that position."""


@dataclass(frozen=True)
class RowScale:
    """What a row's rounding error is proportional to; every field (B, H, L) or, in a block, (G, R).

    With p the softmax weights, w the largest |value| and k the 2-norm of the key at a position:
    `weight` = Σ p·w; `spread` ≥ sqrt(Σ p²·w²), the effect of independent rounding of p (from
    max p · Σ p·w², which is exact for one key and for equal weights); `scores` = what a relative error of
    1 in every product of the scores would move, |query|·scale·Σ p·k·(w + |out|) + |max score|·(Σ p·w + |out|);
    `rounded` = what a relative error of 1 in the scores themselves would move, at most
    (|max score| + ln S + 1)·(Σ p·w + |out|), since p shrinks faster than a score falls; `size` = max |out|.
    """

    weight: Tensor
    spread: Tensor
    scores: Tensor
    rounded: Tensor
    size: Tensor
    keys: int
    """S, the number of terms in a row's sums (hidden keys included)."""


def extra_columns(key: Tensor, value: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The five extra columns (N, S, 5), and which positions hold NaN or Inf (N, S), None when none does."""
    groups, keys, _ = key.shape
    extra = torch.ones(groups, keys, EXTRA, dtype=precision, device=key.device)
    for first in range(0, keys, KEY_CHUNK):
        part = slice(first, first + KEY_CHUNK)
        if value.shape[-1]:
            extra[:, part, 1] = value[:, part].abs().amax(-1).to(precision)
        extra[:, part, 3] = torch.linalg.vector_norm(key[:, part].to(precision), dim=-1)
    broken = ~(extra[..., 1].isfinite() & extra[..., 3].isfinite())
    extra[..., 2] = extra[..., 1].square()
    extra[..., 4] = extra[..., 1] * extra[..., 3]
    if not bool(broken.any()):
        return extra, None
    return extra.masked_fill(broken[..., None], 0.0), broken


def augmented(value: Tensor, columns: tuple[Tensor, Tensor | None], keys: slice) -> Tensor:
    """Some positions of value and its extra columns side by side, (N, K, Ev + 5); NaN and Inf positions are 0."""
    extra, broken = columns
    part = torch.cat([value[:, keys].to(extra.dtype), extra[:, keys]], -1)
    return part if broken is None else part.masked_fill_(broken[:, keys, None], 0.0)


def hidden_below(dtype: torch.dtype) -> float:
    """Additive mask values at or below this hide a key: half of finfo.min, the usual stand-in for -inf."""
    return torch.finfo(dtype).min / 2


def visibility(bias: Tensor | None, rows: range, keys: range, is_causal: bool, device: torch.device) -> Tensor:
    """Which of `keys` the query `rows` may see: bool (G or 1, R, K); `bias` holds the mask of just these."""
    seen: Tensor | None = None
    if bias is not None:
        seen = bias if bias.dtype == torch.bool else bias > hidden_below(bias.dtype)
    if is_causal:
        row = torch.arange(rows.start, rows.stop, device=device)
        causal = (torch.arange(keys.start, keys.stop, device=device)[None, :] <= row[:, None])[None]
        seen = causal if seen is None else seen & causal
    if seen is None:
        seen = torch.ones((), dtype=torch.bool, device=device).expand(1, len(rows), len(keys))
    return seen


@dataclass(frozen=True)
class Run:
    """Keys [first, last) in whole tiles that some row of a block sees; `full` when every row sees all."""

    first: int
    last: int
    full: bool


def _runs(bias: Tensor | None, rows: range, keys: int, is_causal: bool) -> list[Run]:
    """The keys a block of rows has to look at, in runs of at most `KEY_CHUNK`."""
    starts = range(0, keys, KEY_TILE)
    if bias is None:
        some = [not is_causal or start < rows.stop for start in starts]
        every = [not is_causal or start + KEY_TILE <= rows.start + 1 for start in starts]
    else:
        seen = visibility(bias, rows, range(keys), is_causal, bias.device).view(torch.uint8)
        # amax and amin of bytes: any() and all() over a bool dimension are twenty times slower on a CPU
        some, every = _per_tile(seen.amax((0, 1)), 0), [not hidden for hidden in _per_tile(1 - seen.amin((0, 1)), 0)]
    runs: list[Run] = []
    for start, sees, full in zip(starts, some, every, strict=True):
        if not sees:
            continue
        last = runs[-1] if runs else None
        end = min(start + KEY_TILE, keys)
        if last and last.last == start and last.full == full and end - last.first <= KEY_CHUNK:
            runs[-1] = Run(last.first, end, full)
        else:
            runs.append(Run(start, end, full))
    return runs


def _per_tile(columns: Tensor, fill: int) -> list[bool]:
    """Whether any of a tile's columns (S,) is not zero, tile by tile."""
    missing = -columns.shape[0] % KEY_TILE
    padded = torch.nn.functional.pad(columns, (0, missing), value=fill)
    return [bool(tile) for tile in padded.view(-1, KEY_TILE).amax(1).tolist()]


def attend_block(
    block: Tensor,
    rows: range,
    key: Tensor,
    value: Tensor,
    columns: tuple[Tensor, Tensor | None] | None,
    bias: Tensor | None,
    call: AttentionCall,
) -> tuple[Tensor, RowScale, Tensor]:
    """One block (H, R, E) in the working precision → output (H, R, Ev), its `RowScale`, and live (H, R).

    key (N, S, E) and value (N, S, Ev) belong to H / N neighbouring heads each. Without `columns`, value has them
    already (`augmented`).
    """
    heads, count, _ = block.shape
    groups, precision, width = key.shape[0], block.dtype, call.value.shape[-1]
    runs = _runs(bias, rows, key.shape[1], call.is_causal)
    scaled = (block * call.softmax_scale).reshape(groups, heads // groups * count, -1)
    parts = []
    for run in runs:
        keys = slice(run.first, run.last)
        part = torch.bmm(scaled, key[:, keys].to(precision).mT)
        shaped = part.view(heads, count, -1)
        here = None if bias is None else bias[..., keys]
        if here is not None and here.dtype != torch.bool:
            shaped += here.to(precision)
        if not run.full:
            seen = visibility(here, rows, range(run.first, run.last), call.is_causal, block.device)
            shaped.masked_fill_(~seen, float("-inf"))
        parts.append(part)
    top = block.new_full((groups, heads // groups * count), float("-inf"))
    for part in parts:
        torch.maximum(top, part.amax(-1), out=top)
    empty = top == float("-inf")
    top.masked_fill_(empty, 0.0)
    sums = block.new_zeros(groups, heads // groups * count, width + EXTRA)
    for run, part in zip(runs, parts, strict=True):
        keys = slice(run.first, run.last)
        weighed = value[:, keys] if columns is None else augmented(value, columns, keys)
        sums.baddbmm_(part.sub_(top[..., None]).exp_(), weighed)
    shape = (heads, count)
    output, scale = _finish(sums.view(*shape, -1), width, block, top.view(shape), empty.view(shape), call)
    return output, scale, ~empty.view(shape)


def _finish(
    sums: Tensor, width: int, rows: Tensor, top: Tensor, empty: Tensor, call: AttentionCall
) -> tuple[Tensor, RowScale]:
    """Normalise the sums of one block."""
    total = sums[..., width].masked_fill(empty, 1.0)
    output = sums[..., :width] / total[..., None]
    weight, square, norm, product = (sums[..., width + column] / total for column in range(1, EXTRA))
    size = output.abs().amax(-1) if width else torch.zeros_like(total)
    length = rows.square().sum(-1).sqrt() * abs(call.softmax_scale)
    keys = call.key.shape[2]
    scores = length * (product + norm * size) + top.abs() * (weight + size)
    rounded = (top.abs() + log(max(keys, 1)) + 1) * (weight + size)
    return output, RowScale(weight, (square / total).sqrt(), scores, rounded, size, keys)
