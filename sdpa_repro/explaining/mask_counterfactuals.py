"""Counterfactuals about what a row may see: the mask left out, shifted, misread, and other causal diagonals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, span_elements
from sdpa_repro.explaining.believed import Counterfactual, Part, defined, own_rows
from sdpa_repro.replaying.reference import four_dims, rows_of


def masks(call: AttentionCall, flat: AttentionCall) -> Iterator[Counterfactual]:
    """The mask left out, shifted, misread, or taken from another head or batch."""
    if flat.is_causal and flat.attn_mask is None:
        yield defined("mask_ignored", "computed as if is_causal was not set", own_rows(replace(flat, is_causal=False)))
    if flat.attn_mask is None:
        return
    mask = flat.attn_mask
    yield defined("mask_ignored", "computed without attn_mask", own_rows(replace(flat, attn_mask=None)))
    for step, side in ((1, "later"), (-1, "earlier")):
        for edge in ("hidden", "seen", "wrapped"):
            clause = f"computed with attn_mask shifted to the next {side} key"
            yield defined("mask_shifted", clause, _shifted(flat, step, edge), step, edge)
    for dim, word in ((1, "head"), (0, "batch entry")):
        if mask.shape[dim] > 1 and mask.stride(dim) != 0:
            first = replace(flat, attn_mask=mask.narrow(dim, 0, 1).expand(mask.shape))
            clause = f"computed with the mask of {word} 0"
            yield defined(f"mask_{word.split()[0]}", clause, own_rows(first))
    halves = _halves(call)
    if halves is not None:
        name = str(call.query.dtype).removeprefix("torch.")
        clause = f"computed with the bytes of the float32 attn_mask read as {name}"
        misread = four_dims(replace(call, attn_mask=halves))
        yield defined("mask_dtype", clause, own_rows(misread))


def _shifted(flat: AttentionCall, step: int, edge: str) -> Part:
    """Every key gets the mask entry `step` keys before it; the end is hidden, seen or the other end's entry."""

    def part(batch: int, head: int, rows: Tensor) -> AttentionCall:
        assert flat.attn_mask is not None
        mask = flat.attn_mask[batch, head, rows].roll(step, -1)
        end = 0 if step > 0 else -1
        if edge != "wrapped":
            seen = edge == "seen"
            mask[:, end] = seen if mask.dtype == torch.bool else (0.0 if seen else float("-inf"))
        return replace(rows_of(flat, batch, head, rows), attn_mask=mask[None, None])

    return part


def _halves(call: AttentionCall) -> Tensor | None:
    """A float32 mask's memory taken for numbers of a 16-bit query's dtype, at the mask's own strides in elements."""
    mask = call.attn_mask
    if getattr(mask, "variant", None) is not None:  # a CausalBias is a rule, its memory means nothing
        return None
    if mask is None or mask.dtype != torch.float32 or call.query.element_size() != 2 or not mask.numel():
        return None
    flat = mask.detach().as_strided((span_elements(mask),), (1,), mask.storage_offset()).view(call.query.dtype)
    return flat.as_strided(mask.shape, mask.stride(), flat.storage_offset())


def causal(call: AttentionCall, flat: AttentionCall) -> Iterator[Counterfactual]:
    """Another diagonal than the call asked for with `is_causal` or `CausalBias`."""
    variant = getattr(call.attn_mask, "variant", None)
    if variant is None and not (flat.is_causal and flat.attn_mask is None):
        return
    rows, keys = flat.query.shape[2], flat.key.shape[2]
    right = 0 if flat.is_causal else keys - rows
    bare = replace(flat, attn_mask=None, is_causal=False)
    names = {
        0: "aligned to the top left",
        keys - rows: "aligned to the bottom right",
        right + 1: "one key too wide",
        right - 1: "strict (without the diagonal)",
    }
    for offset, name in names.items():
        if offset != right:
            clause = f"computed with the causal mask {name}"
            yield defined("causal_alignment", clause, _diagonal(bare, offset), name)


def _diagonal(bare: AttentionCall, offset: int) -> Part:
    def part(batch: int, head: int, rows: Tensor) -> AttentionCall:
        seen = torch.arange(bare.key.shape[2], device=rows.device) <= rows[:, None] + offset
        return replace(rows_of(bare, batch, head, rows), attn_mask=seen[None, None])

    return part
