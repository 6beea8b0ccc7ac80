"""Prompt length and padding varied independently, so that what depends on one cannot be taken for the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sdpa_repro import ranks
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.prefill import Prefill, forward, padded, totals
from sdpa_repro.errors import InputError
from sdpa_repro.locating.judging import rms
from sdpa_repro.locating.lengthening import lengthened, shortest
from sdpa_repro.locating.measuring import Given, Run, differences, measure
from sdpa_repro.locating.running import Path, running
from sdpa_repro.locating.sweep import Sweep

__all__ = ["Point", "Unreachable", "grid", "planned"]

GROUPS = ((31, 32, 33), (63, 64, 65), (95, 96, 97), (287, 288, 289, 290))
"""Lengths around the tile sizes of kernels; prompt, padding and total each take all of them."""


@dataclass(frozen=True)
class Point:
    """One length that was tried. why: what was wrong, "" when nothing was."""

    prompt: int
    pad: int
    why: str

    @property
    def total(self) -> int:
        return self.prompt + self.pad


@dataclass(frozen=True)
class Unreachable:
    """Lengths that could not be tried. total: of prompt and padding."""

    prompt: int
    total: int
    reason: str


def planned(own: int) -> list[tuple[int, int]]:
    """(prompt, padding) to try with a prompt of `own` tokens, each pair once.

    Within each group of lengths every prompt is padded to every longer total, the longest prompt of a group to the
    totals of the next one, and the prompt as it is gets every length as padding.
    """
    pairs = []
    for number, group in enumerate(GROUPS):
        pairs += [(prompt, total - prompt) for prompt in group for total in group if total >= prompt]
        following = GROUPS[number + 1] if number + 1 < len(GROUPS) else ()
        pairs += [(group[-1], total - group[-1]) for total in following]
    pairs += [(own, pad) for group in GROUPS for pad in group]
    return list(dict.fromkeys(pairs))


def grid(
    prefill: Prefill, found: Sweep, *, noise: float, progress: Callable[[str], None] = lambda sentence: None
) -> tuple[list[Point], list[Unreachable]]:
    """Run the planned lengths on the default path; returns what was tried and what could not be.

    found: the sweep of this prefill, whose lengths are not run again. noise: what logits may move by, infinite to judge
    by calls and inputs alone. Under torchrun each rank runs its share. Raises KeyboardInterrupt
    through; what was tried until then is lost.
    """
    tried = {(row.prompt, row.pad) for row in found.alone(Path.DEFAULT)}
    reachable: dict[int, list[int]] = {}
    missing = []
    for prompt, pad in planned(prefill.length):
        reason = _unreachable(prefill, prompt, prompt + pad)
        if reason:
            missing.append(Unreachable(prompt, prompt + pad, reason))
        elif (prompt, pad) not in tried:
            reachable.setdefault(prompt, []).append(pad)
    jobs = sorted(reachable.items())
    own = []
    for prompt, pads in ranks.mine(jobs):
        progress(f"prompt of {prompt} tokens with padding {', '.join(map(str, pads))}")
        own.append(_points(prefill, prompt, pads, noise))
    return [point for points in ranks.gathered(own) for point in points], missing


def _unreachable(prefill: Prefill, prompt: int, total: int) -> str:
    """Why there is no such length, "" when there is."""
    if prompt != prefill.length and prefill.inputs["input_ids"].shape[0] > 1:
        return "a batch of several rows keeps its length"
    least = shortest(prefill)
    if prompt < least and prompt != prefill.length:
        return f"shorter than the {least} tokens that the prompt needs with its images"
    try:
        totals(prefill, PrefillOptions(total_length=max(total, prefill.length)))
    except InputError as error:
        return str(error)
    return ""


def _points(prefill: Prefill, prompt: int, pads: Sequence[int], noise: float) -> list[Point]:
    """One prompt unpadded, and with each padding beside it."""
    longer = lengthened(prefill, prompt)
    if longer is None:
        return []
    plain = measure(longer, padded(longer, prompt))
    usual = _under_math(longer) if any(plain.wrong) and math.isfinite(noise) else plain.logits
    points = []
    for pad in pads:
        run = plain if pad == 0 else measure(longer, padded(longer, prompt + pad))
        points.append(Point(prompt, pad, _why(run, plain.given, rms(run.logits, usual), noise)))
    return points


def _why(run: Run, plain: Given, distance: float, noise: float) -> str:
    if any(run.wrong):
        return "a wrong call"
    differ = differences(plain, run.given)
    if differ:
        return f"{differ[0]} differs"
    return "logits beyond noise" if distance > noise else ""


def _under_math(prefill: Prefill) -> Tensor:
    with running(prefill, Path.MATH) as exact:
        return forward(exact, padded(exact, exact.length))
