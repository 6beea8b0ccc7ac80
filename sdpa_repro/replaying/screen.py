"""Clear a healthy call without computing all of its reference; what is not cleared is left to the whole check.

Two screens, each only where it saves work. A small call (a decode step) is computed at once, without tiles, and its
rows are held against the part of the rounding floor that needs no further pass over key and value: less than the
floor, so a row within it is within the floor too. A float32 call is compared in a few random combinations of
its columns (a count sketch), which spares most of the product with value: half of the arithmetic.

The sketch puts the columns on a square grid at random and adds up each line and each row of it with random signs.
Two columns never share both their sums, so an error beyond the floor that is in one, two or three columns of a row
shows at full size in some sum. Errors in more columns can hide only where those of every line and row of the grid
cancel to within half: that takes at least the four corners of a rectangle in exact proportion, in no other columns,
with 1 of 16 choices of signs. The random numbers are the same in every run. No row is called wrong here.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.reference import Sketch, blocks, reference, rows_of
from sdpa_repro.replaying.runs import visible
from sdpa_repro.replaying.verdict import Factors, compare, floor, floor_factors, rms_share

ROWS, PAIRS = 256, 1 << 18
"""Most query rows of all heads, and query-key pairs, of a call that is computed at once."""

CONVERTED = 1 << 24
"""Most elements of key and value that are converted at once."""

NARROW = 64
"""Fewer columns than this are compared one by one."""

CUT = 0.5
"""Share of a row's threshold that a sum of the sketch may reach."""


class Cleared(NamedTuple):
    """Every row of a call is within its threshold; numbers of the row that came closest in the screen."""

    ratio: float
    max_abs: float
    threshold: float


def screened(flat: AttentionCall, output: Tensor, tile_bytes: int) -> Cleared | None:
    """Clear a call from `four_dims` and its output (B, H, L, Ev), or None when the whole check has to be made."""
    batches, heads, rows, width = output.shape
    keys = flat.key.shape[2]
    if 0 in (batches, heads, rows, keys, width) or flat.query.dtype == torch.float64 or output.dtype == torch.float64:
        return None
    if batches * heads * rows <= ROWS and batches * heads * rows * keys <= PAIRS:
        return _at_once(flat, output)
    if output.dtype == torch.float32 and width >= NARROW and rows > 1:
        return _sketched(flat, output, tile_bytes)
    return None


def _at_once(flat: AttentionCall, output: Tensor) -> Cleared | None:
    """Compute a small call in one go; key and value heads may be shared by neighbouring query heads.

    Few operations, since each costs more than its arithmetic: the rows' numbers are compared in Python.
    """
    batches, heads, rows, width = output.shape
    shared, keys = _distinct_heads(flat), flat.key.shape[2]
    if shared is None or batches * shared * keys * (flat.key.shape[-1] + width) > CONVERTED:
        return None
    if torch.is_autocast_enabled(output.device.type):
        return None
    query = flat.query.float().reshape(batches, shared, heads // shared * rows, -1)
    key, value = flat.key[:, :shared].float(), flat.value[:, :shared].float()
    scores = _masked((torch.matmul(query, key.mT) * flat.softmax_scale).view(batches, heads, rows, keys), flat)
    weights = torch.softmax(scores, -1)
    expected = torch.matmul(weights.view(batches, shared, -1, keys), value).view(output.shape)
    difference = output - expected
    rms = torch.linalg.vector_norm(difference, dim=-1)
    numbers = (scores.amax(-1), weights.amax(-1), _largest(expected), _largest(difference), rms)
    found = [Row(*row) for row in torch.stack(numbers, -1).view(-1, len(numbers)).tolist()]
    share = width**-0.5 / rms_share(width)
    factors = floor_factors(output.dtype, keys)
    nearest, at = -1.0, 0
    for index, row in enumerate(found):
        if row.top == float("-inf"):
            continue  # it may attend to nothing
        # |out| <= sum of p|v| in every column: no sum of RowScale is smaller than what stands here for it
        least = factors.weight + factors.spread * row.weight**0.5 + factors.scores * 2 * abs(row.top)
        ratio = max(row.error, row.rms * share) / ((factors.size + least) * row.size + factors.constant)
        if not ratio <= 1.0:
            return None
        if ratio > nearest:
            nearest, at = ratio, index
    if nearest < 0:
        return Cleared(0.0, 0.0, 0.0)
    batch, head = divmod(at // rows, heads)
    source = head // (heads // shared)
    place = (batch, source, at - (batch * shared + source) * (heads // shared) * rows)
    sums = weights.view(batches, shared, -1, keys)[place], query[place], key[place[:2]], value[place[:2]]
    threshold = _threshold(found[at], factors, flat.softmax_scale, *sums)
    return Cleared(max(found[at].error, found[at].rms * share) / threshold, found[at].error, threshold)


class Row(NamedTuple):
    """One row of a small call: largest score and weight, largest |output|, largest error, 2-norm of the error."""

    top: float
    weight: float
    size: float
    error: float
    rms: float


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(-1)  # vector_norm of order infinity is many times slower on a CPU


def _distinct_heads(flat: AttentionCall) -> int | None:
    """How many key heads, each with a value head, the query heads share evenly; None when they do not."""
    counts = {1 if tensor.stride(1) == 0 else tensor.shape[1] for tensor in (flat.key, flat.value)}
    count = counts.pop()
    return None if counts or flat.query.shape[1] % count else count


def _masked(scores: Tensor, flat: AttentionCall) -> Tensor:
    """The scores (B, H, L, S) with the mask added, in place; hidden keys at minus infinity."""
    mask = flat.attn_mask
    if mask is not None:
        if mask.dtype != torch.bool:
            scores += mask
            mask = visible(mask)
        scores.masked_fill_(~mask, float("-inf"))
    if flat.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
        scores.masked_fill_(~seen, float("-inf"))
    return scores


def _threshold(
    row: Row, factors: Factors, factor: float, weights: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> float:
    """The floor of one row (see `tiles.RowScale`): weights (S,), query (E,), key (S, E), value (S, Ev)."""
    length, largest = torch.linalg.vector_norm(key, dim=-1), _largest(value)
    columns = torch.stack([largest, largest * largest, length, length * largest])
    weight, square, norm, product = (columns @ weights).tolist()
    reach = float(torch.linalg.vector_norm(query)) * abs(factor)
    total: float = (
        factors.size * row.size
        + factors.spread * (square * row.weight) ** 0.5
        + factors.weight * weight
        + factors.scores * (reach * (product + norm * row.size) + abs(row.top) * (weight + row.size))
        + factors.constant
    )
    return total


def _sketched(flat: AttentionCall, output: Tensor, tile_bytes: int) -> Cleared | None:
    """Compare a float32 call in the columns of a sketch, block by block."""
    columns = signs(output.shape[-1]).to(output.device)
    worst, place = -1.0, (0, 0, 0)
    sketch = Sketch(columns, output)
    for block in blocks(flat, precision=torch.float32, tile_bytes=tile_bytes, sketch=sketch):
        here = output[block.batch, block.head : block.head + block.heads, block.first : block.last]
        error = (here @ columns).sub_(block.output).abs_().amax(-1)
        ratio = error / floor(block.scale, output.dtype)
        ratio = torch.where(block.live & ~block.poisoned, ratio, 0.0).flatten()
        most, at = (float(number) for number in ratio.max(0))
        if not most <= CUT:
            return None
        if most > worst:
            head, row = divmod(int(at), block.last - block.first)
            worst, place = most, (block.batch, block.head + head, block.first + row)
    return _exact(flat, output, *place)


def signs(width: int) -> Tensor:
    """The sketch's columns (width, m), float32, 1, -1 and 0: m is about twice the square root of `width`."""
    random = torch.Generator().manual_seed(width)
    side = isqrt(width)
    lines = -(-width // side)
    place = torch.randperm(width, generator=random)
    sign = torch.randint(2, (2, width), generator=random).float() * 2 - 1
    found = torch.zeros(width, lines + side, dtype=torch.float32)
    each = torch.arange(width)
    found[each, place // side] = sign[0]
    found[each, lines + place % side] = sign[1]
    return found


def _exact(flat: AttentionCall, output: Tensor, batch: int, head: int, row: int) -> Cleared | None:
    """The numbers of one row against its own reference."""
    part = rows_of(flat, batch, head, torch.tensor([row], device=output.device))
    expected = reference(part, precision=torch.float32)
    largest, rms, _ = compare(output[batch, head, row : row + 1], expected.output[0, 0])
    error = torch.maximum(largest, rms / rms_share(output.shape[-1]))
    return _cleared(error[0], largest[0], floor(expected.scale, output.dtype)[0, 0, 0])


def _cleared(error: Tensor, max_abs: Tensor, threshold: Tensor) -> Cleared | None:
    """The three numbers of a row, None when they do not clear it."""
    found, largest, limit = torch.stack([error.double(), max_abs.double(), threshold.double()]).tolist()
    ratio = 0.0 if found == 0 else found / limit
    return Cleared(ratio, largest, limit) if ratio <= 1.0 else None
