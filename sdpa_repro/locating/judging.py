"""Which rows of a sweep are beyond noise, with the noise taken from the sweep itself.

Padding moves the logits of a healthy model too: another length is another order of summation. How far is measured
twice, by the MATH path over all paddings and by an unpadded run whose results are shaken by one rounding; the
middle of each counts, so that paddings at which something is wrong do not widen it. The distance is the root mean
square over the vocabulary: the largest of thousands of logits says more about the size of the vocabulary.

A path's usual result is the middle of its results over all paddings, entry by entry. A baseline that is itself wrong
is then an outlier like any other; with few paddings the MATH path's unpadded run takes that place. Where most paddings
are far from the middle there is none: the unpadded run is then what they are held against.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.locating.running import Path
from sdpa_repro.locating.sweep import TOP, Row, Sweep

__all__ = ["compared", "judged", "limit", "rms"]

FACTOR = 5.0
"""Beyond noise: more than this times the middle distance over the paddings."""

HALF, SINGLE = 2.0, 16.0
"""The same over the shaken runs. Shaking moves what a module returns by one rounding. That is all that there is in half
precision, where sums inside a module are kept in float32; in float32 itself the roundings of the sums come on top.
"""

ENOUGH = 8
"""So many paddings make a middle."""

TRUSTED = (Path.FLOAT32, Path.MATH, Path.EAGER)
"""Paths whose unpadded run stands in for a poisoned one, the most exact first."""


def judged(
    rows: Sequence[Row],
    prompt: int,
    shaken: Sequence[float],
    dtype: torch.dtype = torch.bfloat16,
    *,
    complete: bool = True,
    notes: Sequence[str] = (),
) -> Sweep:
    """The sweep out of rows that have logits but no judgement.

    shaken: distances (see `rms`) of shaken unpadded runs from the one that was not. dtype: the model's.
    """
    noise = limit(rows, shaken, dtype)
    usual = {path: _right(rows, path, noise) for path in Path}
    beyond = [replace(row, spread=_distance(row, usual[row.path])) for row in rows]
    marked = [replace(row, why=_why(row, _own(noise, row.path, dtype))) for row in beyond]
    baseline = _baseline(marked)
    compared = [_compared(row, marked, baseline) for row in marked]
    return Sweep(tuple(compared), prompt, noise, baseline, complete, tuple(notes))


def rms(one: Tensor, other: Tensor) -> float:
    """Root mean square over the vocabulary of the difference of two logits (B, V), of the row where it is largest.

    Infinite when one of them is not finite.
    """
    distance = (one.double() - other.double()).square().mean(-1).sqrt().max()
    return float(distance) if math.isfinite(float(distance)) else math.inf


def limit(rows: Sequence[Row], shaken: Sequence[float], dtype: torch.dtype) -> float:
    """The distance that rounding explains, in logits; infinite when it was not measured, so that no logits accuse."""
    usual = _usual(rows, Path.MATH)
    runs = [row.logits for row in _alone(rows, Path.MATH) if row.logits is not None]
    spread = [rms(logits, usual) for logits in runs] if usual is not None and len(runs) >= ENOUGH else []
    factor = HALF if dtype.itemsize < 4 else SINGLE
    limits = [times * statistics.median_low(sample) for times, sample in ((FACTOR, spread), (factor, shaken)) if sample]
    return max(limits, default=math.inf)


def _own(noise: float, path: Path, dtype: torch.dtype) -> float:
    """The limit of one path: a float32 copy of a model in half precision has so much less of it."""
    if path is not Path.FLOAT32 or dtype.itemsize >= 4:
        return noise
    return noise * SINGLE / HALF * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps


def _alone(rows: Sequence[Row], path: Path) -> list[Row]:
    return [row for row in rows if row.path is path and not row.companions and row.logits is not None]


def _usual(rows: Sequence[Row], path: Path) -> Tensor | None:
    """What a path usually gives: the middle over the paddings, or without enough of them a trusted unpadded run.

    For eager and float32, which are no suspects, that is their own.
    """
    own = [row.logits for row in _alone(rows, path) if row.logits is not None]
    if len(own) >= ENOUGH:
        return torch.stack(own).nanmedian(0).values
    plain = {row.path: row.logits for trusted in TRUSTED for row in _alone(rows, trusted) if row.pad == 0}
    first = path if path in (Path.EAGER, Path.FLOAT32) else Path.MATH
    return plain.get(first, next(iter(plain.values()), None))


def _right(rows: Sequence[Row], path: Path, noise: float) -> Tensor | None:
    """What rows of a path are held against: what it usually gives, or its unpadded run where most are far from that."""
    usual, plain = _usual(rows, path), _unpadded(rows, path)
    if usual is None or plain is None or plain.logits is None or plain.wrong_calls:
        return usual
    distances = [rms(row.logits, usual) for row in _alone(rows, path) if row.logits is not None]
    scattered = len(distances) >= ENOUGH and statistics.median(distances) > noise
    return plain.logits if scattered else usual


def _distance(row: Row, usual: Tensor | None) -> float | None:
    """The row's distance from what its path usually gives; a companion has its own, from itself alone."""
    if row.logits is None or row.place == "companion":
        return row.spread
    return rms(row.logits, usual) if usual is not None else None


def _unpadded(rows: Sequence[Row], path: Path) -> Row | None:
    """The unpadded run of a path."""
    return next((row for row in _alone(rows, path) if row.pad == 0), None)


def _why(row: Row, noise: float) -> str:
    """Why a row is wrong, "" for one that is not."""
    if row.wrong_calls:
        call = max(row.wrong_calls, key=lambda call: call.ratio)
        return f"{call.kernel} is wrong in {call.module}"
    if row.inputs_differ:
        return f"{row.inputs_differ[0]} differs"
    if row.spread is not None and row.spread > noise:
        return "logits beyond noise"
    return ""


def _baseline(rows: Sequence[Row]) -> Path:
    """The path whose unpadded run is to be compared with: the default one unless it is wrong."""
    plain = {row.path: row for path in Path for row in _alone(rows, path) if row.pad == 0}
    default = plain.get(Path.DEFAULT)
    if default is None or not default.flagged:
        return Path.DEFAULT
    return next(
        (path for path in (Path.MATH, Path.FLOAT32, Path.EAGER) if path in plain and not plain[path].flagged), Path.MATH
    )


def _compared(row: Row, rows: Sequence[Row], baseline: Path) -> Row:
    """The row with its distance from the unpadded run of its own path, or of `baseline` for the default path."""
    against = baseline if row.path is Path.DEFAULT else row.path
    plain = _unpadded(rows, against)
    if row.logits is None or plain is None or plain.logits is None or row.place == "companion":
        return row
    return compared(row, plain.logits, against.value)


def compared(row: Row, plain: Tensor, against: str) -> Row:
    """The row with what its logits say beside others (B, V) of the same prompt."""
    if row.logits is None:
        return row
    moved = (row.logits - plain).abs()
    at = int(moved.amax(-1).nan_to_num(nan=math.inf).argmax())  # the row of the batch that moved most
    return replace(
        row,
        against=against,
        max_abs=float(moved.max()),
        mean_abs=float(moved[at].mean()),
        argmax_flipped=bool((row.logits.argmax(-1) != plain.argmax(-1)).any()),
        top5_plain=_top(plain[at]),
        top5=_top(row.logits[at]),
    )


def _top(logits: Tensor) -> tuple[int, ...]:
    """The likeliest tokens of logits (V,); of equal ones the smallest id first, as `argmax` has it, not `topk`."""
    order = logits.sort(descending=True, stable=True).indices
    return tuple(order[:TOP].tolist())
