"""Strides of the same layout family for another shape, and memory laid out by them.

A layout family is what a model's code decides: which dimensions are expanded (stride 0), in which order the
others lie in memory, and which strides come from a larger allocation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sdpa_repro.attention import ALIGNMENT, empty_aligned

LARGEST_PADDING = 64
"""A row that is longer than its elements by less than this is taken as padded to a multiple of a power of two."""

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a view, in elements."""


def restride(
    shape: Sequence[int], stride: Sequence[int], new_shape: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Strides of the same layout family for another shape, and how far its dimensions reach, old and new.

    Walks from the smallest stride outwards. Stride 0 stays. A stride that just steps over what lies inside it is
    recomputed. A larger one comes from a bigger allocation (a static cache) and stays while it fits, then grows to
    a multiple of itself; a row padded to a multiple of a power of two is padded so again.
    """
    old = list(stride)
    for dim, size in enumerate(shape):
        if not old[dim] and size == 1 and new_shape[dim] > 1:  # one position says nothing about its stride
            old[dim] = 1 if dim == len(shape) - 1 else max(1, shape[-1] * stride[-1])
    order = [dim for dim in range(len(shape)) if old[dim]]
    order.sort(key=lambda dim: (old[dim], shape[dim] > 1, shape[dim] == new_shape[dim]))
    fresh, marks, reach, new_reach = list(old), [], 1, 1
    for dim in order:
        if old[dim] == reach:
            fresh[dim] = new_reach
        elif old[dim] > reach != new_reach:
            fresh[dim] = _with_gap(old[dim], reach, new_reach)
        reach = max(reach, old[dim] * shape[dim])
        new_reach = max(new_reach, fresh[dim] * new_shape[dim])
        marks.append((reach, new_reach))
    return tuple(fresh), marks


def allocate(like: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Zeroed memory for one view, its pointer aligned as that of `like`."""
    return laid_out({"": like}, {"": (tuple(shape), tuple(stride), 0)})[""]


def _with_gap(stride: int, reach: int, new_reach: int) -> int:
    step = min(stride & -stride, LARGEST_PADDING)
    if stride - reach < LARGEST_PADDING and -(-reach // step) * step == stride:
        return -(-new_reach // step) * step
    return -(-new_reach // stride) * stride


def moved(offset: int, marks: Sequence[tuple[int, int]]) -> int:
    """Where an element at `offset` lies after the dimensions reach as far as they do now."""
    for reach, new_reach in reversed(marks):
        if 1 < reach <= offset:
            return offset // reach * new_reach + moved(offset % reach, marks)
    return offset


def laid_out(members: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Views of (shape, stride, offset in elements) over one zeroed piece of memory, aligned as the first member is."""
    start = min(members.values(), key=lambda member: member.data_ptr())
    size = start.element_size()
    length = max(offset + _reach(shape, stride) for shape, stride, offset in places.values())
    align = start.data_ptr() % ALIGNMENT // size * size
    flat = empty_aligned(length * size, align, start.device).zero_().view(start.dtype)
    return {
        name: torch.as_strided(flat, shape, stride, flat.storage_offset() + offset)
        for name, (shape, stride, offset) in places.items()
    }


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
