"""The definition of attention, written out in tiles: softmax(query·keyᵀ·scale + mask)·value.

No SDPA call is involved, since a faulty kernel is faulty in float64 too. One tile of scores is held at a
time and key tiles that the mask hides are never touched, so memory does not grow with L·S and a sliding
window costs its own area. Heads that share key and value (grouped queries, expanded heads) share a tile.

Next to the output every row gets the sums from which its rounding error is bounded (`RowScale`): they
ride along as five extra columns of value in the same matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall

KEY_TILE = 128
"""Keys per visibility test; a tile is skipped when no row of the block may see it."""

KEY_CHUNK = 4096
"""Keys converted to the working precision at a time."""

TILE_BYTES = {"cpu": 8 << 20, "cuda": 96 << 20}
"""Scores held at a time, by device type: what the cache holds on a CPU, fewer and larger kernels on a GPU."""

BLOCK_ROWS = {"cpu": 256, "cuda": 1024}
"""Query rows of a block at most: a block of a causal call computes what its last row may see."""

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


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of heads [head, head + G) in one batch."""

    batch: int
    head: int
    heads: int
    first: int
    last: int
    output: Tensor
    """(G, R, Ev) in the working precision; 0 in rows that may attend to nothing."""
    scale: RowScale
    live: Tensor
    """(G, R) bool: the mask allows at least one key (finfo.min counts as not allowed)."""
    poisoned: Tensor
    """(G, R) bool: a key or value the mask hides from this row is NaN or infinite."""


@dataclass(frozen=True)
class Reference:
    """The whole reference: output (B, H, L, Ev), everything else (B, H, L), on the call's device."""

    output: Tensor
    scale: RowScale
    live: Tensor
    poisoned: Tensor

    @property
    def decides(self) -> Tensor:
        """Rows that may decide a verdict: live and not poisoned, (B, H, L) bool."""
        return self.live & ~self.poisoned


def four_dims(call: AttentionCall) -> AttentionCall:
    """The call as (B, H, L, E) with a mask expanded to (B, H, L, S): values only, layout is not promised.

    Missing dimensions are added in front, several batch dimensions become one, and a `CausalBias` becomes
    the bool mask it stands for (upper left: the causal flag).
    """
    query, key, value = call.query, call.key, call.value
    mask, is_causal = call.attn_mask, call.is_causal
    while query.dim() < 4:
        query, key, value = query[None], key[None], value[None]
    rows, keys = query.shape[-2], key.shape[-2]
    variant = getattr(mask, "variant", None)
    if variant is not None:
        mask, is_causal = None, True
        if int(variant) != 1:
            mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
            is_causal = False
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if mask is not None:
        mask = mask.expand(*batch, query.shape[-3], rows, keys)
        mask = mask.reshape(-1, *mask.shape[-3:]) if len(batch) > 1 else mask
    tensors = []
    for tensor in (query, key, value):
        tensor = tensor.expand(*batch, *tensor.shape[-3:])
        tensors.append(tensor.reshape(-1, *tensor.shape[-3:]) if len(batch) > 1 else tensor)
    return replace(call, query=tensors[0], key=tensors[1], value=tensors[2], attn_mask=mask, is_causal=is_causal)


def reference(call: AttentionCall, *, precision: torch.dtype = torch.float64) -> Reference:
    """Attention by its definition on the call's own values, on the call's device.

    Returns output (B, H, L, Ev) in `precision` (missing dimensions of the call become 1). Dropout is
    ignored. Raises ValueError when shapes do not fit together.
    """
    flat = four_dims(call)
    batches, heads, rows, _ = flat.query.shape
    device = flat.query.device

    def column() -> Tensor:
        return torch.zeros(batches, heads, rows, dtype=precision, device=device)

    output = torch.zeros(batches, heads, rows, flat.value.shape[-1], dtype=precision, device=device)
    weight, spread, scores, rounded, size = (column() for _ in range(5))
    live = torch.zeros(batches, heads, rows, dtype=torch.bool, device=device)
    poisoned = torch.zeros_like(live)
    for block in blocks(flat, precision=precision):
        here = (block.batch, slice(block.head, block.head + block.heads), slice(block.first, block.last))
        output[here] = block.output
        weight[here], spread[here] = block.scale.weight, block.scale.spread
        scores[here], rounded[here], size[here] = block.scale.scores, block.scale.rounded, block.scale.size
        live[here], poisoned[here] = block.live, block.poisoned
    scale = RowScale(weight, spread, scores, rounded, size, flat.key.shape[2])
    return Reference(output, scale, live, poisoned)


def blocks(
    call: AttentionCall, *, precision: torch.dtype = torch.float64, tile_bytes: int | None = None
) -> Iterator[Block]:
    """The reference block by block, for callers that compare and forget. `call` as from `four_dims`."""
    budget = tile_bytes or TILE_BYTES.get(call.query.device.type, TILE_BYTES["cpu"])
    batches, heads, rows, _ = call.query.shape
    check_shapes(call)
    if 0 in (batches, heads, rows, call.key.shape[2]):
        return
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        for batch in range(batches):
            for first, last, shared in head_groups(call):
                yield from _group_blocks(call, batch, first, last - first, shared, precision, budget)


def rows_of(call: AttentionCall, batch: int, head: int, rows: Tensor) -> AttentionCall:
    """The call for some query rows of one head, (1, 1, n, E), its causal flag written into the mask.

    `call` as from `four_dims`; `rows` int64 (n,). For measuring another path's error on few rows.
    """
    _, _, (key_head, value_head) = next(group for group in head_groups(call) if group[0] <= head < group[1])
    mask = None if call.attn_mask is None else call.attn_mask[batch, head, rows][None, None]
    if call.is_causal:
        causal = torch.arange(call.key.shape[2], device=rows.device) <= rows[:, None]
        if mask is None or mask.dtype == torch.bool:
            mask = causal[None, None] if mask is None else mask & causal
        else:
            mask = mask.masked_fill(~causal, float("-inf"))
    return replace(
        call,
        query=call.query[batch, head, rows][None, None],
        key=call.key[batch, key_head][None, None],
        value=call.value[batch, value_head][None, None],
        attn_mask=mask,
        is_causal=False,
        enable_gqa=False,
        scale=call.softmax_scale,
        dropout_p=0.0,
    )


def check_shapes(call: AttentionCall) -> None:
    """Raise ValueError when query, key and value do not describe one attention."""
    query, key, value = call.query, call.key, call.value
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key has {key.shape[-2]} positions, value has {value.shape[-2]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query has head_dim {query.shape[-1]}, key has {key.shape[-1]}")
    for name, tensor in (("key", key), ("value", value)):
        count = tensor.shape[-3]
        fits = count == query.shape[-3] or count == 1 or (call.enable_gqa and count and query.shape[-3] % count == 0)
        if not fits:
            raise ValueError(f"query has {query.shape[-3]} heads, {name} has {count}")


def head_groups(call: AttentionCall) -> list[tuple[int, int, tuple[int, int]]]:
    """Runs of query heads over one key head and one value head: (first, last, (key head, value head))."""
    heads = call.query.shape[1]

    def source(tensor: Tensor, head: int) -> int:
        count = tensor.shape[1]
        return 0 if tensor.stride(1) == 0 else head // (heads // count)

    groups: list[tuple[int, int, tuple[int, int]]] = []
    for head in range(heads):
        shared = (source(call.key, head), source(call.value, head))
        if groups and groups[-1][2] == shared:
            groups[-1] = (groups[-1][0], head + 1, shared)
        else:
            groups.append((head, head + 1, shared))
    return groups


def _group_blocks(
    call: AttentionCall,
    batch: int,
    head: int,
    heads: int,
    shared: tuple[int, int],
    precision: torch.dtype,
    budget: int,
) -> Iterator[Block]:
    """The blocks of the query heads that share one key and one value head."""
    query = call.query[batch, head : head + heads]
    key, value = call.key[batch, shared[0]], call.value[batch, shared[1]]
    keys = key.shape[0]
    extra, broken = _extra_columns(key, value, precision)
    width = torch.empty((), dtype=precision).element_size()
    step = max(64, budget // (width * max(keys, 1)))
    group = min(heads, max(1, step // 64))
    step = max(1, min(step // group, BLOCK_ROWS.get(query.device.type, BLOCK_ROWS["cpu"])))
    mask = None if call.attn_mask is None else call.attn_mask[batch]
    for start in range(0, heads, group):
        stop = min(start + group, heads)
        for first in range(0, query.shape[1], step):
            last = min(first + step, query.shape[1])
            bias = None if mask is None else _shared_rows(mask[head + start : head + stop, first:last])
            rows = range(first, last)
            here = query[start:stop, first:last].to(precision)
            output, scale, live = _attend(here, rows, key, value, (extra, broken), bias, call)
            poisoned = torch.zeros_like(live)
            if broken is not None:
                seen = visibility(bias, rows, range(keys), call.is_causal, query.device)
                poisoned = (~seen & broken).any(-1).expand_as(live)
                output = output.masked_fill((seen & broken).any(-1).expand_as(live)[..., None], float("nan"))
            output = output.masked_fill(~live[..., None], 0.0)
            yield Block(batch, head + start, stop - start, first, last, output, scale, live, poisoned)


def _shared_rows(bias: Tensor) -> Tensor:
    """Mask rows (G, R, S) as (1, R, S) when all heads read the same memory."""
    return bias[:1] if bias.stride(0) == 0 else bias


def _extra_columns(key: Tensor, value: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The five extra columns (S, 5), and which positions hold NaN or Inf (S,), None when none does."""
    keys = key.shape[0]
    extra = torch.ones(keys, EXTRA, dtype=precision, device=key.device)
    for first in range(0, keys, KEY_CHUNK):
        part = slice(first, first + KEY_CHUNK)
        if value.shape[-1]:
            extra[part, 1] = value[part].abs().amax(-1).to(precision)
        extra[part, 3] = key[part].to(precision).square().sum(-1).sqrt_()
    broken = ~(extra[:, 1].isfinite() & extra[:, 3].isfinite())
    extra[:, 2] = extra[:, 1].square()
    extra[:, 4] = extra[:, 1] * extra[:, 3]
    if not bool(broken.any()):
        return extra, None
    return extra.masked_fill(broken[:, None], 0.0), broken


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


def _attend(
    block: Tensor,
    rows: range,
    key: Tensor,
    value: Tensor,
    columns: tuple[Tensor, Tensor | None],
    bias: Tensor | None,
    call: AttentionCall,
) -> tuple[Tensor, RowScale, Tensor]:
    """One block (G, R, E) in the working precision → output (G, R, Ev), its `RowScale`, and live (G, R)."""
    group, count, _ = block.shape
    precision, width = block.dtype, value.shape[-1]
    extra, broken = columns
    runs = _runs(bias, rows, key.shape[0], call.is_causal)
    total = sum(run.last - run.first for run in runs)
    scores = torch.empty(group, count, total, dtype=precision, device=block.device)
    scaled = (block * call.softmax_scale).reshape(group * count, -1)
    at = 0
    for run in runs:
        keys, part = slice(run.first, run.last), scores[:, :, at : at + run.last - run.first]
        torch.mm(scaled, key[keys].to(precision).T, out=part.view(group * count, -1))
        here = None if bias is None else bias[..., keys]
        if here is not None and here.dtype != torch.bool:
            part += here.to(precision)
        if not run.full:
            seen = visibility(here, rows, range(run.first, run.last), call.is_causal, block.device)
            part.masked_fill_(~seen, float("-inf"))
        at += run.last - run.first
    top = scores.amax(-1) if total else scores.new_full((group, count), float("-inf"))
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    scores.sub_(top[..., None]).exp_()
    sums = torch.zeros(group * count, width + EXTRA, dtype=precision, device=block.device)
    at = 0
    for run in runs:
        keys = slice(run.first, run.last)
        augmented = torch.empty(run.last - run.first, width + EXTRA, dtype=precision, device=block.device)
        augmented[:, :width] = value[keys]
        augmented[:, width:] = extra[keys]
        if broken is not None:
            augmented[:, :width].masked_fill_(broken[keys, None], 0.0)
        sums.addmm_(scores.view(group * count, total)[:, at : at + run.last - run.first], augmented)
        at += run.last - run.first
    output, scale = _finish(sums.view(group, count, -1), width, block, top, empty, call)
    return output, scale, ~empty


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
