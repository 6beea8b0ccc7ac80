"""What the mask of a call allows: in words, as numbers and as a small picture.

The words are exact or say that they are not: see `mask_pattern`. Everything walks over the mask in blocks of
rows, once for each batch and head whose mask lies at its own address, and needs memory for one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from types import MappingProxyType
from typing import Any

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.mask_pattern import Pattern, Range, find_pattern
from sdpa_repro.mask_picture import picture
from sdpa_repro.mask_scan import PlaneScan, scan
from sdpa_repro.visibility import (
    bias_rows,
    causal_offset,
    distinct_planes,
    fully_masked_rows,
    is_tensor_mask,
    ranges,
    ranges_text,
    scores_shape,
    true_ranges,
)

__all__ = [
    "MaskDescription",
    "MaskPart",
    "bias_rows",
    "describe",
    "first_place",
    "fully_masked_rows",
    "picture",
    "ranges",
    "ranges_text",
]

MAX_PLANES = 4096
"""Masks (of one batch row and head) that are looked at; a description of more says so."""

_PLAIN_HEADLINES: Mapping[str, str] = MappingProxyType(
    {
        "none": "no mask",
        "full": "mask that hides nothing",
        "invalid": "mask of a wrong shape",
        "empty": "no scores to mask",
    }
)


@dataclass(frozen=True)
class MaskPart:
    """Batches and heads that share one pattern. Ranges are inclusive; batches and heads count the broadcast ones.

    fully_masked: rows that may see no key (-inf or False everywhere). lowest_rows: rows that hold nothing but -inf
    and at least one finfo.min: meant as masked, but PyTorch lets them attend.
    """

    batches: tuple[Range, ...]
    heads: tuple[Range, ...]
    pattern: Pattern
    fully_masked: tuple[Range, ...]
    lowest_rows: tuple[Range, ...]

    def words(self) -> list[str]:
        """The pattern, then the rows without any key."""
        words = self.pattern.words()
        if self.fully_masked:
            words.append(f"fully masked rows {ranges_text(self.fully_masked)}")
        if self.lowest_rows:
            rows = ranges_text(self.lowest_rows)
            words.append(f"rows {rows} hold finfo.min where others see keys (not -inf: PyTorch lets them attend)")
        return words


@dataclass(frozen=True)
class MaskDescription:
    """What a call's mask means.

    kind: "none" (neither mask nor `is_causal`), a pattern's kind, "mixed" when batches or heads differ in kind,
    "empty" when L or S is 0, or "invalid" when the mask does not broadcast to the scores.
    density: allowed entries over B·H·L·S. additive: smallest and largest value added to an allowed score, None when
    that is always 0. lowest_entries: finfo.min entries, counted once where broadcast. source: where the rule comes
    from, "mask", "is_causal", "CausalBias" or "none".
    """

    kind: str
    source: str
    dtype: str | None
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    scores: tuple[int, int, int, int]
    density: float
    parts: tuple[MaskPart, ...] = ()
    additive: tuple[float, float] | None = None
    additive_differs: bool = False
    lowest_entries: int = 0
    notes: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """Short phrases that describe the mask exactly, most important first."""
        if self.kind == "none":
            words = ["no mask: every row sees every key"]
        elif len(self.parts) == 1:
            words = self.parts[0].words()
        else:
            words = [f"{self._where(part)}: {', '.join(part.words())}" for part in self.parts[:16]]
            if len(self.parts) > 16:
                words.append(f"and {len(self.parts) - 16} more patterns")
        if self.additive is not None:
            words.append(self._additive_words(*self.additive))
        if self.lowest_entries:
            words.append(f"{self.lowest_entries} entries are finfo.min of {self.dtype}, read here as hidden")
        if self.kind not in ("none", "empty", "invalid"):
            words.append(f"density {self.density:.4g}")
        return [*words, *self.notes]

    @property
    def headline(self) -> str:
        """The mask as a noun phrase: "causal mask with left padding 7"."""
        if self.kind in _PLAIN_HEADLINES:
            return _PLAIN_HEADLINES[self.kind]
        if len(self.parts) != 1:
            unlike = "batch rows" if len({part.batches for part in self.parts}) > 1 else "heads"
            bases = {(part.pattern.words() or ["?"])[0] for part in self.parts}
            causal = "causal mask" if bases == {"causal"} else "mask"
            return f"{causal} that differs between {unlike}"
        first, *more = self.parts[0].pattern.words()
        if self.source != "mask":
            return f"{self.source}, no mask tensor" if first == "causal" else f"{self.source} ({first}), no mask tensor"
        kind, space, rest = first.partition(" ")
        if self.kind in ("padding", "all_masked"):
            return f"mask with {', '.join([first, *more])}"
        noun = f"{kind.rstrip(',')} mask{',' * kind.endswith(',')}{space}{rest}"
        return f"{noun} with {', '.join(more)}" if more else noun

    def document(self) -> dict[str, Any]:
        """The description as plain JSON-able data."""
        plain = asdict(self)
        plain["words"] = self.words()
        return plain

    def _where(self, part: MaskPart) -> str:
        batch, heads, _, _ = self.scores
        where = []
        if part.batches != ((0, batch - 1),):
            where.append(f"batch row {ranges_text(part.batches)}")
        if part.heads != ((0, heads - 1),):
            where.append(f"head {ranges_text(part.heads)}")
        return ", ".join(where) or "all"

    def _additive_words(self, low: float, high: float) -> str:
        if low == high:
            return f"constant {low:g} added to every allowed score"
        differs = ", different in different heads or batch rows" if self.additive_differs else ""
        weak = ", large but not -inf: such keys still take part" if low <= -1000 else ""
        return f"additive values from {low:g} to {high:g}{differs}{weak}"


def describe(call: AttentionCall) -> MaskDescription:
    """Say what the call's mask (or `is_causal`) allows. Never raises for a mask PyTorch would reject: it says so."""
    offset, scores = causal_offset(call), scores_shape(call)
    tensor = call.attn_mask if is_tensor_mask(call) else None
    source = "mask" if tensor is not None else "none" if offset is None else "is_causal"
    bare = MaskDescription(
        kind="none",
        source="CausalBias" if call.attn_mask is not None and tensor is None else source,
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else None,
        shape=tuple(tensor.shape) if tensor is not None else None,
        stride=tuple(tensor.stride()) if tensor is not None else None,
        scores=scores,
        density=0.0,
    )
    try:
        batches, heads = distinct_planes(call)
    except InputError as wrong:
        return replace(bare, kind="invalid", notes=(str(wrong),))
    if 0 in scores:
        note = "S = 0: every row is fully masked" if scores[3] == 0 else f"no scores: (B, H, L, S) = {scores}"
        return replace(bare, kind="empty", notes=(note,))
    if source == "none" and bare.source == "none":
        return replace(bare, density=1.0)
    places = list(islice(product(batches, heads), MAX_PLANES))
    planes = {place: scan(call, *place) for place in places}
    parts = _parts(planes, scores, len(batches) == 1, len(heads) == 1, causal_flag=tensor is None)
    allowed = sum(int(plane.rows.count.sum()) for plane in planes.values())
    kinds = {part.pattern.kind for part in parts}
    return replace(
        bare,
        kind=kinds.pop() if len(kinds) == 1 else "mixed",
        density=allowed / (len(planes) * scores[2] * scores[3]),
        parts=parts,
        additive=_additive(planes.values()),
        additive_differs=len({plane.additive for plane in planes.values()}) > 1,
        lowest_entries=sum(plane.lowest_entries for plane in planes.values()),
        notes=_notes(call, any(plane.has_nan for plane in planes.values()), len(batches) * len(heads)),
    )


def _notes(call: AttentionCall, has_nan: bool, count: int) -> tuple[str, ...]:
    notes, mask = [], call.attn_mask
    if mask is not None and call.is_causal:
        notes.append("is_causal is set as well and applied here (an invalid call: MATH and torch 2.14 reject it)")
    if mask is not None and is_tensor_mask(call) and not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        notes.append(f"PyTorch rejects a mask of dtype {mask.dtype}; its values are read here as added")
    if has_nan:
        notes.append("the mask holds NaN")
    if count > MAX_PLANES:
        notes.append(f"only the first {MAX_PLANES} of {count} masks (batch row, head) were looked at")
    return tuple(notes)


def _additive(planes: Iterable[PlaneScan]) -> tuple[float, float] | None:
    planes = list(planes)
    low = min(plane.additive[0] for plane in planes)
    high = max(plane.additive[1] for plane in planes)
    return None if low > high or low == high == 0 else (low, high)


def _parts(
    planes: Mapping[tuple[int, int], PlaneScan],
    scores: tuple[int, int, int, int],
    one_batch: bool,
    one_head: bool,
    causal_flag: bool,
) -> tuple[MaskPart, ...]:
    """Group the planes by equal pattern and fully masked rows, and widen broadcast ones to all batches and heads."""
    groups: dict[tuple[Pattern, tuple[Range, ...], tuple[Range, ...]], list[tuple[int, int]]] = {}
    for place, plane in planes.items():
        pattern = find_pattern(plane.rows, causal_flag=causal_flag)
        lowest_rows = tuple(true_ranges((plane.rows.count == 0) & ~plane.empty))
        groups.setdefault((pattern, tuple(true_ranges(plane.empty)), lowest_rows), []).append(place)
    parts = []
    for (pattern, empty, lowest_rows), places in groups.items():
        for batches, heads in _rectangles(places):
            parts.append(
                MaskPart(
                    ((0, scores[0] - 1),) if one_batch else tuple(ranges(batches)),
                    ((0, scores[1] - 1),) if one_head else tuple(ranges(heads)),
                    pattern,
                    empty,
                    lowest_rows,
                )
            )
    return tuple(parts)


def _rectangles(places: Sequence[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """(batch, head) places as products of batches and heads: batches that list the same heads go together."""
    heads_of: dict[int, list[int]] = {}
    for batch, head in places:
        heads_of.setdefault(batch, []).append(head)
    together: dict[tuple[int, ...], list[int]] = {}
    for batch, heads in heads_of.items():
        together.setdefault(tuple(heads), []).append(batch)
    return [(batches, list(heads)) for heads, batches in together.items()]


def first_place(told: MaskDescription) -> tuple[int, int]:
    """(batch, head) of the first part that is a real mask: what to draw when there is room for one picture."""
    if not told.parts:
        return 0, 0
    part = next((part for part in told.parts if part.pattern.kind != "full"), told.parts[0])
    return part.batches[0][0], part.heads[0][0]
