"""Passes that bring the mask to a closed form, the simplest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.attention import is_rule
from sdpa_repro.explaining.length_masks import visible_counts
from sdpa_repro.recipe import Kind, build
from sdpa_repro.reducing.candidate import Candidate, formed
from sdpa_repro.reducing.forms import Form, dense_strides, recipe_of
from sdpa_repro.reducing.reducer import Clues
from sdpa_repro.visibility import visible_values


def mask(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """No mask; the causal flag; then one mask for all heads, bool before additive, dense before strided."""
    here = candidate.call.attn_mask
    if here is None:
        return
    bare = without(candidate)
    yield bare
    yield replace(bare, call=replace(bare.call, is_causal=True))
    shapes = (
        list(dict.fromkeys([_one_for_all(candidate), tuple(here.shape)])) if not is_rule(here) else [_square(candidate)]
    )
    for dtype in dict.fromkeys([torch.bool, here.dtype] if not is_rule(here) else [torch.bool]):
        for form in forms(candidate, dtype, clues):
            for shape in shapes:
                proposal = with_form(candidate, form, shape, dense_strides(shape), dtype)
                if proposal is not None:
                    yield proposal
    if not is_rule(here) and not here.is_contiguous():
        for form in forms(candidate, here.dtype, clues):
            strided = formed(candidate, {"attn_mask": form})
            if strided is not None:
                yield strided


def without(candidate: Candidate) -> Candidate:
    """The candidate without a mask."""
    kept = {name: form for name, form in candidate.forms.items() if name != "attn_mask"}
    return replace(candidate, call=replace(candidate.call, attn_mask=None), forms=kept)


def with_form(
    candidate: Candidate, form: Form, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Candidate | None:
    """The candidate with a mask of that form, shape, layout and dtype."""
    recipe = recipe_of(form, shape, stride, dtype)
    if recipe is None:
        return None
    call = replace(candidate.call, attn_mask=build(recipe, candidate.call.query.device), is_causal=False)
    return replace(candidate, call=call, forms={**candidate.forms, "attn_mask": form})


def forms(candidate: Candidate, dtype: torch.dtype, clues: Clues) -> list[Form]:
    """Masks worth trying in a dtype: open, keys hidden, causal, with the captured padding, a window, additive ones."""
    padding = _padding(candidate)
    paddings = [1] if padding <= 1 else [1, padding]
    shapes = [Form(Kind.TRIL), *(Form(Kind.TRIL, padding=count) for count in paddings)]
    shapes += [Form(Kind.TRIL, window=window) for window in _windows(candidate)]
    hidden = [Form(Kind.PADDING, padding=count) for count in paddings]
    seeded = [Form(Kind.COIN, seed=clues.seed + index) for index in range(4)]
    if dtype == torch.bool:
        return [Form(Kind.FULL, constant=True), *hidden, *shapes, *seeded]
    constants = [Form(Kind.FULL, constant=value) for value in _constants(candidate, clues)]
    additive = [Form(Kind.ARANGE, dim=-1, period=8), Form(Kind.ARANGE, dim=-2, period=8), Form(Kind.RANDINT)]
    return [Form(Kind.ZEROS), *constants, *hidden, *shapes, *additive, *seeded]


def _one_for_all(candidate: Candidate) -> tuple[int, ...]:
    """(1, 1, L, S), or (1, 1, 1, S) when the rows share one."""
    here, sizes = candidate.call.attn_mask, candidate.sizes
    assert here is not None
    rows = here.shape[-2] if here.dim() > 1 else 1
    return 1, 1, rows, sizes.S


def _square(candidate: Candidate) -> tuple[int, ...]:
    return 1, 1, candidate.sizes.L, candidate.sizes.S


def _plane(candidate: Candidate) -> Tensor | None:
    """The mask's first (L or 1, S) values."""
    here = candidate.call.attn_mask
    if here is None or is_rule(here):
        return None
    plane = here.detach()
    while plane.dim() > 2:
        plane = plane[0]
    return plane.expand(1, -1) if plane.dim() == 1 else plane


def _padding(candidate: Candidate) -> int:
    """How many leading keys no row of the first mask sees; 0 when the first key is seen or none is."""
    plane = _plane(candidate)
    if plane is None:
        return 0
    seen = visible_values(plane).any(0)
    return int(seen.int().argmax()) if bool(seen.any()) else 0


def _windows(candidate: Candidate) -> list[int]:
    """Window lengths: the most keys that a row sees, when that is fewer than a causal mask shows; and half of S."""
    plane, keys = _plane(candidate), candidate.sizes.S
    most = int(visible_counts(visible_values(plane)).max()) if plane is not None else keys
    return [window for window in dict.fromkeys([most, max(1, keys // 2)]) if 0 < window < keys]


def _constants(candidate: Candidate, clues: Clues) -> list[float]:
    """Whole numbers to add to every score: the mask's own extremes, and what brings the scores to theirs."""
    plane = _plane(candidate)
    found: list[float] = []
    if plane is not None and plane.dtype.is_floating_point:
        finite = plane[plane.isfinite()]
        if finite.numel():
            found += [float(finite.min()), float(finite.max())]
    found += [clues.low, clues.high]
    whole = [float(math.floor(value) if value < 0 else math.ceil(value)) for value in found if abs(value) < 1e4]
    return [value for value in dict.fromkeys(whole) if value]
