"""Closed forms without a size: a form and a layout together are a `Recipe`, so a tensor can change its shape.

A layout is given as shape and strides. What a reader sees at a glance is preferred: dense memory, `.expand`,
`.transpose`; `as_strided` stands for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch

from sdpa_repro.recipe import Kind, Planted, Recipe, Strided

LONGEST_COUNT = 64
"""Period of a count over memory in a layout where no dimension can be counted along: exact in every dtype."""


@dataclass(frozen=True)
class Form:
    """Where a tensor's values come from, for any shape; the fields are those of `Recipe`.

    `dim` and `planted` speak of the tensor as the call sees it: query, key and value (B, H, L or S, E).
    """

    kind: Kind
    constant: float = 0.0
    dim: int = -2
    period: int | None = None
    seed: int = 0
    padding: int = 0
    window: int | None = None
    planted: Planted | None = None


class Layout(NamedTuple):
    """How a view is made from the dense tensor `base`; see `Recipe`."""

    base: tuple[int, ...]
    expanded: tuple[int, ...] | None = None
    transposed: tuple[int, int] | None = None
    strided: Strided | None = None

    @property
    def words(self) -> str:
        """The steps as a reader would name them."""
        if self.strided is not None:
            return f"strides {self.strided.stride}"
        heads = "one head expanded (stride 0)" if self.base[1:2] == (1,) else "expanded (stride 0)"
        steps = [heads] * (self.expanded is not None)
        if self.transposed is not None:
            steps.append(f"transposed {self.transposed}")
        return ", ".join(steps) or "dense"

    @property
    def rank(self) -> int:
        """0 for dense memory, more the harder it is to read."""
        return 4 if self.strided else (self.expanded is not None) + 2 * (self.transposed is not None)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape."""
    return torch.empty(tuple(shape), device="meta").stride()


def layout_of(shape: Sequence[int], stride: Sequence[int], *, exact: bool = False) -> Layout:
    """The simplest steps that give these strides in every dimension larger than 1, or in all when `exact`.

    Example: (1, 2, 33, 8) with strides (264, 0, 8, 1) is `(1, 1, 33, 8)` expanded to `(1, 2, 33, 8)`.
    """
    shape, stride = tuple(shape), tuple(stride)
    base = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    expanded = shape if base != shape else None

    def fits(steps: Sequence[int]) -> bool:
        pairs = zip(shape, stride, steps, strict=True)
        return all(step == given or (size == 1 and not exact) for size, given, step in pairs)

    def expand(steps: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 if one != size else step for one, size, step in zip(base, shape, steps, strict=True))

    if fits(expand(dense_strides(base))):
        return Layout(base, expanded)
    pairs = combinations(range(len(shape)), 2)
    for first, second in sorted(pairs, key=lambda pair: pair != (1, 2)):  # the usual one: (B, L, H, E) in memory
        if fits(expand(_swapped(dense_strides(_swapped(base, first, second)), first, second))):
            swapped = None if expanded is None else _swapped(shape, first, second)
            return Layout(_swapped(base, first, second), swapped, (first, second))
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return Layout((reach,), strided=Strided(shape, stride))


def _swapped(values: Sequence[int], first: int, second: int) -> tuple[int, ...]:
    found = list(values)
    found[first], found[second] = found[second], found[first]
    return tuple(found)


def recipe_of(
    form: Form, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, exact: bool = False
) -> Recipe | None:
    """The form in that shape and layout; None when the form has no meaning there (a square of a flat memory)."""
    layout = layout_of(shape, stride, exact=exact)
    dim, kind, period = form.dim % len(shape), form.kind, form.period
    if layout.strided is not None:
        if kind in (Kind.EYE, Kind.TRIL, Kind.PADDING):
            return None
        if kind is Kind.ARANGE:
            dim, period = 0, period or LONGEST_COUNT
    elif layout.transposed is not None:
        first, second = layout.transposed
        dim = {first: second, second: first}.get(dim, dim)
        if kind in (Kind.EYE, Kind.TRIL, Kind.PADDING) and second >= len(shape) - 2:
            return None
    if kind is Kind.ARANGE and layout.base[dim] == 1 < tuple(shape)[form.dim]:
        return None
    constant = bool(form.constant) if dtype == torch.bool else form.constant
    return Recipe(
        kind,
        layout.base,
        dtype,
        constant=constant,
        dim=dim - len(layout.base) if layout.strided is None else 0,
        period=period,
        seed=form.seed,
        padding=min(form.padding, layout.base[-1] - 1),
        window=form.window,
        planted=_planted(form, tuple(shape), layout),
        expanded=layout.expanded,
        transposed=layout.transposed,
        strided=layout.strided,
    )


def _planted(form: Form, shape: tuple[int, ...], layout: Layout) -> Planted | None:
    """The planted entry, moved inside the shape and expressed in the dense tensor under the layout."""
    if form.planted is None:
        return None
    place = tuple(min(index, size - 1) for index, size in zip(form.planted.place, shape, strict=True))
    if layout.strided is not None:
        flat = sum(index * step for index, step in zip(place, layout.strided.stride, strict=True))
        return Planted((flat,), form.planted.value)
    if layout.transposed is not None:
        place = _swapped(place, *layout.transposed)
    return Planted(tuple(min(p, size - 1) for p, size in zip(place, layout.base, strict=True)), form.planted.value)


def words(form: Form | None, name: str = "") -> str:
    """The form of an argument for people: "zeros", "0, 1, 2, … along S"."""
    if form is None:
        return "captured"
    axes = {"query": "BHLE", "attn_mask": "BHLS"}.get(name, "BHSE")
    number = f"{form.constant:g}" if not isinstance(form.constant, bool) else str(form.constant)
    said = {
        Kind.ZEROS: "zeros",
        Kind.FULL: f"all {number}",
        Kind.ARANGE: f"0, 1, 2, … along {axes[form.dim]}",
        Kind.EYE: "identity",
        Kind.RANDINT: f"seeded eighths (seed {form.seed})",
        Kind.RANDN: f"seeded normal (seed {form.seed})",
        Kind.TRIL: "causal",
        Kind.PADDING: f"first {form.padding} keys hidden",
        Kind.COIN: f"seeded coin flips (seed {form.seed})",
    }[form.kind]
    if form.kind is Kind.TRIL and form.padding:
        said += f", left padding {form.padding}"
    if form.kind is Kind.TRIL and form.window is not None:
        said += f", window {form.window}"
    return said + (f", one entry {form.planted.value:g}" if form.planted else "")
