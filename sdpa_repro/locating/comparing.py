"""How far one value of a run is from the same value of another, token by token, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_repro.locating.notes import Value
from sdpa_repro.locating.table import Outcome

FACTOR = 4.0
"""A value is within noise when it moves by no more than this factor of the largest movement under shaking."""


@dataclass(frozen=True)
class Difference:
    """Result for one value. moved, noise: the largest over all tokens; where: the first token beyond, in words."""

    outcome: Outcome
    moved: float | None = None
    noise: float | None = None
    where: str = ""
    detail: str = ""

    @property
    def differs(self) -> bool:
        return self.outcome is Outcome.DIFFERS


def exact(plain: Value, padded: Value) -> Difference:
    """Compare whole numbers or truth values: the count of tokens that differ, and the first of them."""
    one, other = plain.tensor, padded.tensor
    if one.shape != other.shape:
        return _shapes(one, other)
    wrong = (one != other) & ~((one != one) & (other != other))
    if not bool(wrong.any()):
        return Difference(Outcome.EQUAL, 0.0, 0.0)
    axis = plain.axis if plain.axis is not None else 0
    tokens = per_token(wrong.double(), axis)
    first = int(tokens.nonzero()[0])
    place = [int(each) for each in wrong.movedim(axis, 0)[first].reshape(-1).nonzero()[0]]
    values = [tensor.movedim(axis, 0)[first].reshape(-1)[place[0]].item() for tensor in (one, other)]
    count = int((tokens > 0).sum())
    where = f"token {first}: {_number(values[1])} instead of {_number(values[0])}"
    return Difference(Outcome.DIFFERS, float(count), 0.0, where, f"{count} of {len(tokens)} tokens differ")


def visibility(plain: Tensor, padded: Tensor) -> Difference:
    """Compare which keys (columns) each query row may see, both between valid tokens."""
    if plain.shape != padded.shape:
        return _shapes(plain, padded)
    wrong = plain != padded
    if not bool(wrong.any()):
        return Difference(Outcome.EQUAL, 0.0, 0.0)
    row, key = (int(each) for each in wrong.nonzero()[0])
    verb = "sees" if bool(padded[row, key]) else "does not see"
    rows = int(wrong.any(1).sum())
    return Difference(
        Outcome.DIFFERS,
        float(rows),
        0.0,
        f"token {row} {verb} token {key} in the padded run",
        f"{rows} of {wrong.shape[0]} rows differ, in {int(wrong.sum())} entries",
    )


def floats(plain: Value, padded: Value, noise: Tensor | None) -> Difference:
    """Compare floating-point values, each token against what shaking moves it by: `noise` (tokens,)."""
    one, other = plain.tensor, padded.tensor
    if one.shape != other.shape:
        return _shapes(one, other)
    moved = movement(plain, padded)
    if not moved.numel() or float(moved.max()) == 0.0:
        return Difference(Outcome.EQUAL, 0.0, _largest(noise))
    if noise is None or noise.shape != moved.shape:
        return Difference(Outcome.NOT_AVAILABLE, float(moved.max()), None, "", "its noise could not be measured")
    beyond = moved > limit(noise)
    if not bool(beyond.any()):
        return Difference(Outcome.WITHIN_NOISE, float(moved.max()), _largest(noise))
    first = int(beyond.nonzero()[0])
    count = int(beyond.sum())
    return Difference(
        Outcome.DIFFERS,
        float(moved.max()),
        _largest(noise),
        _place(one, other, plain.axis, first),
        f"{count} of {len(moved)} tokens beyond noise" if plain.axis is not None else "",
    )


def limit(noise: Tensor) -> Tensor:
    """What a token may move by: a token that shaking spared by luck is held against the middle one."""
    return FACTOR * torch.maximum(noise, noise.median())


def movement(one: Value, other: Value) -> Tensor:
    """The largest difference of each token (tokens,), float64; NaN on one side only counts as infinite."""
    left, right = one.tensor.double(), other.tensor.double()
    difference = (left - right).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(same, 0.0, difference.nan_to_num(nan=float("inf"), posinf=float("inf")))
    return per_token(difference, one.axis)


def per_token(values: Tensor, axis: int | None) -> Tensor:
    """The largest value of each token (tokens,); without such a dimension one number for all."""
    if axis is None:
        return values.amax().reshape(1) if values.numel() else values.reshape(-1)
    rows = values.movedim(axis, 0)
    return rows.reshape(rows.shape[0], -1).amax(1) if rows.numel() else rows.reshape(rows.shape[0], -1).sum(1)


def worst(differences: Iterable[Difference]) -> Difference:
    """The first that differs; else the loosest of the others, since a stage is equal only when all of it is."""
    listed = list(differences)
    order = (Outcome.DIFFERS, Outcome.WITHIN_NOISE, Outcome.EQUAL, Outcome.NOT_AVAILABLE)
    return min(listed, key=lambda each: order.index(each.outcome))


def _place(one: Tensor, other: Tensor, axis: int | None, first: int) -> str:
    """The token, and the head and channel of its largest difference."""
    if axis is None:
        return ""
    rows = (one.double() - other.double()).abs().nan_to_num(nan=float("inf")).movedim(axis, 0)[first]
    at = torch.unravel_index(rows.reshape(-1).argmax(), rows.shape)
    names = {1: ("channel",), 2: ("head", "channel")}.get(sum(size > 1 for size in rows.shape[:-1]) + 1, ())
    inner = [int(index) for index, size in zip(at, rows.shape, strict=True) if size > 1][-len(names) :] if names else []
    return ", ".join([f"token {first}", *(f"{name} {index}" for name, index in zip(names, inner, strict=False))])


def _shapes(one: Tensor, other: Tensor) -> Difference:
    shapes = f"shape {tuple(other.shape)} instead of {tuple(one.shape)}"
    return Difference(Outcome.DIFFERS, None, None, shapes, "the two runs have different shapes on valid tokens")


def _largest(noise: Tensor | None) -> float | None:
    return float(noise.max()) if noise is not None and noise.numel() else None


def _number(value: float | int | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
