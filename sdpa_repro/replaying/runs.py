"""Which scores a call needs: the keys that each block of query rows has to look at, found before anything is computed.

A mask is read once, in blocks of rows, and only two bits for every 128 x 128 entries are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TILE = 128
"""Query rows and keys that are looked at, or left out, together."""

ENTRIES = 1 << 23
"""Mask entries read at a time."""


@dataclass(frozen=True)
class Run:
    """Keys [first, last) and the rows [above, below) of a block that look at them.

    Only rows [start, stop) have entries among these that the mask hides; none has when start == stop.
    """

    first: int
    last: int
    above: int
    below: int
    start: int
    stop: int


def hidden_below(dtype: torch.dtype) -> float:
    """Additive mask values at or below this hide a key: half of finfo.min, the usual stand-in for -inf."""
    return torch.finfo(dtype).min / 2


def visible(bias: Tensor) -> Tensor:
    """Which entries of a bool or additive mask let the key take part (bool, same shape).

    NaN hides nothing: added to a score it makes the row NaN.
    """
    return bias if bias.dtype == torch.bool else ~(bias <= hidden_below(bias.dtype))


def plan(mask: Tensor | None, is_causal: bool, rows: int, keys: int, step: int, chunk: int) -> list[list[Run]]:
    """The runs of each block of `step` query rows, by key, each of at most `chunk` keys.

    mask: (H, L, S) of heads that are computed together. `step` is a power of two, `chunk` a multiple of `TILE`
    (or both at least L and S). Runs cover every visible entry and few others.
    """
    if mask is None and not is_causal:
        parts = [(first, min(first + chunk, keys)) for first in range(0, keys, chunk)]
        heights = [min(step, rows - first) for first in range(0, rows, step)]
        return [[Run(first, last, 0, height, 0, 0) for first, last in parts] for height in heights]
    if rows <= TILE and keys <= min(TILE, chunk) and rows <= step:
        return [[Run(0, keys, 0, rows, 0, rows)]]
    height = min(TILE, step)
    tiles = [_causal(rows, keys, height)] if is_causal else []
    tiles += [] if mask is None else [_tiles(mask, height)]
    some, every = (torch.stack(kind).all(0) for kind in zip(*tiles, strict=True))
    return _runs(some, every, rows, keys, step // height, height, chunk)


def _causal(rows: int, keys: int, height: int) -> tuple[Tensor, Tensor]:
    """Whether some entry, and whether every entry, of each tile is on or below the diagonal; (row tiles, key tiles)."""
    row, key = torch.arange(0, rows, height)[:, None], torch.arange(0, keys, TILE)
    return key < (row + height).clamp(max=rows), (key + TILE).clamp(max=keys) <= row + 1


def _tiles(mask: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """The same for a mask (H, L, S): whether some head sees some entry, and whether all heads see all of them."""
    heads, rows, keys = mask.shape
    if rows > 1 and mask.stride(1) == 0:  # one row for all
        some, every = _tiles(mask[:, :1].contiguous(), 1)
        tall = -(-rows // height)
        return some.expand(tall, -1), every.expand(tall, -1)
    tall, wide = -(-rows // height), -(-keys // TILE)
    some = torch.zeros(tall, wide, dtype=torch.bool, device=mask.device)
    every = torch.ones_like(some)
    together = max(1, min(heads, ENTRIES // max(1, rows * keys)))
    band = max(1, ENTRIES // max(1, together * keys * height))
    for head in range(0, heads, together):
        for first in range(0, tall, band):
            part = visible(mask[head : head + together, first * height : (first + band) * height])
            here = slice(first, first + band)
            found, full = _columns(part, height)
            some[here] |= found.any(0)
            every[here] &= full.all(0)
    return some.cpu(), every.cpu()


def _columns(seen: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Whether some and every entry of each tile of (H, R, S) is True, (H, row tiles, key tiles)."""
    _, rows, keys = seen.shape
    whole = rows // height * height
    found, full = [], []
    for part in (seen[:, :whole].unflatten(1, (-1, height)) if whole else None, seen[:, None, whole:]):
        if part is None or not part.shape[2]:
            continue
        count = _down(part)
        missing = -keys % TILE
        some = torch.nn.functional.pad(count, (0, missing)).unflatten(-1, (-1, TILE)).amax(-1)
        every = torch.nn.functional.pad(count, (0, missing), value=part.shape[2]).unflatten(-1, (-1, TILE)).amin(-1)
        found.append(some > 0)
        full.append(every == part.shape[2])
    return torch.cat(found, 1), torch.cat(full, 1)


def _down(seen: Tensor) -> Tensor:
    """How many entries of each column of (…, R, S) are True, R at most 255: uint8 (…, S).

    Eight columns are added as one int64, which is one pass at the speed of memory; bytes cannot carry.
    """
    keys = seen.shape[-1]
    if keys % 8 or seen.data_ptr() % 8 or seen.stride(-1) != 1 or any(step % 8 for step in seen.stride()[:-1]):
        padded = seen.new_zeros(*seen.shape[:-1], keys + -keys % 8)
        padded[..., :keys] = seen
        return _down(padded)[..., :keys]
    return seen.view(torch.int64).sum(-2).view(torch.uint8)


def _runs(some: Tensor, every: Tensor, rows: int, keys: int, tall: int, height: int, chunk: int) -> list[list[Run]]:
    """Runs from tiles (row tiles, key tiles), `tall` row tiles of `height` rows to a block."""
    missing = -len(some) % tall
    seen = torch.nn.functional.pad(some, (0, 0, 0, missing)).view(-1, tall, some.shape[1])
    place = torch.arange(tall)[:, None]
    above, below = _extent(seen)
    partly = ~torch.nn.functional.pad(every, (0, 0, 0, missing), value=True).view_as(seen)
    partly &= (place >= above[:, None]) & (place < below[:, None])
    start, stop = _extent(partly)
    plans: list[list[Run]] = []
    for block, used in enumerate(seen.any(1)):
        limit, found = min(tall * height, rows - block * tall * height), list[Run]()
        tiles = used.nonzero().flatten()
        sides = torch.stack([side[block, tiles] for side in (above, below, start, stop)], 1) * height
        for tile, side in zip(tiles.tolist(), sides.clamp(max=limit).tolist(), strict=True):
            run = Run(tile * TILE, min((tile + 1) * TILE, keys), *side)
            last = found[-1] if found else run
            joined = replace(last, last=run.last)
            if last.last == run.first and joined.last - joined.first <= chunk and _sides(last) == _sides(run):
                found[-1] = joined
            else:
                found.append(run)
        plans.append(found)
    return plans


def _sides(run: Run) -> tuple[int, int, int, int]:
    return run.above, run.below, run.start, run.stop


def _extent(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The range [first, stop) that holds every True along dimension 1 of (N, R, C); (0, 0) without any."""
    number = flags.to(torch.uint8)
    first, stop = number.argmax(1), flags.shape[1] - number.flip(1).argmax(1)
    return first, torch.where(flags.any(1), stop, 0)
