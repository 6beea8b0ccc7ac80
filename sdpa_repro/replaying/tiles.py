"""One block of the reference: scores of some query rows, their softmax, and the sums that bound their rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log, log2, prod

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.runs import Run, visible

KEY_CHUNK = 1024
"""Keys converted to the working precision at a time, where not all are at once."""

EXTRA = 5
"""Columns appended to value: 1, w, w², k, k·w with w = max |value| and k = |key| of that position."""

LARGE = 1e15
"""Values and keys up to here have squares, and scores, that are far from the largest float32."""

LOG2_E = log2(e)
"""Scores are held times this, as powers of two: on a CPU `exp2` takes half the time of `exp`."""

JUMP = {torch.float32: 8.0, torch.float64: 100.0}
"""How far a score may exceed the number subtracted from its row's scores before that number is raised."""

FREE = 400.0
"""Scores of at most this size, as powers of two: none is subtracted, since the sums of their products with what smaller
types hold, and with its squares, are far from what float64 holds."""


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
    """The five extra columns (N, S, 5), and which positions hold NaN or Inf (N, S); None when all numbers are small."""
    groups, keys, _ = key.shape
    extra = torch.ones(groups, keys, EXTRA, dtype=precision, device=key.device)
    for first in range(0, keys, KEY_CHUNK):
        part = slice(first, first + KEY_CHUNK)
        if value.shape[-1]:
            extra[:, part, 1] = value[:, part].abs().amax(-1).to(precision)
        extra[:, part, 3] = torch.linalg.vector_norm(key[:, part].to(precision), dim=-1)
    extra[..., 2] = extra[..., 1].square()
    extra[..., 4] = extra[..., 1] * extra[..., 3]
    if bool((extra[..., 1::2] < LARGE).all()):
        return extra, None
    broken = ~(value.isfinite().all(-1) & key.isfinite().all(-1))
    extra.clamp_(max=torch.finfo(precision).max ** 0.75)  # where a square is infinite, a hidden one must still count 0
    return extra.masked_fill(broken[..., None], 0.0), broken


def augmented(value: Tensor, columns: tuple[Tensor, Tensor | None], keys: slice, out: Tensor | None = None) -> Tensor:
    """Some positions of value and its extra columns side by side, (N, K, Ev + 5); NaN and Inf positions are 0."""
    extra, broken = columns
    part = value[:, keys]
    found = extra.new_empty(*part.shape[:2], part.shape[2] + EXTRA) if out is None else out
    found[..., :-EXTRA] = part
    found[..., -EXTRA:] = extra[:, keys]
    return found if broken is None else found.masked_fill_(broken[:, keys, None], 0.0)


class Room:
    """Memory that is taken again and again: on a CPU fresh memory costs as much time as what is computed in it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.itemsize = torch.empty((), dtype=dtype).element_size()
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A dense tensor of this shape, its values undefined; it overwrites what was taken under that name before."""
        size = prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return held[:size].view(shape)


@dataclass(frozen=True)
class Keys:
    """Key (N, S, E) and value (N, S, Ev) of N groups of heads: as stored, or converted and `augmented` already."""

    key: Tensor
    value: Tensor
    columns: tuple[Tensor, Tensor | None] | None
    """The extra columns of a value as stored; None when value holds them."""

    @property
    def longest(self) -> Tensor:
        """The largest 2-norm of a key, positions with NaN or Inf left out."""
        return (self.value[..., 3 - EXTRA] if self.columns is None else self.columns[0][..., 3]).amax()

    @property
    def width(self) -> int:
        """Columns of value that become output."""
        return self.value.shape[-1] - (EXTRA if self.columns is None else 0)

    def part(self, first: int, last: int, precision: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [first, last) in the working precision: key (N, K, E) and value (N, K, Ev + 5)."""
        keys = slice(first, last)
        value = self.value[:, keys] if self.columns is None else augmented(self.value, self.columns, keys)
        return self.key[:, keys].to(precision), value


def attend_block(
    block: Tensor,
    first: int,
    keys: Keys,
    runs: Sequence[Run],
    bias: Tensor | None,
    call: AttentionCall,
    room: Room,
    size: Tensor | None = None,
) -> tuple[Tensor, RowScale, Tensor]:
    """Query rows from `first` on (H, R, E) in the working precision → output (H, R, Ev), `RowScale`, live (H, R).

    `keys` belong to H / N neighbouring heads each. `runs`: what these rows look at. `bias`: the mask of these rows,
    (H or 1, R, S). `size` (H, R) takes the place of the output's largest entries, where value is a sketch.

    Scores are held key by row, which makes both matrix products a tenth faster than row by key. The heads that share
    a key lie side by side within a row, so that a range of rows is one slice. The number subtracted from a row's
    scores is not their maximum but at most `JUMP` below it: seldom is anything computed twice. It is 0 for all rows
    where no score can be large.
    """
    heads, count, _ = block.shape
    groups, width = keys.key.shape[0], keys.width
    shared = heads // groups
    scaled = _side_by_side(block * (call.softmax_scale * LOG2_E), groups)
    sums = room.take("sums", groups, width + EXTRA, count * shared).zero_()
    top = block.new_full((groups, count * shared), float("-inf"))
    free = block.dtype == torch.float64 and (bias is None or bias.dtype == torch.bool)
    free = free and torch.float64 not in (call.query.dtype, call.key.dtype, call.value.dtype)
    free = free and bool(torch.linalg.vector_norm(scaled, dim=-1).amax() * keys.longest <= FREE)
    base = torch.full_like(top, 0.0 if free else torch.finfo(block.dtype).min / 2)
    for run in runs:
        here = slice(run.above * shared, run.below * shared)
        key, value = keys.part(run.first, run.last, block.dtype)
        scores = room.take("scores", groups, run.last - run.first, here.stop - here.start)
        torch.bmm(key, scaled[:, here].mT, out=scores)
        _masked(scores.unflatten(-1, (-1, shared)), run, first, bias, call.is_causal)
        highest = scores.amax(1)
        top[:, here] = torch.maximum(top[:, here], highest)
        if not free:
            _raise(base[:, here], sums[..., here], highest, run is runs[0])
            scores.sub_(base[:, None, here])
        scores.exp2_()
        if count * shared == 1:  # one row: as row times matrix the product is five times faster
            sums.mT.baddbmm_(scores.mT, value)
        else:
            sums[..., here].baddbmm_(value.mT, scores)
    return _finish(sums, base, top, block, call, size)


def _side_by_side(block: Tensor, groups: int) -> Tensor:
    """(H, R, E) as (N, R·H/N, E): the heads of a group next to each other in each row."""
    heads, count, width = block.shape
    if heads == groups:
        return block
    return block.view(groups, heads // groups, count, width).transpose(1, 2).reshape(groups, -1, width)


def _apart(found: Tensor, heads: int) -> Tensor:
    """(N, R·H/N) as (H, R): the reverse."""
    groups = found.shape[0]
    if heads == groups:
        return found
    return found.view(groups, -1, heads // groups).transpose(1, 2).reshape(heads, -1)


def _masked(scores: Tensor, run: Run, first: int, bias: Tensor | None, is_causal: bool) -> None:
    """Add an additive mask to scores (N, K, R, H/N) of a run, and set those that are hidden to -inf, in place.

    The scores are powers of two.
    """
    groups, _, _, size = scores.shape
    keys = slice(run.first, run.last)
    if bias is not None and bias.dtype != torch.bool:
        added = _per_key(bias[:, run.above : run.below, keys].to(scores.dtype), groups, size)
        scores.add_(added, alpha=LOG2_E)
    if run.start == run.stop:
        return
    hidden = None
    if bias is not None:
        hidden = ~_per_key(visible(bias[:, run.start : run.stop, keys]), groups, size)
    if is_causal:
        row = torch.arange(first + run.start, first + run.stop, device=scores.device)
        later = (torch.arange(run.first, run.last, device=scores.device)[:, None] > row)[None, ..., None]
        hidden = later if hidden is None else hidden | later
    if hidden is not None:
        scores[:, :, run.start - run.above : run.stop - run.above].masked_fill_(hidden, float("-inf"))


def _per_key(mask: Tensor, groups: int, size: int) -> Tensor:
    """Mask entries (H or 1, R, K) in the order of scores, (N or 1, K, R, H/N or 1)."""
    if mask.shape[0] == 1 < groups * size:
        return turned(mask)[..., None]
    _, rows, keys = mask.shape
    return turned(mask).view(groups, size, keys, rows).permute(0, 2, 3, 1)


def turned(matrices: Tensor) -> Tensor:
    """The transposes of (N, R, C), dense. One dense matrix at a time: on a CPU only that way is fast."""
    if matrices.device.type != "cpu":
        return matrices.mT.contiguous()
    found = matrices.new_empty(matrices.shape[0], matrices.shape[2], matrices.shape[1])
    for one, matrix in zip(found, matrices, strict=True):
        one.copy_(matrix.contiguous().T)
    return found


def _raise(base: Tensor, sums: Tensor, highest: Tensor, is_first: bool) -> None:
    """Where scores exceed `base` (N, R) by more than `JUMP`, raise it to the highest and rescale `sums` (N, W, R)."""
    above = highest > base + JUMP[base.dtype]
    if base.device.type == "cpu" and not bool(above.any()):
        return
    raised = torch.where(above, highest, base)
    if not is_first:  # there are no sums yet
        sums *= (base - raised).exp2_()[:, None]
    base.copy_(raised)


def _finish(
    sums: Tensor, base: Tensor, top: Tensor, rows: Tensor, call: AttentionCall, size: Tensor | None
) -> tuple[Tensor, RowScale, Tensor]:
    """Normalise the sums of one block."""
    heads, count, _ = rows.shape
    width, keys, empty = sums.shape[1] - EXTRA, call.key.shape[2], top == float("-inf")
    total = sums[:, width].masked_fill(empty, 1.0)
    result = sums[:, :width].div_(total[:, None])
    groups = sums.shape[0]
    output = turned(result).view(groups, count, heads // groups, width).transpose(1, 2).reshape(heads, count, width)
    columns = (sums[:, width + column] / total for column in range(1, EXTRA))
    weight, square, norm, product = (_apart(column, heads) for column in columns)
    largest = _apart(((top - base).exp2_() / total).masked_fill_(empty, 0.0), heads)  # of the softmax weights
    if size is None:
        size = _apart(result.abs().amax(1) if width else torch.zeros_like(total), heads)
    else:
        size = torch.minimum(size, weight)
    highest = _apart(top.masked_fill(empty, 0.0), heads).abs() / LOG2_E
    length = rows.square().sum(-1).sqrt() * abs(call.softmax_scale)
    scores = length * (product + norm * size) + highest * (weight + size)
    rounded = (highest + log(max(keys, 1)) + 1) * (weight + size)
    scale = RowScale(weight, (square * largest).sqrt(), scores, rounded, size, keys)
    return output, scale, ~_apart(empty, heads)
