"""How wrong every query row of every head is: the error over its threshold, packed small enough for a page.

The numbers are those of `replay`: the kernel runs in a worker process, so one that crashes leaves a sentence instead
of a picture, and each row is held against the same threshold. A byte a row is kept, on a logarithmic scale.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sdpa_repro.dump import Dump
from sdpa_repro.replaying.backends import Backend, missing_reason
from sdpa_repro.replaying.cells import load_outputs
from sdpa_repro.replaying.comparable import values_of
from sdpa_repro.replaying.verdict import RowErrors, ratio_of, row_errors, thresholds
from sdpa_repro.replaying.worker import Worker
from sdpa_repro.visibility import ranges

MASKED, UNDECIDED, FIRST, LIMIT, NONFINITE = 0, 1, 3, 99, 255
"""Codes: a fully masked row, one that cannot decide, the smallest ratio, a ratio of exactly 1, NaN or infinity."""

PER_DECADE = 32
"""Codes to a factor of ten."""

MOST_CELLS, MOST_PLANES = 1 << 19, 1 << 12
"""Rows kept (of more, the worst of each stretch is) and (batch, head) pairs kept (of more, the worst are)."""

LISTED = 60
"""Groups of wrong rows that are listed."""

LOOKED_AT = 1 << 12
"""Wrong query rows that the groups are made of, the worst of them."""

SECONDS = 120.0
"""For one kernel; it has run in a replay before."""


@dataclass(frozen=True)
class BadRows:
    """Query rows [first, last] of one batch entry that are wrong in the same heads. worst: (head, row) in it."""

    batch: int
    first: int
    last: int
    heads: tuple[int, ...]
    ratio: float
    max_abs: float
    worst: tuple[int, int]


@dataclass(frozen=True)
class Heat:
    """Error over threshold of `backend` in every row. `codes` is None, and `missing` says why, without an output.

    codes: uint8 (planes, columns), each column the worst of `step` query rows. planes: batch · heads + head of each.
    bad: groups of wrong rows in order, `left_out` of them not listed; `wrong` of `judged` rows are wrong.
    """

    backend: str
    batches: int = 0
    heads: int = 0
    rows: int = 0
    step: int = 1
    codes: Tensor | None = None
    planes: tuple[int, ...] = ()
    bad: tuple[BadRows, ...] = ()
    left_out: int = 0
    wrong: int = 0
    judged: int = 0
    highest: float = 0.0
    missing: str = ""


def heat(
    dump: Dump,
    backend: Backend,
    *,
    device: str = "cpu",
    preload: Sequence[str | Path] = (),
    worker: Worker | None = None,
    timeout: float = SECONDS,
) -> Heat:
    """Run `backend` on the dump's call once more and hold every row against its threshold.

    worker: one to use and leave running; its preloads then count. Memory is that of a replay: the float64 reference
    of one output. Raises InputError for a bad preload.
    """
    if dump.path is None:
        return Heat(backend.value, missing="the call is not in a file")
    place = torch.device(device)
    values = values_of(dump, "captured", place, None)
    expected = values.reference
    if expected is None:
        return Heat(backend.value, missing=values.why)
    found: dict[Backend, RowErrors] = {}
    path, dtype = backend.value, dump.call.query.dtype
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sdpa-repro-"))
        worker = worker or stack.enter_context(Worker(preload))
        for one in dict.fromkeys((Backend.MATH, Backend.EAGER, backend)):
            if missing_reason(one, place.type):
                continue
            saved = Path(folder) / f"{one.value}.pt"
            job = {"do": "cell", "dump": str(dump.path.resolve()), "device": device, "dtype": "captured"}
            outcome = worker.request({**job, "backend": one.value, "runs": 1, "output": str(saved)}, timeout)
            if one is backend and outcome.kind != "done":
                return Heat(backend.value, missing=_no_output(backend, outcome.kind, outcome.reason))
            if outcome.kind == "done" or outcome.answer.get("noise_only"):
                output = load_outputs(saved)["first"]
                found[one] = row_errors(output, expected)
                if one is backend:
                    dtype, chosen = output.dtype, outcome.answer.get("chosen")
                    path = str(chosen) if backend is Backend.DEFAULT and chosen not in (None, "unknown") else path
    if backend not in found:
        return Heat(backend.value, missing=_no_output(backend, "declined", missing_reason(backend, place.type) or ""))
    noise = {one.value: found[one] for one in (Backend.MATH, Backend.EAGER) if one in found}
    largest, rms = thresholds(expected, dtype, path, noise)
    errors = found[backend]
    ratio = torch.maximum(ratio_of(errors.max_abs, largest), ratio_of(errors.rms, rms))
    ratio = torch.where(errors.finite, ratio, math.inf)
    return packed(backend.value, ratio, errors.max_abs, live=expected.live, decides=expected.decides)


def _no_output(backend: Backend, kind: str, reason: str) -> str:
    """Why there is nothing to draw, as a sentence without its full stop."""
    what = {"crashed": "ends the process", "timeout": "does not return", "declined": "does not take this call"}
    said = what.get(kind, "gives no output")
    return f"{backend.value} {said}{f' ({reason})' if reason else ''}: there is no output to draw"


def packed(backend: str, ratio: Tensor, max_abs: Tensor, *, live: Tensor, decides: Tensor) -> Heat:
    """A `Heat` from ratios and largest errors, (B, H, L) float64, and bool `live` and `decides` of the reference.

    A ratio is infinite where the output is NaN and should not be, or the reverse.
    """
    ratio, max_abs, live, decides = (tensor.cpu() for tensor in (ratio, max_abs, live, decides))
    batches, heads, rows = ratio.shape
    if not ratio.numel():
        return Heat(backend, batches, heads, rows, missing="the output is empty")
    codes = encoded(ratio)
    codes[~decides] = UNDECIDED
    codes[~live] = MASKED
    codes = codes.reshape(batches * heads, rows)
    planes = tuple(range(len(codes)))
    if len(codes) > MOST_PLANES:
        worst = codes.amax(1).to(torch.int16).argsort(descending=True, stable=True)
        planes = tuple(sorted(worst[:MOST_PLANES].tolist()))
        codes = codes[list(planes)]
    step = max(1, -(-codes.numel() // MOST_CELLS))
    ratio = torch.where(decides, ratio, 0.0)
    bad, left_out = _bad_rows(ratio, max_abs)
    return Heat(
        backend=backend,
        batches=batches,
        heads=heads,
        rows=rows,
        step=step,
        codes=worst_of(codes, step),
        planes=planes,
        bad=bad,
        left_out=left_out,
        wrong=int((ratio > 1.0).sum()),
        judged=int(decides.sum()),
        highest=float(ratio.max()),
    )


def encoded(ratio: Tensor) -> Tensor:
    """Ratios as uint8 codes, by their logarithm; above `LIMIT` exactly where the ratio is above 1."""
    steps = torch.log10(ratio.clamp(min=1e-3).double()) * PER_DECADE
    steps = torch.where(ratio > 1.0, steps.ceil().clamp(min=1), steps.floor()).nan_to_num(posinf=1e6)
    codes = (steps + LIMIT).clamp(FIRST, NONFINITE - 1).to(torch.uint8)
    codes[~ratio.isfinite()] = NONFINITE
    return codes


def worst_of(codes: Tensor, step: int) -> Tensor:
    """Each column the largest of `step` neighbours; a wrong row is never lost."""
    if step == 1:
        return codes
    rest = -codes.shape[1] % step
    return torch.nn.functional.pad(codes, (0, rest)).view(len(codes), -1, step).amax(-1)


def _bad_rows(ratio: Tensor, max_abs: Tensor) -> tuple[tuple[BadRows, ...], int]:
    """Wrong rows in groups of neighbours that are wrong in the same heads, in order; and how many are not listed."""
    worst = ratio.amax(1)
    places = (worst > 1.0).nonzero()
    if len(places) > LOOKED_AT:
        order = worst[places[:, 0], places[:, 1]].argsort(descending=True, stable=True)[:LOOKED_AT]
        places = places[order]
    by_heads: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for batch, row in places.tolist():
        heads = tuple((ratio[batch, :, row] > 1.0).nonzero().flatten().tolist())
        by_heads.setdefault((batch, heads), []).append(row)
    groups = [
        _group(batch, heads, first, last, ratio, max_abs)
        for (batch, heads), rows in by_heads.items()
        for first, last in ranges(rows)
    ]
    groups.sort(key=lambda group: (-group.ratio, group.batch, group.first))
    kept = sorted(groups[:LISTED], key=lambda group: (group.batch, group.first))
    return tuple(kept), len(groups) - len(kept)


def _group(batch: int, heads: tuple[int, ...], first: int, last: int, ratio: Tensor, max_abs: Tensor) -> BadRows:
    part = ratio[batch, :, first : last + 1]
    head, row = divmod(int(part.argmax()), part.shape[1])
    error = float(max_abs[batch, head, first + row])
    return BadRows(batch, first, last, heads, float(part.max()), error, (head, first + row))
