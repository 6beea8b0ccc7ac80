"""One pass over the mask of one batch and head: the few numbers a row from which its rule can be told.

Memory is one block of rows (`visibility.BLOCK_ENTRIES`) and O(L + S) for what is collected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.visibility import causal_offset, comparable, lowest_value, mask_plane, row_blocks, scores_shape


@dataclass(frozen=True)
class RowScan:
    """What one pass over a mask (L, S) collects; tensors on the CPU, int64 or bool.

    first, last: first and last visible key of each row (undefined where count is 0). count: visible keys of each row.
    seen: keys that some row sees; seen_later: the same without the leading rows that see every key.
    """

    first: Tensor
    last: Tensor
    count: Tensor
    seen: Tensor
    seen_later: Tensor

    @property
    def full_start(self) -> int:
        """How many leading rows see every key."""
        partial = (self.count < self.seen.numel()).nonzero()
        return int(partial[0]) if partial.numel() else self.count.numel()


@dataclass(frozen=True)
class PlaneScan:
    """A scanned mask. Visibility in `rows` reads finfo.min as hidden; `empty` (L,) are rows with -inf or False only.

    additive: smallest and largest value among visible entries, (inf, -inf) when there is none to add.
    lowest_entries: how many entries are finfo.min of the mask's dtype.
    """

    rows: RowScan
    empty: Tensor
    additive: tuple[float, float] = (math.inf, -math.inf)
    lowest_entries: int = 0
    has_nan: bool = False


def scan(call: AttentionCall, batch: int, head: int) -> PlaneScan:
    """Scan the mask of one batch and head; a rule without values (`is_causal`) is scanned in closed form."""
    _, _, rows, keys = scores_shape(call)
    plane, offset = mask_plane(call, batch, head), causal_offset(call)
    if plane is None:
        return _closed_form(rows, keys, keys if offset is None else offset)
    if plane.stride(0) == 0 and offset is None:  # one row for all
        one = _scan_values(plane[:1], None)
        spread = replace(
            one.rows,
            first=one.rows.first.expand(rows),
            last=one.rows.last.expand(rows),
            count=one.rows.count.expand(rows),
        )
        return replace(one, rows=spread, empty=one.empty.expand(rows))
    return _scan_values(plane, offset)


def _closed_form(rows: int, keys: int, offset: int) -> PlaneScan:
    count = (torch.arange(rows) + offset + 1).clamp(0, keys)
    seen = torch.arange(keys) < int(count.max())
    later = torch.zeros_like(seen) if bool((count == keys).all()) else seen
    found = RowScan(torch.zeros_like(count), (count - 1).clamp(min=0), count, seen, later)
    return PlaneScan(found, count == 0)


def _scan_values(plane: Tensor, offset: int | None) -> PlaneScan:
    blocks = [_scan_block(plane[start:stop], start, offset) for start, stop in row_blocks(*plane.shape)]
    seen = torch.stack([block.rows.seen for block in blocks]).any(0)
    later, leading = torch.zeros_like(seen), True
    for block in (block.rows for block in blocks):
        later |= block.seen_later if leading else block.seen
        leading = leading and block.full_start == block.count.numel()
    rows = RowScan(
        torch.cat([block.rows.first for block in blocks]),
        torch.cat([block.rows.last for block in blocks]),
        torch.cat([block.rows.count for block in blocks]),
        seen,
        later,
    )
    return PlaneScan(
        rows,
        torch.cat([block.empty for block in blocks]),
        (min(block.additive[0] for block in blocks), max(block.additive[1] for block in blocks)),
        sum(block.lowest_entries for block in blocks),
        any(block.has_nan for block in blocks),
    )


def _scan_block(values: Tensor, start: int, offset: int | None) -> PlaneScan:
    """Scan the rows from `start` on, given as mask values (rows, S)."""
    values = comparable(values)
    count_rows, keys = values.shape
    padded = torch.zeros(count_rows, -(-keys // 8) * 8, dtype=torch.bool, device=values.device)
    visible = padded[:, :keys]
    allowed = None
    if offset is not None:
        row = torch.arange(start, start + count_rows, device=values.device)[:, None]
        allowed = torch.arange(keys, device=values.device) <= row + offset
    empty, lowest_entries = None, 0
    if values.dtype == torch.bool:
        visible.copy_(values)
    else:
        torch.ne(values, -math.inf, out=visible)
        at_lowest = torch.zeros_like(padded)
        torch.eq(values, lowest_value(values), out=at_lowest[:, :keys])
        if bool(at_lowest.any()):
            lowest_entries = int(_row_counts(at_lowest).sum())
            empty = ~(visible if allowed is None else visible & allowed).any(1)
            padded &= ~at_lowest
    if allowed is not None:
        visible &= allowed
    rows = _extent(padded, visible)
    if values.dtype == torch.bool:
        return PlaneScan(rows, rows.count == 0)
    low, high, has_nan = _additive_range(values, visible)
    return PlaneScan(rows, rows.count == 0 if empty is None else empty.cpu(), (low, high), lowest_entries, has_nan)


def _row_counts(padded: Tensor) -> Tensor:
    """True entries of each row; columns a multiple of 8. Adds the bytes of up to 255 int64 words without a carry."""
    count = torch.zeros(len(padded), dtype=torch.int64, device=padded.device)
    words = padded.view(torch.int64)
    for start in range(0, words.shape[1], 255):
        count += words[:, start : start + 255].sum(1).view(torch.uint8).view(len(padded), 8).sum(1)
    return count


def _extent(padded: Tensor, visible: Tensor) -> RowScan:
    """First, last and number of visible keys of each row, and which keys are seen.

    `padded` is `visible` with False columns up to a multiple of 8: eight entries are looked at as one int64.
    """
    words = padded.view(torch.int64)
    used = (words != 0).view(torch.uint8)
    eights = padded.view(torch.uint8).view(len(padded), -1, 8)
    row = torch.arange(len(padded), device=padded.device)
    first_word = used.argmax(1)
    last_word = used.shape[1] - 1 - used.flip(1).argmax(1)
    first = first_word * 8 + eights[row, first_word].argmax(1)
    last = last_word * 8 + 7 - eights[row, last_word].flip(1).argmax(1)
    count = _row_counts(padded).cpu()
    partial = (count < visible.shape[1]).nonzero()
    full = int(partial[0]) if partial.numel() else len(padded)
    seen_later = visible[full:].any(0).cpu()
    seen = seen_later | (full > 0)
    return RowScan(first.cpu(), last.cpu().clamp(max=visible.shape[1] - 1), count, seen, seen_later)


def _additive_range(values: Tensor, visible: Tensor) -> tuple[float, float, bool]:
    """Smallest and largest value among visible entries ((inf, -inf) when none), and whether one is NaN."""
    if torch.equal(values == 0, visible):  # the common additive mask: 0 or hidden
        return (0.0, 0.0, False) if bool(visible.any()) else (math.inf, -math.inf, False)
    hidden = ~visible
    high = float(values.masked_fill(hidden, -math.inf).amax())
    if math.isnan(high):
        return (*_additive_range(values, visible & ~values.isnan())[:2], True)
    low = float(values.masked_fill(hidden, math.inf).amin())
    return low + 0.0, high + 0.0, False  # -0 is 0
