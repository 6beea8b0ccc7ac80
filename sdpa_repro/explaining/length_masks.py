"""A call's mask at other lengths: the same structure, with rows that can be told apart.

A structure that `mask_pattern` recognises (causal, padding, sliding window, bidirectional blocks, documents) is
built anew from its rule; any other mask is cropped, or extended by random entries of the same density. A fault
that takes the mask row of another query row shows only where the two rows differ, so rows that see the same
keys as an earlier one lose half of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, viewed_once
from sdpa_repro.explaining.length_layout import allocate, restride
from sdpa_repro.mask_pattern import Document, Pattern, Range, find_pattern
from sdpa_repro.mask_scan import scan
from sdpa_repro.visibility import BLOCK_ENTRIES, is_tensor_mask, lowest_value, visible_values

SPARSEST, DENSEST = 0.2, 0.8
"""Share of visible keys that random rows stay within, whatever the original's density."""

ATTEMPTS = 4
"""Times that equal rows are thinned out before they are left as they are."""


@dataclass(frozen=True)
class Plane:
    """The mask of one batch and head, on the CPU, and what is known of it.

    values: (L, S), with size 1 where the mask is broadcast. pattern: its rule, None when none fits.
    """

    values: Tensor
    visible: Tensor
    pattern: Pattern | None
    end: str
    rows_as: str

    @property
    def is_bool(self) -> bool:
        return self.values.dtype == torch.bool

    @cached_property
    def seen(self) -> int:
        """How many entries are visible."""
        return int(visible_counts(self.visible).sum())

    @property
    def density(self) -> float:
        """Share of visible entries, within what random rows may have."""
        return min(max(self.seen / self.visible.numel(), SPARSEST), DENSEST)

    @cached_property
    def added(self) -> Tensor:
        """What an additive mask adds to visible keys, in order; one number when all are equal or there is none."""
        found = self.values[self.visible]
        found = found[found.isfinite()]
        if not found.numel():
            return torch.zeros(1, dtype=self.values.dtype)
        return found[:1].clone() if bool((found == found[0]).all()) else found

    @cached_property
    def hiding(self) -> float:
        """-inf, or finfo.min where an additive mask hides with nothing else."""
        lowest = lowest_value(self.values)
        only_lowest = bool((self.values == lowest).any()) and not bool((self.values == -math.inf).any())
        return lowest if only_lowest else -math.inf


def mask_resizer(call: AttentionCall, *, seed: int, end: str, rows_as: str) -> Callable[[int, int], Tensor] | None:
    """From L and S to the call's mask at these lengths; None when the call has no mask.

    `end` and `rows_as` as `end` and `mask` of `lengths.with_lengths`. Broadcast dimensions stay so.
    """
    mask = call.attn_mask
    if mask is None:
        return None
    if not is_tensor_mask(call):
        causal_bias, variant = type(mask), getattr(mask, "variant", None)
        return lambda rows, keys: causal_bias(variant, rows, keys)
    mask = mask.detach()
    once = viewed_once(mask[None] if mask.dim() == 1 else mask)
    places = list(itertools.product(*(range(size) for size in once.shape[:-2])))
    planes = [_plane(once[place].cpu(), end, rows_as) for place in places]
    lengths = (call.query.shape[-2], call.key.shape[-2])

    def resized(rows: int, keys: int) -> Tensor:
        sizes = {-2: (lengths[0], rows), -1: (lengths[1], keys)}
        shape = list(mask.shape)
        for dim, (before, after) in sizes.items():
            if -dim <= mask.dim() and shape[dim] == before:
                shape[dim] = after
        fresh = allocate(mask, shape, restride(mask.shape, mask.stride(), shape)[0])
        target = viewed_once(fresh[None] if mask.dim() == 1 else fresh)
        generator = torch.Generator().manual_seed(seed + 17)
        for place, plane in zip(places, planes, strict=True):
            target[place].copy_(_resized(plane, target.shape[-2], target.shape[-1], generator))
        return fresh

    return resized


def _plane(values: Tensor, end: str, rows_as: str) -> Plane:
    rows, keys = values.shape
    size = torch.empty(1, 1, rows, 1), torch.empty(1, 1, keys, 1)
    pattern = find_pattern(scan(AttentionCall(size[0], size[1], size[1], values[None, None]), 0, 0).rows)
    known = pattern if pattern.kind != "arbitrary" else None
    return Plane(values, visible_values(values), known, end, rows_as)


def _resized(plane: Plane, rows: int, keys: int, generator: torch.Generator) -> Tensor:
    """Mask values (rows, keys) for one batch and head."""
    if not plane.seen:
        return _values(plane, torch.zeros(rows, keys, dtype=torch.bool), generator)
    if plane.rows_as == "random" and rows > 1:
        visible = _random(plane, rows, keys, generator)
    elif plane.pattern is None:
        visible = _extended(plane, rows, keys, generator)
    else:
        visible = at_size(plane.pattern, rows, keys, plane.end)
    values = _values(plane, visible, generator)
    if plane.rows_as == "kept" or rows == 1:
        return values
    for _ in range(ATTEMPTS):
        repeated = _repeated_rows(values, visible)
        if not bool(repeated.any()):
            break
        visible = _thinned(visible, repeated, generator)
        values = _values(plane, visible, generator, values)
    return values


def at_size(pattern: Pattern, rows: int, keys: int, end: str) -> Tensor:
    """Bool (rows, keys): the rule at other lengths, with at least one row that sees a key.

    Left and right padding keep their length while at least half of the keys, and two of them, stay visible. In a
    plain causal mask that was square, row i sees its share (i + 1) * keys / rows of the keys: with any other
    alignment some rows would see nothing, or some keys would be hidden from all, and what goes wrong there too.
    Other diagonals stay tied to the bottom right corner.
    """
    after = _after(pattern, rows, keys)
    before = pattern.before
    if before is not None and pattern.after is not None and after is not None:
        before += pattern.after - after
    row_shift, key_shift = (rows - pattern.rows, keys - pattern.keys) if end == "head" else (0, 0)
    resized = replace(
        pattern,
        rows=rows,
        keys=keys,
        before=before,
        after=after,
        blocks=_shifted(pattern.blocks, key_shift, keys),
        documents=_documents(pattern, rows, keys, row_shift, key_shift),
        hidden_keys=_hidden_keys(pattern, keys, key_shift),
        open_rows=_shifted(pattern.open_rows, row_shift, rows),
        empty_rows=_shifted(pattern.empty_rows, row_shift, rows),
    )
    visible = _staircase(resized) if _is_square_causal(pattern) and keys != rows else resized.visible(0, rows)
    if not bool(visible.any()):
        visible = replace(resized, hidden_keys=(), empty_rows=()).visible(0, rows)
    return visible


def _is_square_causal(pattern: Pattern) -> bool:
    plain = pattern.before is None and not pattern.blocks and not pattern.documents
    return plain and pattern.after == 0 and pattern.rows == pattern.keys


def _staircase(pattern: Pattern) -> Tensor:
    """A causal mask in steps of keys / rows; one key is seen by the later half of the rows, so that rows differ."""
    if pattern.keys == 1:
        return torch.arange(pattern.rows)[:, None] >= pattern.rows // 2
    visible = replace(pattern, after=None).visible(0, pattern.rows)
    row = torch.arange(pattern.rows)[:, None]
    return visible & (torch.arange(pattern.keys) * pattern.rows < (row + 1) * pattern.keys)


def _after(pattern: Pattern, rows: int, keys: int) -> int | None:
    """The diagonal at other lengths: tied to the bottom right corner if it may have been, else where it was."""
    if pattern.after is None:
        return None
    corner = pattern.keys - pattern.rows
    if pattern.after == corner or corner == 0:
        return pattern.after + (keys - rows) - corner
    return pattern.after


def _shifted(found: tuple[Range, ...], shift: int, size: int) -> tuple[Range, ...]:
    """Ranges moved by `shift` and cut to [0, size)."""
    moved = ((max(0, start + shift), min(size - 1, stop + shift)) for start, stop in found)
    return tuple((start, stop) for start, stop in moved if start <= stop)


def _hidden_keys(pattern: Pattern, keys: int, shift: int) -> tuple[Range, ...]:
    hidden: list[Range] = []
    for start, stop in pattern.hidden_keys:
        length = stop - start + 1
        if keys < min(pattern.keys, 2 * length):
            length = max(0, min(keys // 2, keys - 2))
        if start == 0:
            hidden.append((0, length - 1))
        elif stop == pattern.keys - 1:
            hidden.append((keys - length, keys - 1))
        else:
            hidden += _shifted(((start, stop),), shift, keys)
    return tuple((start, stop) for start, stop in hidden if start <= stop)


def _documents(pattern: Pattern, rows: int, keys: int, row_shift: int, key_shift: int) -> tuple[Document, ...]:
    """Blocks of a block-diagonal mask; the outermost one grows to the new end."""
    found = []
    for document in pattern.documents:
        own_rows = _shifted((document.rows,), row_shift, rows)
        own_keys = _shifted((document.keys,), key_shift, keys)
        if own_rows and own_keys:
            found.append(Document(own_rows[0], own_keys[0]))
    if found:
        found[0] = Document((0, found[0].rows[1]), (0, found[0].keys[1]) if key_shift > 0 else found[0].keys)
        last = found[-1]
        stop = last.keys[1] if key_shift else max(last.keys[1], keys - 1)
        found[-1] = Document((last.rows[0], rows - 1), (last.keys[0], stop))
    return tuple(found)


def _random(plane: Plane, rows: int, keys: int, generator: torch.Generator) -> Tensor:
    """Random visibility of the original's density, at least one key a row."""
    visible = torch.empty(rows, keys, dtype=torch.bool)
    for part in visible.split(_step(keys)):
        part.copy_(torch.rand(part.shape, generator=generator) < plane.density)
    one = torch.randint(keys, (rows, 1), generator=generator)
    return visible.scatter(1, one, True)


def _extended(plane: Plane, rows: int, keys: int, generator: torch.Generator) -> Tensor:
    """Cropped, and random beyond; a row that loses all its keys gets a random one."""
    visible = _random(plane, rows, keys, generator)
    spare = visible.clone()
    old, new = _common(plane, rows, keys)
    visible[new] = plane.visible[old]
    was_empty = torch.zeros(rows, dtype=torch.bool)
    was_empty[new[0]] = ~plane.visible[old[0]].any(1)
    lost = ~visible.any(1) & ~was_empty
    visible[lost] = spare[lost]
    return visible


def _common(plane: Plane, rows: int, keys: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """The part that the old and the new plane both have, as slices of each."""
    old, new = [], []
    for before, after in zip(plane.values.shape, (rows, keys), strict=True):
        kept = min(before, after)
        old.append(slice(0, kept) if plane.end == "tail" else slice(before - kept, before))
        new.append(slice(0, kept) if plane.end == "tail" else slice(after - kept, after))
    return (old[0], old[1]), (new[0], new[1])


def _values(plane: Plane, visible: Tensor, generator: torch.Generator, before: Tensor | None = None) -> Tensor:
    """Visibility as mask values: bool, or what the original adds and what it hides with.

    `before`: values of the same size to keep where they are still visible.
    """
    if plane.is_bool:
        return visible
    hidden = plane.hiding
    if before is not None:
        return before.masked_fill(~visible, hidden)
    added, values = plane.added, torch.empty(visible.shape, dtype=plane.values.dtype)
    for part in values.split(_step(visible.shape[1])):
        part.copy_(added[torch.randint(added.numel(), part.shape, generator=generator)])
    values.masked_fill_(~visible, hidden)
    old, new = _common(plane, *visible.shape)
    same = plane.visible[old] == visible[new]
    values[new] = torch.where(same, plane.values[old], values[new])
    return values


def _repeated_rows(values: Tensor, visible: Tensor) -> Tensor:
    """Bool (rows,): rows that see more than one key and are equal to another one, which is left as it is.

    The first row is always left, and so is the last one unless they are equal: these two are most often confused.
    """
    bits = values if values.dtype == torch.bool else values.view(_INTEGERS[values.element_size()])
    weights = torch.randint(-(1 << 62), 1 << 62, (values.shape[1],), generator=torch.Generator().manual_seed(0))
    parts = [((part.long() + 1) * weights).sum(1) for part in bits.split(_step(values.shape[1]))]  # wraps around
    marks = torch.cat(parts)  # equal for equal rows
    _, group = marks.unique(return_inverse=True)
    row = torch.arange(len(group))
    kept = torch.full((int(group.max()) + 1,), len(group)).scatter_reduce(0, group, row, "amin")
    if bool(group[-1] != group[0]):
        kept[group[-1]] = len(group) - 1
    return (kept[group] != row) & (visible_counts(visible) > 1)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _thinned(visible: Tensor, repeated: Tensor, generator: torch.Generator) -> Tensor:
    """Without a random half of the keys of the repeated rows; one key of each row stays."""
    visible = visible.clone()
    for rows in repeated.nonzero().flatten().split(_step(visible.shape[1])):
        draw = torch.rand(len(rows), visible.shape[1], generator=generator).masked_fill(~visible[rows], 2.0)
        kept = (draw >= 0.5) & (draw < 2.0)
        visible[rows] = kept.scatter(1, draw.argmin(1, keepdim=True), True)
    return visible


def _step(keys: int) -> int:
    """Rows taken together, so that their numbers take a hundred megabytes at most."""
    return max(1, BLOCK_ENTRIES // 8 // max(1, keys))


def visible_counts(visible: Tensor) -> Tensor:
    """True entries of each row, int64; torch would widen all of them first."""
    return torch.cat([part.sum(1) for part in visible.split(_step(visible.shape[1]))])
