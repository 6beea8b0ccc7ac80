"""Which bytes of a buffer strided views cover: overlap and containment by element, not by address range.

Interleaved views (query, key and value packed in one projection) have overlapping address ranges and share
nothing; `value = key[..., :n]` shares everything. The answer is worked out on a bool mask with one entry per
*unit*: the largest block of bytes that no view cuts, often a whole row, so the mask stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sdpa_repro.attention import overlaps_itself, span_elements
from sdpa_repro.dumping import Refused

MAX_UNITS = 1 << 29
"""Longest mask that is built, in units (one byte each)."""


@dataclass(frozen=True)
class View:
    """A strided view without its memory: `offset` in bytes from the start of a buffer, `stride` in elements."""

    offset: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, start: int) -> View:
        """The view of a tensor in a buffer whose first byte has the address `start`."""
        offset = tensor.data_ptr() - start if tensor.numel() else 0
        return cls(offset, tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def shape_once(self) -> tuple[int, ...]:
        """The shape with expanded (stride-0) dimensions cut to length 1, as `attention.viewed_once` does."""
        return tuple(
            1 if stride == 0 and size > 1 else size for size, stride in zip(self.shape, self.stride, strict=True)
        )

    @property
    def stop(self) -> int:
        """The byte after the last one that the view covers; `offset` when it is empty."""
        return self.offset + span_elements(self._strided) * self.itemsize

    @property
    def tangled(self) -> bool:
        """Whether two indices may reach one element, expanded dimensions aside (`unfold`)."""
        strided = torch.empty_strided(self.shape_once, self.stride, device="meta")
        return bool(self.numel) and overlaps_itself(strided)

    @property
    def _strided(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, device="meta")

    def steps(self) -> list[tuple[int, int]]:
        """The covered bytes as (size, stride in bytes) per dimension, ascending, the first of stride 1.

        Dimensions that continue one another are merged, also those that overlap: sizes n and m with strides
        s and k·s, k ≤ n, reach every multiple of s up to s·(n - 1 + k·(m - 1)). `unfold` becomes one run.
        """
        merged = [(self.itemsize, 1)]
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size <= 1 or stride == 0:
                continue
            step = stride * self.itemsize
            last_size, last_step = merged[-1]
            if step % last_step == 0 and step <= last_size * last_step:
                merged[-1] = (last_size + (size - 1) * (step // last_step), last_step)
            else:
                merged.append((size, step))
        return merged


@dataclass(frozen=True)
class Coverage:
    """The units of the byte range [start, start + unit · len(mask)) and whether some view covers them."""

    mask: Tensor
    unit: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes covered, each counted once."""
        return int(self.mask.count_nonzero()) * self.unit

    @property
    def stop(self) -> int:
        return self.start + self.mask.numel() * self.unit

    def under(self, view: View) -> Tensor:
        """The entries of the mask that lie under a view (one that the coverage was made with)."""
        (run, _), *rest = view.steps()
        sizes = [run // self.unit, *(size for size, _ in rest)]
        strides = [1, *(step // self.unit for _, step in rest)]
        if math.prod(sizes) > 4 * self.mask.numel() + (1 << 24):
            raise Refused("a view reaches each of its elements too many times over")
        return self.mask.as_strided(sizes, strides, (view.offset - self.start) // self.unit)


def blank(views: Iterable[View]) -> Coverage:
    """Room for the views, nothing covered yet. Raises Refused when the mask would be longer than MAX_UNITS."""
    views = [view for view in views if view.numel]
    start = min((view.offset for view in views), default=0)
    stop = max((view.stop for view in views), default=0)
    unit = 0
    for view in views:
        (run, _), *rest = view.steps()
        unit = math.gcd(unit, run, view.offset - start, *(step for _, step in rest))
    unit = unit or 1
    if (stop - start) // unit > MAX_UNITS:
        raise Refused("views that overlap lie too far apart")
    zeros = np.zeros((stop - start) // unit, dtype=np.bool_)  # takes no memory where nothing is written
    return Coverage(torch.from_numpy(zeros), unit, start)


def cover(views: Iterable[View], among: Iterable[View] = ()) -> Coverage:
    """What the views cover, in units that also suit the views in `among`."""
    views = list(views)
    coverage = blank([*views, *among])
    for view in views:
        if view.numel:
            coverage.under(view).fill_(True)
    return coverage


def overlap(one: View, other: View) -> bool:
    """Whether two views share a byte."""
    if not one.numel or not other.numel or one.offset >= other.stop or other.offset >= one.stop:
        return False
    return bool(cover([one], among=[other]).under(other).any())


def contains(outer: View, inner: View) -> bool:
    """Whether every byte of `inner` is one of `outer`; an empty view is contained in any."""
    if not inner.numel:
        return True
    if not outer.numel or inner.offset < outer.offset or inner.stop > outer.stop:
        return False
    return bool(cover([outer], among=[inner]).under(inner).all())


def components(views: Mapping[str, View]) -> list[list[str]]:
    """Names of views that share bytes, directly or through others, grouped; each name once, in the given order.

    Two views too far apart to compare count as separate: both are then stored whole, which costs room only.
    """
    groups: list[list[str]] = []
    for name, view in views.items():
        linked = [group for group in groups if any(_may_share(view, views[member]) for member in group)]
        groups = [group for group in groups if group not in linked]
        groups.append([*(member for group in linked for member in group), name])
    return groups


def _may_share(one: View, other: View) -> bool:
    try:
        return overlap(one, other)
    except Refused:
        return False
