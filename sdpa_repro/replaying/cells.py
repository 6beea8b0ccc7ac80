"""One cell of the replay table: what a worker reported about one backend in one dtype, judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, viewed_once
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.comparable import Values
from sdpa_repro.replaying.reference import Reference, four_dims
from sdpa_repro.replaying.verdict import Bad, Judgement, RowErrors, Status, judge, row_errors, thresholds
from sdpa_repro.replaying.worker import Outcome
from sdpa_repro.visibility import ranges

FAILED = {
    "declined": Status.DECLINED,
    "memory": Status.DECLINED,
    "error": Status.ERROR,
    "crashed": Status.CRASHED,
    "timeout": Status.TIMEOUT,
    "unstable": Status.UNSTABLE,
}
"""Outcome kinds of a worker that bring no output, and the cell status each becomes."""

SWALLOWED = "is finite where the definition gives NaN"
"""The reason of a cell that is `nonfinite` the other way round."""

LISTED = 64
"""Longest list of indices in a document; longer ones become ranges."""

LOOKED_AT = 4096
"""Fully masked or poisoned rows looked at."""


@dataclass(frozen=True)
class Cell:
    """One backend in one dtype. Errors and thresholds are those of the worst row (None without an output)."""

    backend: str
    dtype: str
    status: Status
    reason: str = ""
    max_abs: float | None = None
    threshold: float | None = None
    ratio: float | None = None
    bad: Bad | None = None
    fully_masked: str | None = None
    """What it leaves in fully masked rows: "0", "NaN", "mean of value", "other" or a mixture; None without such."""
    poisoned: str | None = None
    """What it leaves in rows that can see NaN or Inf in masked-out positions: "finite", "NaN or Inf", "both"."""
    runs: int = 0
    bit_stable: bool | None = None
    seconds: float | None = None
    chosen: str | None = None
    """The kernel that the default path took."""
    remark: str = ""

    @property
    def kernel(self) -> str:
        """The kernel that ran: for the default path the one it chose."""
        known = self.backend == Backend.DEFAULT.value and self.chosen not in (None, "unknown")
        return str(self.chosen) if known else self.backend

    @property
    def wrong(self) -> bool:
        """Whether this path failed on a call that it took."""
        return self.status in (
            Status.DIVERGES,
            Status.NONFINITE,
            Status.UNSTABLE,
            Status.CRASHED,
            Status.TIMEOUT,
            Status.ERROR,
        )

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable (DESIGN section 9)."""
        return {
            "backend": self.backend,
            "dtype": self.dtype,
            "status": self.status.value,
            "reason": self.reason,
            "max_abs": self.max_abs,
            "threshold": self.threshold,
            "ratio": self.ratio,
            "bad": None if self.bad is None else bad_document(self.bad),
            "fully_masked": self.fully_masked,
            "poisoned": self.poisoned,
            "runs": self.runs,
            "bit_stable": self.bit_stable,
            "seconds": self.seconds,
            "chosen": self.chosen,
            "remark": self.remark,
        }


def bad_document(bad: Bad) -> dict[str, Any]:
    """Where a path is wrong: `batches`, `heads`, `rows` as indices, or as [first, last] pairs beyond 64 of them."""
    return {
        "batches": _listed(bad.batches),
        "heads": _listed(bad.heads),
        "rows": _listed(bad.rows),
        "count": bad.count,
        "worst": list(bad.worst),
    }


def _listed(indices: Sequence[int]) -> list[Any]:
    return list(indices) if len(indices) <= LISTED else [list(pair) for pair in ranges(indices)]


def judged(
    cell: Cell,
    outcome: Outcome,
    saved: Path,
    errors: RowErrors | None,
    values: Values,
    noise: Mapping[str, RowErrors],
) -> Cell:
    """Fill `cell` from a job's outcome and the row errors of its output, saved in `saved`.

    `noise`: row errors of MATH and eager in this dtype; the cell's own are ignored.
    """
    answer = outcome.answer
    cell = replace(
        cell,
        chosen=answer.get("chosen"),
        remark=str(answer.get("remark", "")),
        reason=outcome.reason,
        runs=int(answer.get("runs") or 0),
        bit_stable=answer.get("bit_stable"),
        seconds=answer.get("seconds"),
    )
    if outcome.kind in FAILED:
        return replace(cell, status=FAILED[outcome.kind])
    expected = values.reference
    if expected is None:
        return replace(cell, status=Status.NOT_COMPARABLE, reason=values.why)
    outputs = load_outputs(saved)
    if errors is None:
        shape = tuple(outputs["first"].shape)
        return replace(cell, status=Status.ERROR, reason=f"an output of shape {shape} for a call of another")
    first = outputs["first"]
    judgement = judge(errors, expected, first.dtype, cell.kernel, noise)
    cell = replace(
        with_judgement(cell, judgement),
        fully_masked=left_in_masked(first, expected, values.call),
        poisoned=left_in_poisoned(first, expected),
    )
    if judgement.status is Status.NONFINITE and judgement.bad is not None:
        swallowed = bool(expected.output[judgement.bad.worst].isnan().any())
        cell = replace(cell, reason=SWALLOWED if swallowed else cell.reason)
    if cell.remark.startswith("emulated"):
        return replace(cell, status=Status.AGREES, bad=None)
    if "other" in outputs:
        return _compared(cell, judgement, first, outputs["other"], expected, noise)
    return cell


def with_judgement(cell: Cell, judgement: Judgement) -> Cell:
    """The cell with a judgement's numbers."""
    return replace(
        cell,
        status=judgement.status,
        max_abs=judgement.max_abs,
        threshold=judgement.threshold,
        ratio=judgement.ratio,
        bad=judgement.bad,
    )


def load_outputs(path: Path) -> dict[str, Tensor]:
    """The tensors a worker saved: `first`, and `other` when runs differed."""
    found: dict[str, Tensor] = torch.load(path, weights_only=True, mmap=True)
    return found


def _compared(
    cell: Cell,
    judgement: Judgement,
    first: Tensor,
    other: Tensor,
    expected: Reference,
    noise: Mapping[str, RowErrors],
) -> Cell:
    """Two runs gave different bits: `unstable` when that is more than noise, a remark otherwise.

    More than noise: one run is right and the other wrong, or both are wrong and differ in some row by more
    than its threshold.
    """
    second = judge(row_errors(other, expected), expected, other.dtype, cell.kernel, noise)
    shape = expected.output.shape
    gap = _gap(first.reshape(shape).double(), other.reshape(shape).double())
    apart = gap.amax(-1).to(expected.output.device) if shape[-1] else torch.zeros(shape[:-1])
    largest, _ = thresholds(expected, other.dtype, cell.kernel, noise)
    widest = float(torch.where(expected.decides, apart, 0.0).max())
    beyond = bool((expected.decides & (apart > largest)).any())
    right = (judgement.status is Status.AGREES, second.status is Status.AGREES)
    if right[0] != right[1] or (not right[0] and beyond):
        worse = second if right[0] else judgement
        reason = f"runs differ by {widest:.3g}"
        return replace(with_judgement(cell, worse), status=Status.UNSTABLE, reason=reason)
    remark = f"bits differ from run to run (by {widest:.3g}, within noise)"
    return replace(cell, remark="; ".join(filter(None, (cell.remark, remark))))


def _gap(one: Tensor, other: Tensor) -> Tensor:
    """Distance of two runs entry by entry: 0 where both are NaN or the same infinity, infinite where one is NaN."""
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().nan_to_num(math.inf, math.inf).masked_fill_(same, 0.0)


def left_in_masked(output: Tensor, expected: Reference, call: AttentionCall) -> str | None:
    """What fully masked rows hold, in a word; None when there are no such rows."""
    rows = (~expected.live).nonzero()[:LOOKED_AT]
    if not len(rows) or not output.numel():
        return None
    batch, head, row = rows.T.cpu()
    values = output.reshape(expected.output.shape)[batch, head, row].double()
    flat = four_dims(call)
    if flat.value.shape[1] != flat.query.shape[1]:
        head = head // (flat.query.shape[1] // flat.value.shape[1])
    mean = viewed_mean(flat.value)[batch, head].to(values.device)
    nan = values.isnan().any(-1)
    zero = (values == 0).all(-1)
    slack = 16 * torch.finfo(output.dtype).eps
    average = (values - mean).abs().amax(-1) <= slack * (1 + mean.abs().amax(-1))
    words = []
    for word, where in (("0", zero), ("NaN", nan & ~zero), ("mean of value", average & ~zero & ~nan)):
        if bool(where.any()):
            words.append(word)
    if not bool((zero | nan | average).all()):
        words.append("other")
    return ", ".join(words)


def viewed_mean(value: Tensor) -> Tensor:
    """Mean over positions, (B, Hkv, Ev) float64 on the CPU; expanded heads are averaged once."""
    narrow = viewed_once(value)
    mean = narrow.double().mean(-2).cpu()
    return mean.expand(*value.shape[:2], value.shape[-1])


def left_in_poisoned(output: Tensor, expected: Reference) -> str | None:
    """Whether rows that can see NaN or Inf in masked-out positions came out finite; None without such rows."""
    rows = (expected.poisoned & expected.live).nonzero()[:LOOKED_AT]
    if not len(rows):
        return None
    batch, head, row = rows.T.cpu()
    finite = output.reshape(expected.output.shape)[batch, head, row].isfinite().all(-1)
    if bool(finite.all()):
        return "finite"
    return "both" if bool(finite.any()) else "NaN or Inf"
