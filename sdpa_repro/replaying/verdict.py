"""From errors to a status: what rounding can explain, row by row, and what it cannot.

A row (batch, head, query position) is judged by its largest and its root-mean-square error over Ev
against the float64 reference. The threshold of a row is the largest of

* a floor from first principles: rounding of the output, of the softmax weights, of the sums and of the
  scores, each with its own scale (`reference.RowScale`);
* 5 times the error MATH makes in that row, 2 times the error of the explicit formula, both in the same
  dtype: PyTorch's and FlashAttention's own tests use these factors (test_transformers.py, fudge factors 4 to
  5; flash_attn tests, 2 times the error in the low precision), over whole tensors where this is per row.

A path never supplies its own noise, and noise beyond what rounding can explain is dropped. The constants
are measured by `make calibrate` (docs/calibration.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import log, sqrt

import torch
from torch import Tensor

from sdpa_repro.replaying.reference import Reference
from sdpa_repro.replaying.tiles import RowScale

NOISE_FACTOR = {"MATH": 5.0, "eager": 2.0}
"""How much larger than another path's error in the same row an error may be."""

OUT, WEIGHTS, SUMS, SCORES = 2.0, 4.0, 16.0, 8.0
"""Floor: multiples of the unit roundoff for output, softmax weights, accumulated sums and scores."""

ROUNDED = 4.0
"""Floor of the explicit formula: multiples of the unit roundoff for scores that are rounded to the dtype."""

DRIFT = 0.5
"""Floor: roundoffs per key by which a long sum of like-signed terms drifts, relative to the output."""

EXPLAINED = 4.0
"""Noise of another path above this multiple of its own floor is not rounding and is dropped."""


class Status(str, Enum):
    """What became of one cell of the replay table."""

    AGREES = "agrees"
    DIVERGES = "diverges"
    NONFINITE = "nonfinite"
    DECLINED = "declined"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    UNSTABLE = "unstable"
    NOT_COMPARABLE = "not_comparable"
    ERROR = "error"


class Verdict(str, Enum):
    """What the captured dtype's cells say together."""

    BACKEND_WRONG = "backend_wrong"
    EAGER_WRONG = "eager_wrong"
    HEALTHY = "healthy"
    UNREPRODUCIBLE = "unreproducible"
    INVALID_CALL = "invalid_call"


@dataclass(frozen=True)
class RowErrors:
    """One path's errors against the reference; every field (B, H, L)."""

    max_abs: Tensor
    """Largest |output − reference| over Ev, float64; 0 where only `finite` speaks."""
    rms: Tensor
    finite: Tensor
    """False where the output has NaN or Inf and the reference is finite in that dtype, or the reverse."""


@dataclass(frozen=True)
class Bad:
    """Where a path is wrong: sorted indices, and the worst position (batch, head, row)."""

    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    count: int
    worst: tuple[int, int, int]


@dataclass(frozen=True)
class Judgement:
    """Status of one output, with the numbers of the row that decides (largest error over threshold)."""

    status: Status
    max_abs: float
    threshold: float
    ratio: float
    bad: Bad | None
    rows: int
    """How many rows were able to decide."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`: half of its machine epsilon."""
    return float(torch.finfo(dtype).eps) / 2


def row_errors(output: Tensor, reference: Reference) -> RowErrors:
    """Compare an output (B, H, L, Ev; batch dimensions as in the call) with the reference, head by head."""
    expected = reference.output
    shaped = output.detach().reshape(expected.shape).to(expected.device)
    max_abs = torch.zeros(expected.shape[:-1], dtype=torch.float64, device=expected.device)
    rms, finite = torch.zeros_like(max_abs), torch.ones_like(max_abs, dtype=torch.bool)
    for batch in range(expected.shape[0]):
        for head in range(expected.shape[1]):
            here = (batch, head)
            max_abs[here], rms[here], finite[here] = compare(shaped[here], expected[here])
    return RowErrors(max_abs, rms, finite)


def compare(output: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of rows (…, Ev) in the captured dtype against the reference: max, RMS, finite; each (…)."""
    if output.shape[-1] == 0:
        zero = torch.zeros(output.shape[:-1], dtype=torch.float64, device=output.device)
        return zero, zero, torch.ones_like(zero, dtype=torch.bool)
    difference = (output.to(expected.dtype) - expected).abs_()
    largest = difference.amax(-1)
    rms = torch.linalg.vector_norm(difference, dim=-1) * output.shape[-1] ** -0.5
    finite = torch.ones_like(largest, dtype=torch.bool)
    odd = ~rms.isfinite()
    if bool(odd.any()):
        largest[odd], rms[odd], finite[odd] = _compare_nonfinite(output[odd], expected[odd])
    return largest.double(), rms.double(), finite


def _compare_nonfinite(output: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`compare` for rows (n, Ev) with NaN or Inf on either side, or errors whose squares are infinite.

    What does not fit the dtype may be infinite.
    """
    fits = expected.abs() <= torch.finfo(output.dtype).max * (1 - unit_roundoff(output.dtype) * 8)
    wrong = (fits & ~output.isfinite()).any(-1) | (expected.isnan().any(-1) & output.isfinite().all(-1))
    difference = torch.where(fits & output.isfinite(), output.double() - expected.double(), 0.0).abs()
    rms = difference.square().mean(-1).sqrt()
    return difference.amax(-1).to(expected.dtype), rms.to(expected.dtype), ~wrong


@dataclass(frozen=True)
class Factors:
    """What each sum of a `RowScale` contributes to the floor; `constant` is there whatever they are."""

    size: float
    spread: float
    weight: float
    scores: float
    rounded: float
    constant: float


def floor(scale: RowScale, dtype: torch.dtype, path: str = "") -> Tensor:
    """Error that rounding explains in each row of a path that computes in `dtype`, shape as in `scale`."""
    factors = floor_factors(dtype, scale.keys, path)
    return (
        factors.size * scale.size
        + factors.spread * scale.spread
        + factors.weight * scale.weight
        + factors.scores * scale.scores
        + factors.rounded * scale.rounded
        + factors.constant
    )


def floor_factors(dtype: torch.dtype, keys: int, path: str = "") -> Factors:
    """The factors of `floor` for rows of `keys` positions.

    Kernels and MATH keep scores and sums in float32 (float64 for float64). The explicit formula ("eager")
    rounds the scores themselves to `dtype` several times over.
    """
    roundoff = unit_roundoff(dtype)
    accumulate = roundoff if dtype == torch.float64 else unit_roundoff(torch.float32)
    rounded = roundoff if path == "eager" else 0.0
    subnormal = float(torch.finfo(dtype).smallest_normal) * float(torch.finfo(dtype).eps)
    return Factors(
        size=OUT * roundoff + DRIFT * accumulate * keys,
        spread=WEIGHTS * roundoff,
        weight=SUMS * accumulate,
        scores=SCORES * accumulate,
        rounded=ROUNDED * rounded,
        constant=OUT * subnormal,
    )


def rms_share(width: int) -> float:
    """Share of a row's threshold that its root-mean-square error may reach: 1 for one column, less for many.

    Of `width` independent roundings the largest is about sqrt(2·ln width) standard deviations.
    """
    return 1.0 / sqrt(max(1.0, log(max(width, 1))))


def thresholds(
    reference: Reference, dtype: torch.dtype, path: str, noise: Mapping[str, RowErrors]
) -> tuple[Tensor, Tensor]:
    """Per-row thresholds (B, H, L) for the largest and the RMS error of `path`.

    `noise`: row errors of "MATH" and "eager" in the same dtype; an entry for `path` itself is ignored.
    """
    base = floor(reference.scale, dtype, path)
    largest, rms = base, base * rms_share(reference.output.shape[-1])
    for name, errors in noise.items():
        if name == path:
            continue
        explained = errors.finite & (errors.max_abs <= EXPLAINED * floor(reference.scale, dtype, name))
        largest = torch.maximum(largest, torch.where(explained, NOISE_FACTOR[name] * errors.max_abs, 0.0))
        rms = torch.maximum(rms, torch.where(explained, NOISE_FACTOR[name] * errors.rms, 0.0))
    return largest, rms


def judge(
    errors: RowErrors,
    reference: Reference,
    dtype: torch.dtype,
    path: str,
    noise: Mapping[str, RowErrors] | None = None,
) -> Judgement:
    """Status of one path's output from its row errors: agrees, diverges or nonfinite.

    `path` is a backend's name or "eager". Rows that are fully masked or poisoned never decide.
    """
    largest, rms = thresholds(reference, dtype, path, noise or {})
    decides = reference.decides
    if not bool(decides.any()):
        return Judgement(Status.AGREES, 0.0, 0.0, 0.0, None, 0)
    ratio = torch.maximum(ratio_of(errors.max_abs, largest), ratio_of(errors.rms, rms))
    ratio = torch.where(errors.finite, ratio, float("inf"))
    ratio = torch.where(decides, ratio, -1.0)
    wrong = ratio > 1.0
    at = int(ratio.argmax())
    worst = tuple(int(index) for index in torch.unravel_index(torch.tensor(at), ratio.shape))
    nonfinite = bool((decides & ~errors.finite).any())
    status = Status.NONFINITE if nonfinite else Status.DIVERGES if bool(wrong.any()) else Status.AGREES
    return Judgement(
        status=status,
        max_abs=float("nan") if nonfinite else float(errors.max_abs.flatten()[at]),
        threshold=float(largest.flatten()[at]),
        ratio=float(ratio.flatten()[at]),
        bad=_where(wrong, (worst[0], worst[1], worst[2])) if bool(wrong.any()) else None,
        rows=int(decides.sum()),
    )


def ratio_of(error: Tensor, threshold: Tensor) -> Tensor:
    """error / threshold with 0 / 0 = 0 (an exact row with nothing to round)."""
    return torch.where(error == 0, 0.0, error / threshold)


def _where(wrong: Tensor, worst: tuple[int, int, int]) -> Bad:
    """Indices at which any row is wrong, along each dimension."""

    def along(*others: int) -> tuple[int, ...]:
        return tuple(int(index) for index in wrong.any(others[0]).any(others[1]).nonzero().flatten())

    return Bad(
        batches=along(2, 1),
        heads=along(2, 0),
        rows=along(0, 0),
        count=int(wrong.sum()),
        worst=worst,
    )
