"""Which of two calls is simpler: fewer numbers first, then what is easier to read."""

from __future__ import annotations

from torch import Tensor

from sdpa_repro.attention import is_rule, span
from sdpa_repro.recipe import Kind
from sdpa_repro.reducing.candidate import INPUTS, Candidate
from sdpa_repro.reducing.forms import Form, layout_of

CAPTURED = 12
"""Rank of values without a closed form: worse than any form."""

VALUES = {Kind.ZEROS: 0, Kind.FULL: 1, Kind.ARANGE: 3, Kind.EYE: 5, Kind.RANDINT: 6, Kind.RANDN: 8}
MASKS = {Kind.FULL: 1, Kind.ZEROS: 1, Kind.PADDING: 2, Kind.TRIL: 3, Kind.ARANGE: 6, Kind.RANDINT: 7, Kind.COIN: 7}

Rank = tuple[int, ...]


def rank(candidate: Candidate) -> Rank:
    """Lower is simpler: (elements, layout, mask, values, flags)."""
    call = candidate.call
    flags = (call.scale is not None) + call.enable_gqa + call.is_causal
    layout = sum(_layout(tensor) for tensor in call.tensors.values()) + _shared(candidate)
    mask = 0 if call.attn_mask is None else 1 + _mask(candidate.forms.get("attn_mask"), call.attn_mask)
    return candidate.elements, layout, mask, sum(_values(candidate.forms.get(name)) for name in INPUTS), flags


def simpler(one: Candidate, other: Candidate) -> bool:
    """Whether `one` is worth having instead of `other`."""
    return rank(one) < rank(other)


def _layout(tensor: Tensor) -> int:
    if is_rule(tensor):
        return 0
    return layout_of(tensor.shape, tensor.stride()).rank * 2 + (tensor.data_ptr() % 64 != 0)


def _shared(candidate: Candidate) -> int:
    """Pairs of tensors whose memory overlaps."""
    spans = [span(tensor) for tensor in candidate.call.tensors.values() if not is_rule(tensor)]
    return sum(one.overlaps(other) for index, one in enumerate(spans) for other in spans[index + 1 :])


def _values(form: Form | None) -> int:
    if form is None:
        return CAPTURED
    odd = form.kind is Kind.FULL and form.constant != 1
    other_way = form.kind is Kind.ARANGE and form.dim != -2
    return VALUES.get(form.kind, CAPTURED) + odd + other_way + 3 * (form.planted is not None)


def _mask(form: Form | None, mask: Tensor) -> int:
    if form is None:
        return 2 * CAPTURED
    padded = form.kind is Kind.TRIL and form.padding > 0
    return MASKS.get(form.kind, CAPTURED) + padded + (form.window is not None) + 8 * mask.dtype.is_floating_point
