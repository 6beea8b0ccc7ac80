"""The largest error that a script lets pass: what rounding explains, and where that does not tell, the middle."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import torch

from sdpa_repro.attention import AttentionCall, viewed_once
from sdpa_repro.publishing.story import BACKENDS
from sdpa_repro.replaying.verdict import unit_roundoff
from sdpa_repro.switches import dtype_name

FACTOR = 2.0
"""The limit over the rounding of the largest value: an output is an average of values, rounded once."""

_ERROR = re.compile(rf"^({'|'.join(BACKENDS)}) +([-+.\de]+|nan|inf)(  wrong in query rows .*)?$", re.MULTILINE)


def rounding_limit(call: AttentionCall, autocast: str | None = None) -> tuple[float, str]:
    """Twice the rounding of the largest finite |value| to the call's dtype, and the words that say so.

    autocast: name of the dtype that the kernel computes in, when autocast is on.
    """
    value = viewed_once(call.value.detach())
    dtype: torch.dtype = getattr(torch, autocast) if autocast else value.dtype
    finite = value[value.isfinite()].abs().float()
    largest = float(finite.max()) if finite.numel() else 0.0
    if largest == 0:
        return 0.0, "every value is 0: there is nothing to round"
    limit = FACTOR * unit_roundoff(dtype) * largest
    return limit, f"twice {dtype_name(dtype)}'s rounding of values up to {largest:.3g}"


def errors_in(output: str) -> dict[str, float]:
    """Largest error by backend, as a script of `script.script` prints it; those that declined are missing."""
    return {found[1]: float(found[2]) for found in _ERROR.finditer(output)}


def fitted_limit(
    call: AttentionCall, errors: Mapping[str, float], guilty: Collection[str], autocast: str | None = None
) -> tuple[float, str] | None:
    """A limit above every healthy backend's error and below the failing one's; None when there is none.

    errors: largest error over the rows that count, by backend. What rounding explains is preferred where it
    is twice what healthy backends need here, since other machines round otherwise; else the geometric mean of the
    two errors is taken, and said.
    """
    bound, reason = rounding_limit(call, autocast)
    failing = [math.inf if math.isnan(errors[name]) else errors[name] for name in guilty if name in errors]
    healthy = [error for name, error in errors.items() if name not in guilty and name != "default" and error == error]
    worst, least = max(healthy, default=0.0), max(failing, default=math.inf)
    if 2 * worst <= bound < least:
        return bound, reason
    if not worst < least:
        return None
    if math.isinf(least):
        return 4 * worst, f"four times the largest error of another backend, {worst:.3g}"
    if worst == 0:
        return least / 2, f"half of the wrong result's error, {least:.3g}; every other backend is exact"
    return math.sqrt(worst * least), f"geometric mean of the errors {worst:.3g} (right) and {least:.3g} (wrong)"
