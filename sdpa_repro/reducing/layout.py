"""Passes that bring the memory layout to what a reader sees at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sdpa_repro.attention import is_rule
from sdpa_repro.explaining.placing import placed
from sdpa_repro.reducing.candidate import INPUTS, Candidate, loosened, relaid
from sdpa_repro.reducing.forms import dense_strides
from sdpa_repro.reducing.reducer import Clues


def apart(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """Each tensor in memory of its own, aligned as a new tensor is: value no longer a view of key."""
    names = tuple(name for name, tensor in candidate.call.tensors.items() if not is_rule(tensor))
    yield replace(candidate, call=placed(candidate.call, align=0, apart=names))
    yield replace(candidate, call=placed(candidate.call, align=0))
    yield replace(candidate, call=placed(candidate.call, apart=names))


def loose(candidate: Candidate) -> Candidate:
    """The call with ordinary strides in dimensions of size 1, where a view may have any."""
    return loosened(candidate)


def layout(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """All dense; key and value dense; each dense; then the same order of dimensions without gaps.

    Query strides (2367488, 512, 8192, 1) of a cache become those of `.transpose(1, 2)`.
    """
    tensors = [name for name, tensor in candidate.call.tensors.items() if not is_rule(tensor)]
    groups: list[Sequence[str]] = [tensors, INPUTS, ("key", "value"), *((name,) for name in tensors)]
    for names in groups:
        yield from _relaid(candidate, {name: dense_strides(candidate.call.tensors[name].shape) for name in names})
    for names in groups:
        strides = {}
        for name in names:
            tensor = candidate.call.tensors[name]
            strides[name] = tight(tensor.shape, tensor.stride())
        yield from _relaid(candidate, strides)


def _relaid(candidate: Candidate, strides: dict[str, tuple[int, ...]]) -> Iterator[Candidate]:
    found: Candidate | None = candidate
    for name, stride in strides.items():
        if found is not None and found.call.tensors[name].stride() != stride:
            found = relaid(found, name, stride)
    if found is not None and found is not candidate:
        yield found


def tight(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides in the same order of dimensions without gaps; repeated dimensions stay repeated."""
    fresh, reach = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        if stride[dim]:
            fresh[dim] = reach
            reach *= shape[dim]
    return tuple(fresh)
