"""Passes that bring query, key and value to closed forms, and the call's flags to their defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.recipe import Kind, Planted
from sdpa_repro.reducing.candidate import INPUTS, Candidate, formed
from sdpa_repro.reducing.forms import Form
from sdpa_repro.reducing.reducer import Clues

ZEROS, ONES = Form(Kind.ZEROS), Form(Kind.FULL, constant=1.0)
POSITIONS, HEADS = Form(Kind.ARANGE, dim=-2), Form(Kind.ARANGE, dim=-3)
EYE = Form(Kind.EYE)
PLANTS = 3
"""Largest captured entries that are tried as the one that matters."""

SEEDS = 4


def values(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """All three tensors at once, plain ones first; then each by itself.

    Zero query and key weigh every visible key the same, and a value that counts positions shows which were seen.
    """
    for forms in _together(candidate, clues):
        yield from _formed(candidate, forms)
    for name in INPUTS:
        for form in _alone(candidate, name, clues):
            yield from _formed(candidate, {name: form})
    for name in INPUTS:
        for planted in _plants(candidate, name):
            rest = {other: _seeded(other, clues.seed) for other in INPUTS if other != name}
            yield from _formed(candidate, {name: planted, **rest})
            yield from _formed(candidate, {name: planted})


def _formed(candidate: Candidate, forms: dict[str, Form]) -> Iterator[Candidate]:
    found = formed(candidate, forms)
    if found is not None:
        yield found


def _together(candidate: Candidate, clues: Clues) -> Iterator[dict[str, Form]]:
    """Query, key and value in closed form, simplest first."""
    plain = [(ZEROS, ZEROS, ZEROS), (ZEROS, ZEROS, ONES), (ZEROS, ZEROS, POSITIONS), (ZEROS, ZEROS, HEADS)]
    for query, key, value in plain:
        yield {"query": query, "key": key, "value": value}
    for constant, sign in _extremes(candidate.call, clues):
        query, key = Form(Kind.FULL, constant=constant), Form(Kind.FULL, constant=sign * constant)
        for value in (ONES, POSITIONS):
            yield {"query": query, "key": key, "value": value}
    for seed in range(clues.seed, clues.seed + SEEDS):
        seeded = {name: _seeded(name, seed) for name in INPUTS}
        yield {**seeded, "value": POSITIONS}
        yield seeded
    for seed in range(clues.seed, clues.seed + SEEDS):
        yield {name: replace(_seeded(name, seed), kind=Kind.RANDN) for name in INPUTS}


def _seeded(name: str, seed: int) -> Form:
    """Seeded eighths, other ones for each tensor."""
    return Form(Kind.RANDINT, seed=3 * seed + "qkv".index(name[0]))


def _alone(candidate: Candidate, name: str, clues: Clues) -> Iterator[Form]:
    """Forms for one tensor, simplest first."""
    here = candidate.forms.get(name)
    if here is not None and here.planted is not None:
        yield replace(here, kind=Kind.ZEROS)
    yield from (ZEROS, ONES, POSITIONS, HEADS)
    yield from (Form(Kind.FULL, constant=constant) for constant in _constants(candidate.call, name))
    yield EYE
    yield from (_seeded(name, seed) for seed in range(clues.seed, clues.seed + SEEDS))
    yield replace(_seeded(name, clues.seed), kind=Kind.RANDN)


def _constants(call: AttentionCall, name: str) -> list[float]:
    """Whole numbers like the captured ones: the mean, the largest and the smallest, away from 0."""
    tensor = call.tensors[name]
    finite = tensor[tensor.isfinite()].double()
    if not finite.numel():
        return []
    found = [float(finite.mean()), float(finite.max()), float(finite.min())]
    whole = [float(math.ceil(value) if value > 0 else math.floor(value)) for value in found if abs(value) < 1e4]
    return [value for value in dict.fromkeys(whole) if value not in (0.0, 1.0)]


def _extremes(call: AttentionCall, clues: Clues) -> Iterator[tuple[float, int]]:
    """c and a sign such that query = c and key = ±c give the lowest or the highest score that was captured."""
    share = call.query.shape[-1] * abs(call.softmax_scale)
    for score in (clues.low, clues.high):
        if abs(score) > 1 and share:
            yield float(math.ceil(math.sqrt(abs(score) / share))), 1 if score > 0 else -1


def _plants(candidate: Candidate, name: str) -> Iterator[Form]:
    """Zeros or seeded values with one entry like the largest captured ones, a whole number where it was."""
    tensor = candidate.call.tensors[name]
    if name in candidate.forms or not tensor.numel():
        return
    sizes = tensor.detach().float().abs().nan_to_num(0.0, posinf=0.0)
    for flat in sizes.flatten().topk(min(PLANTS, sizes.numel())).indices.tolist():
        place = tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), tensor.shape))
        value = float(tensor[place])
        if not math.isfinite(value):  # all others are zero
            continue
        planted = Planted(place, float(math.ceil(value) if value > 0 else math.floor(value)))
        yield Form(Kind.ZEROS, planted=planted)
        yield replace(_seeded(name, 0), planted=planted)


def flags(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """`scale`, `enable_gqa` and `is_causal` at their defaults, all together and one by one."""
    call = candidate.call
    changes: list[dict[str, object]] = []
    if call.scale is not None:
        changes.append({"scale": None})
    if call.enable_gqa and call.query.shape[-3] == call.key.shape[-3]:
        changes.append({"enable_gqa": False})
    if call.is_causal:
        changes.append({"is_causal": False})
    together: dict[str, object] = {name: value for change in changes for name, value in change.items()}
    for change in [together, *changes]:
        if change:
            yield replace(candidate, call=replace(call, **change))  # type: ignore[arg-type]
