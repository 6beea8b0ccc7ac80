"""Counterfactuals about the keys: the last ones left out, or more of them than there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.believed import Counterfactual, Part, defined
from sdpa_repro.replaying.reference import rows_of

KEY_TILES = (8, 16, 32, 48, 64, 80, 96, 112, 128, 176, 192, 256)
"""Key tile sizes whose last, partial tile may have been dropped."""

PADDINGS = (8, 16, 32, 64, 128)
"""Multiples to which a kernel may pad the keys."""


def last_keys(flat: AttentionCall) -> Iterator[Counterfactual]:
    """The last key tile left out: S % tile keys of a partial one, a whole one when none is partial."""
    keys = flat.key.shape[2]
    for count in sorted({keys % tile or tile for tile in KEY_TILES if (keys % tile or tile) < keys}):
        tiles = [tile for tile in KEY_TILES if count == (keys % tile or tile)]
        which = f"the last key ({keys - 1})" if count == 1 else f"the last {count} keys ({keys - count}–{keys - 1})"
        names = " or ".join(filter(None, [", ".join(map(str, tiles[:-1])), str(tiles[-1])]))
        clause = f"computed without {which}: S = {keys}, the last key tile of {names} left out"
        yield defined("last_keys_dropped", clause, _without_last(flat, count), count)


def _without_last(flat: AttentionCall, count: int) -> Part:
    def part(batch: int, head: int, rows: Tensor) -> AttentionCall:
        right = rows_of(flat, batch, head, rows)
        mask = None if right.attn_mask is None else right.attn_mask[..., :-count]
        return replace(right, key=right.key[:, :, :-count], value=right.value[:, :, :-count], attn_mask=mask)

    return part


def more_keys(flat: AttentionCall) -> Iterator[Counterfactual]:
    """Keys beyond S that take part: padding that scores 0 with value 0, or the memory that follows."""
    keys = flat.key.shape[2]
    for count in sorted({-keys % multiple for multiple in PADDINGS} - {0}):
        what = "1 key" if count == 1 else f"{count} keys"
        start = f"computed with {what} beyond S = {keys} taking part (padding to {keys + count}),"
        yield defined("padding_counted", f"{start} scored 0 with value 0", _padded(flat, count, False), count)
        yield defined("keys_beyond", f"{start} read from the memory that follows", _padded(flat, count, True), count)


def _padded(flat: AttentionCall, count: int, memory: bool) -> Part:
    def part(batch: int, head: int, rows: Tensor) -> AttentionCall | None:
        right = rows_of(flat, batch, head, rows)
        longer: list[Tensor] = []
        for tensor in (right.key, right.value):
            more = _beyond(tensor, count) if memory else F.pad(tensor, (0, 0, 0, count))
            if more is None:
                return None
            longer.append(more)
        mask = right.attn_mask
        if mask is not None:
            seen = mask.new_ones if mask.dtype == torch.bool else mask.new_zeros
            mask = torch.cat([mask, seen((*mask.shape[:-1], count))], -1)
        return replace(right, key=longer[0], value=longer[1], attn_mask=mask)

    return part


def _beyond(tensor: Tensor, count: int) -> Tensor | None:
    """(1, 1, S, E) with `count` more positions from the memory behind the view; None when it is not there."""
    shape = (1, 1, tensor.shape[2] + count, tensor.shape[3])
    end = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(shape, tensor.stride(), strict=True))
    if end >= tensor.untyped_storage().nbytes() // tensor.element_size():
        return None
    return tensor.detach().as_strided(shape, tensor.stride(), tensor.storage_offset())
