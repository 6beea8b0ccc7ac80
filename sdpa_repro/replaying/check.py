"""The live check: is the output a call has just returned right, judged on the live tensors?

It looks at the tensors before anything is copied, so it cannot be fooled by a lost layout. Where that saves
work a screen (`screen`) clears healthy calls without all of their reference. Else a first pass in float32 holds
every row against the rounding floor; only rows beyond it are computed again in float64 and held against the
noise of MATH and of the explicit formula. It never raises and never blocks the run: out of memory shrinks
the tiles, then moves to the CPU, then leaves the call unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.backends import Backend, math_op, run
from sdpa_repro.replaying.cells import SWALLOWED
from sdpa_repro.replaying.reference import TILE_BYTES, blocks, check_shapes, four_dims, reference, rows_of
from sdpa_repro.replaying.screen import screened
from sdpa_repro.replaying.verdict import (
    Judgement,
    RowErrors,
    Status,
    compare,
    floor,
    judge,
    ratio_of,
    rms_share,
    row_errors,
)

SUSPECTS = 64
"""Rows examined in float64, the worst first; when all of them are cleared the rest is taken as cleared."""

LISTED = 64
"""Wrong rows named in a result."""


@dataclass(frozen=True)
class LiveCheck:
    """Result for one call: status is "agrees", "diverges", "nonfinite" or "unchecked" (see `reason`)."""

    status: str
    max_abs: float = 0.0
    threshold: float = 0.0
    ratio: float = 0.0
    rows: tuple[tuple[int, int, int], ...] = ()
    """The first wrong rows as (batch, head, query row)."""
    wrong_rows: int = 0
    reason: str = ""

    @property
    def wrong(self) -> bool:
        return self.status in ("diverges", "nonfinite")


@dataclass(frozen=True)
class Scan:
    """First pass: the rows beyond the floor, and the largest ratio seen."""

    ratio: float
    max_abs: float
    threshold: float
    suspects: Tensor
    """(n, 3) int64 batch, head, row; the worst first."""


def check(call: AttentionCall, output: Tensor, *, dtype: torch.dtype | None = None) -> LiveCheck:
    """Judge `output` (B, H, L, Ev) of `call` on the tensors as they are.

    `dtype` is the type autocast made the kernel compute in, when it is not the tensors' own. Never raises.
    """
    if call.dropout_p > 0:
        return LiveCheck("unchecked", reason="dropout: the result is random")
    try:
        with torch.no_grad(), full_precision():
            return _check_within_memory(_as_computed(call, dtype), output)
    except Exception as error:  # the run under observation must go on whatever happens here
        return LiveCheck(
            "unchecked", reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def _as_computed(call: AttentionCall, dtype: torch.dtype | None) -> AttentionCall:
    """The call in four dimensions, its values rounded as autocast rounds them before the kernel."""
    flat = four_dims(call)
    if dtype is None or dtype == flat.query.dtype:
        return flat
    mask = flat.attn_mask
    if mask is not None and mask.dtype.is_floating_point:
        mask = mask.to(dtype)
    return replace(flat, query=flat.query.to(dtype), key=flat.key.to(dtype), value=flat.value.to(dtype), attn_mask=mask)


def _check_within_memory(flat: AttentionCall, output: Tensor) -> LiveCheck:
    """Check with ever smaller tiles, then on the CPU, until it fits."""
    check_shapes(flat)
    usual = TILE_BYTES.get(flat.query.device.type, TILE_BYTES["cpu"])
    for tile_bytes in (usual, usual // 16):
        with suppress(torch.OutOfMemoryError):
            return _check(flat, output, tile_bytes)
    moved = {name: tensor.cpu() for name, tensor in flat.tensors.items()}
    return _check(flat.with_tensors(moved), output.cpu(), TILE_BYTES["cpu"])


def _check(flat: AttentionCall, output: Tensor, tile_bytes: int) -> LiveCheck:
    """The two passes on one device."""
    batches, heads, rows, _ = flat.query.shape
    shaped = output.detach().reshape(batches, heads, rows, output.shape[-1])
    cleared = screened(flat, shaped, tile_bytes)
    if cleared is not None:
        return LiveCheck("agrees", cleared.max_abs, cleared.threshold, cleared.ratio)
    scan = _scan(flat, shaped, tile_bytes)
    if scan.ratio <= 1.0:
        return LiveCheck("agrees", scan.max_abs, scan.threshold, scan.ratio)
    return _examine(flat, shaped, scan)


def _scan(flat: AttentionCall, output: Tensor, tile_bytes: int) -> Scan:
    """Hold every row against the floor, block by block; nothing of the size of the output is kept."""
    dtype = output.dtype
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    share = rms_share(output.shape[-1])
    worst, found, ratios = (0.0, 0.0, 0.0), [], []
    for block in blocks(flat, precision=precision, tile_bytes=tile_bytes):
        here = output[block.batch, block.head : block.head + block.heads, block.first : block.last]
        largest, rms, finite = compare(here, block.output)
        limit = floor(block.scale, dtype)
        ratio = torch.maximum(ratio_of(largest, limit), ratio_of(rms, limit * share))
        ratio = torch.where(finite, ratio, float("inf"))
        ratio = torch.where(block.live & ~block.poisoned, ratio, 0.0)
        top, at = ratio.flatten().max(0)
        if float(top) > worst[0]:
            worst = (float(top), float(largest.flatten()[at]), float(limit.flatten()[at]))
        if float(top) > 1.0:
            where = (ratio > 1.0).nonzero()
            ratios.append(ratio[ratio > 1.0].cpu())
            found.append(where.cpu() + torch.tensor([block.head, block.first]))
            found[-1] = torch.cat([torch.full((len(where), 1), block.batch), found[-1]], 1)
    suspects = torch.cat(found)[torch.cat(ratios).argsort(descending=True)] if found else torch.empty(0, 3)
    return Scan(*worst, suspects.long())


def _examine(flat: AttentionCall, output: Tensor, scan: Scan) -> LiveCheck:
    """Second pass: the worst suspects in float64, against the noise of the other paths on these rows."""
    wrong: list[tuple[int, int, int]] = []
    best = LiveCheck("agrees")
    chosen = scan.suspects[:SUSPECTS]
    for batch, head in dict.fromkeys((int(b), int(h)) for b, h, _ in chosen):
        rows = chosen[(chosen[:, 0] == batch) & (chosen[:, 1] == head), 2].sort().values.to(output.device)
        judgement, bad = _judge_rows(flat, output, batch, head, rows)
        wrong += [(batch, head, int(rows[index])) for index in bad]
        if judgement.ratio >= best.ratio:
            status = judgement.status.value
            finite = status == Status.NONFINITE.value and bool(output[batch, head, rows[list(bad)]].isfinite().all())
            reason = SWALLOWED if finite else ""
            best = LiveCheck(status, judgement.max_abs, judgement.threshold, judgement.ratio, reason=reason)
    if not wrong:
        return best
    total = len(wrong) if len(scan.suspects) <= SUSPECTS else len(scan.suspects)
    listed = wrong if len(scan.suspects) <= SUSPECTS else [(int(b), int(h), int(r)) for b, h, r in scan.suspects]
    return replace(best, rows=tuple(sorted(listed)[:LISTED]), wrong_rows=total)


def _judge_rows(
    flat: AttentionCall, output: Tensor, batch: int, head: int, rows: Tensor
) -> tuple[Judgement, tuple[int, ...]]:
    """Judge some rows of one head; returns the judgement and which of the rows are wrong."""
    part = rows_of(flat, batch, head, rows)
    expected = reference(part)
    noise: dict[str, RowErrors] = {}
    paths: dict[str, Callable[[AttentionCall], Tensor]]
    paths = {"MATH": math_op, "eager": lambda call: run(call, Backend.EAGER)}
    for name, path in paths.items():
        with suppress(Exception):  # a path that cannot run supplies no noise
            noise[name] = row_errors(path(part), expected)
    judged = judge(row_errors(output[batch, head, rows][None, None], expected), expected, output.dtype, "", noise)
    return judged, judged.bad.rows if judged.bad else ()


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products in float32, whatever the model asked for (TF32 on a GPU, bfloat16 on a CPU)."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
