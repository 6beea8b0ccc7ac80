"""The mask of one batch entry and head as a small grid: which share of each block of rows × keys takes part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.visibility import (
    bias_rows,
    distinct_planes,
    fully_masked_rows,
    row_blocks,
    scores_shape,
    true_ranges,
)

SIDE = 192
"""Cells of the grid along the longer side at most."""

MOST_ENTRIES = 1 << 28
"""Entries looked at; of a larger mask, some rows of each block are."""


@dataclass(frozen=True)
class MaskGrid:
    """cells: uint8 (rows, columns), 0 nothing allowed … 255 everything, between them never rounded to either.

    tall, wide: query rows and keys to a cell. masked: uint8 (rows,), 2 where all query rows of a cell's are fully
    masked, 1 where some are; `masked_rows` the ranges of them. sampled: not every row was looked at.
    """

    cells: Tensor
    tall: int
    wide: int
    rows: int
    keys: int
    masked: Tensor
    masked_rows: tuple[tuple[int, int], ...]
    batch: int
    head: int
    alone: bool
    """Whether every batch entry and head has this mask."""
    sampled: bool = False


def mask_grid(call: AttentionCall, batch: int = 0, head: int = 0, *, side: int = SIDE) -> MaskGrid | None:
    """The grid for one batch entry and head; None when there is nothing to draw or the mask does not broadcast.

    Memory: one block of mask rows. finfo.min counts as hidden, but does not make a row fully masked.
    """
    _, _, rows, keys = scores_shape(call)
    if not rows or not keys:
        return None
    try:
        batches, heads = distinct_planes(call)
        empty = fully_masked_rows(call)[batch, head]
    except InputError:
        return None
    tall, wide = -(-rows // side), -(-keys // side)
    count = max(1, MOST_ENTRIES // (-(-rows // tall) * keys))
    parts = []
    for first in range(0, rows, tall):
        last = min(first + tall, rows)
        parts.append(_shares(call, batch, head, first, last, wide, count))
    masked = [empty[first : first + tall] for first in range(0, rows, tall)]
    return MaskGrid(
        cells=torch.stack(parts),
        tall=tall,
        wide=wide,
        rows=rows,
        keys=keys,
        masked=torch.tensor([2 * bool(part.all()) or int(part.any()) for part in masked], dtype=torch.uint8),
        masked_rows=tuple(true_ranges(empty)),
        batch=batch,
        head=head,
        alone=len(batches) == 1 and len(heads) == 1,
        sampled=count < tall,
    )


def _shares(call: AttentionCall, batch: int, head: int, first: int, last: int, wide: int, count: int) -> Tensor:
    """One line of cells from the query rows [first, last), or from `count` of them."""
    keys = call.key.shape[-2]
    seen = torch.zeros(keys, dtype=torch.int64)
    looked = 0
    if last - first <= count:
        spans = [(first + start, first + stop) for start, stop in row_blocks(last - first, keys)]
    else:
        spans = [(row, row + 1) for row in torch.linspace(first, last - 1, count).long().tolist()]
    for start, stop in spans:
        seen += bias_rows(call, batch, head, start, stop).sum(0).cpu()
        looked += stop - start
    rest = -keys % wide
    sums = torch.nn.functional.pad(seen, (0, rest)).view(-1, wide).sum(1)
    sizes = torch.full_like(sums, wide * looked)
    sizes[-1] = (wide - rest) * looked
    share = (sums * 253) // sizes + 1
    return torch.where(sums == 0, 0, torch.where(sums == sizes, 255, share)).to(torch.uint8)
