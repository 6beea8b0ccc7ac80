"""Check what has to hold for a prompt however it is padded and batched.

    found = verify(model, processor(text=prompt, images=image, return_tensors="pt"))
    print(found.sentence)

The prompt is run unpadded, at total lengths around multiples of 32 (tiles of attention kernels have such sizes), and
there as the last row of batches beside longer rows; everything is compared on its valid tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, of_model, padded, totals
from sdpa_repro.errors import InputError
from sdpa_repro.locating.caches import CacheComparison, compare_caches, generated
from sdpa_repro.locating.calls import Check
from sdpa_repro.locating.invariants import CACHES, GREEDY, LOGITS, Checklist, Finding, Point
from sdpa_repro.locating.judging import compared, rms
from sdpa_repro.locating.lengthening import batched, companions
from sdpa_repro.locating.noise import rounding
from sdpa_repro.locating.perturbing import shaken
from sdpa_repro.locating.recording import Recording, record
from sdpa_repro.locating.running import Path, running
from sdpa_repro.locating.stages import Outcome, compare_stages
from sdpa_repro.locating.sweep import Row
from sdpa_repro.locating.verified import TILE, Verified
from sdpa_repro.locating.walking import Key, Pair, how_wrong, of_row, rows_of, walk, wrong_on_valid

__all__ = ["Verified", "around_tiles", "verify", "verify_prefill"]

MULTIPLES = 3
"""Total lengths are tried around so many multiples of `verified.TILE`."""
BATCHES = (2, 3)
TOKENS = 4
"""Greedy tokens."""
DRAWS = 3
"""Shaken runs, for the noise."""
TIE = 3.0
"""Two logits closer than so many times the limit may change places by rounding."""
HALF_MARGIN, FULL_MARGIN = 1.25, 4.0
"""Logits may move by so many times what shaking moves them by: in 16 bits, where that overstates the noise already, and
in 32 or more, where kernels differ by more than shaken modules do and a fault by many times more than either."""

Say = Callable[[str], None]


@dataclass
class State:
    """What has been looked at so far."""

    prefill: Prefill
    say: Say
    checklist: Checklist = field(default_factory=Checklist)
    points: list[Point] = field(default_factory=list)
    plain: Recording | None = None
    exact: Tensor | None = None
    noise: dict[Key, Tensor] = field(default_factory=dict)
    limit: float = 0.0
    caches: CacheComparison | None = None
    notes: list[str] = field(default_factory=list)


def verify(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    pads: Sequence[int] | None = None,
    padding_side: str | None = None,
    caches: bool = True,
    progress: Say | None = None,
) -> Verified:
    """Check the invariants of a model's prompt under padding and batching.

    model: a transformers model in evaluation mode. inputs: what its processor returned, input_ids (B, L). pads: tokens
    of padding to try, by default those around the next multiples of 32. caches: also compare the masks of a dynamic and
    a static cache. Raises InputError for inputs that cannot be padded so.
    """
    prefill = of_model(model, inputs, padding_side=padding_side)
    return verify_prefill(prefill, around_tiles(prefill) if pads is None else pads, caches=caches, progress=progress)


def around_tiles(prefill: Prefill) -> list[int]:
    """Paddings that give total lengths one below, at and one above the next multiples of 32, as far as they fit."""
    first = -(-(prefill.length + 1) // TILE)
    lengths = [number * TILE + step for number in range(first, first + MULTIPLES) for step in (-1, 0, 1)]
    return [total - prefill.length for total in lengths if total >= prefill.length and _fits(prefill, total)]


def verify_prefill(
    prefill: Prefill,
    pads: Sequence[int],
    *,
    batches: Sequence[int] = BATCHES,
    caches: bool = True,
    preloaded: Sequence[Mapping[str, str]] = (),
    progress: Say | None = None,
) -> Verified:
    """Check with each padding (0 is always among them); with the first three also in batches, and what is generated.

    After Ctrl-C the result is what there is. Raises InputError for a padding that the model has no room for.
    """
    for pad in pads:
        totals(prefill, PrefillOptions(pad=pad))
    state = State(prefill, progress or (lambda sentence: None))
    complete = True
    try:
        _check(state, sorted({0, *pads}), batches, caches)
    except KeyboardInterrupt:
        complete = False
    return Verified(
        prefill,
        state.checklist.items(),
        tuple(state.points),
        state.limit if state.exact is not None else None,
        state.caches,
        (*prefill.notes, *state.notes),
        tuple(preloaded),
        complete,
    )


def _check(state: State, pads: Sequence[int], batches: Sequence[int], caches: bool) -> None:
    """Everything, the noise first: the rest is judged by it."""
    prefill = state.prefill
    _measure_noise(state)
    for pad in pads:
        state.say(f"total length {prefill.length + pad} (padding {pad})")
        inputs = padded(prefill, prefill.length + pad)
        _point(state, Point(1, prefill.length + pad), inputs, row=0)
    near = [pad for pad in pads if pad > 0][:3]
    several = [(count, pad) for count in batches for pad in near]
    if prefill.inputs["input_ids"].shape[0] > 1:
        several = []
        state.notes.append("the prompt is a batch already: it was not put into others")
    rows = {(1, pad): padded(prefill, prefill.length + pad) for pad in near}
    for count, pad in several:
        beside = _beside(prefill, pad, count)
        if beside is not None:
            state.say(f"batch of {count}, total length {prefill.length + pad}")
            _point(state, Point(count, prefill.length + pad), beside, row=count - 1)
            rows[count, pad] = beside
    if caches:
        _caches(state, [0, *near[-1:]])
    else:
        state.checklist.leave_out(CACHES, "not asked for")
    _greedy(state, rows)


def _measure_noise(state: State) -> None:
    """The unpadded run under MATH, and how far rounding moves its values and the logits."""
    prefill = state.prefill
    state.say("running the prompt unpadded, and measuring the noise of rounding")
    plain = padded(prefill, prefill.length)
    with running(prefill, Path.MATH) as ready:
        base = _lean(record(ready, plain))
        runs = []
        for seed in range(DRAWS):
            with shaken(ready.model, seed):
                runs.append(_lean(record(ready, plain)))
    state.noise, state.exact = rounding(base, runs), base.logits
    margin = HALF_MARGIN if prefill.dtype.itemsize < 4 else FULL_MARGIN
    state.limit = margin * statistics.median_low([rms(run.logits, base.logits) for run in runs])


def _point(state: State, point: Point, inputs: Mapping[str, Tensor], *, row: int) -> None:
    """One padded run beside the unpadded one."""
    run = _lean(record(state.prefill, inputs, row=row, check=True))
    if state.plain is None:
        state.plain = run
    stages = walk(Pair(state.prefill, state.plain, run, state.noise))
    state.points.append(point)
    problems = (f"could not be looked at: {problem}" for problem in run.problems)
    state.notes += [note for note in problems if note not in state.notes]
    state.checklist.look_at(point, stages, image=bool(state.plain.stage("pixel inputs")))
    logits = run.logits[row : row + 1] if point.batch > 1 else run.logits
    wrong = [check for check in run.checks if wrong_on_valid(run, check)]
    if wrong:
        how = f"{_call(run, wrong)}; {_moved(state, logits)}"
    elif _near(state, logits):
        how = ""
    elif any(stage.status is Outcome.DIFFERS for stage in stages):
        how = _moved(state, logits)
    else:
        how = _explained(state, point, inputs, row, _moved(state, logits))
    if how:
        state.checklist.broken(LOGITS, Finding(point, how))
    else:
        state.checklist.hold(LOGITS, point)


def _call(run: Recording, wrong: Sequence[Check]) -> str:
    """The first SDPA call that is wrong, in words."""
    first, others = of_row(run, wrong[0]), len(wrong) - 1
    more = f", and {others} more call{'s' * (others > 1)}" if others else ""
    return f"{first.kernel} in {first.module} is {how_wrong(first)}, in {rows_of(first)}{more}"


def _explained(state: State, point: Point, inputs: Mapping[str, Tensor], row: int, moved: str) -> str:
    """`moved` with the stage that explains it; "" where all stages are there and right: rounding has added up."""
    state.say(f"the logits at {point} are beyond noise: comparing the stages")
    table = compare_stages(state.prefill, padded(state.prefill, state.prefill.length), inputs, row=row)
    if table.first is not None:
        return f"{moved}; the first stage beyond noise is {table.first.name}, in {table.first.module}"
    if not table.whole:
        return f"{moved}; not every layer could be judged by itself"
    state.notes.append(f"at {point} {moved}; every SDPA call and every layer is right by itself, so it is no finding")
    return ""


def _bases(state: State) -> list[Tensor]:
    """What logits are held against: the unpadded run and what MATH makes of it, MATH alone when the former is wrong."""
    plain, exact = state.plain, state.exact
    if plain is None or exact is None:
        return []
    poisoned = any(wrong_on_valid(plain, check) for check in plain.checks) or rms(plain.logits, exact) > state.limit
    return [exact] if poisoned else [plain.logits, exact]


def _near(state: State, logits: Tensor) -> bool:
    """Whether logits (B, vocabulary) are within noise of one of the bases."""
    return min((rms(logits, base) for base in _bases(state)), default=0.0) <= state.limit


def _moved(state: State, logits: Tensor) -> str:
    """How far logits are from the base, in words."""
    bases = _bases(state)
    row = compared(Row(state.prefill.length, 0, Path.DEFAULT, logits=logits), bases[0], "")
    flip = f"changes from {row.top5_plain[0]} to {row.top5[0]}" if row.argmax_flipped else "stays the same"
    how = (
        f"a logit moves by up to {row.max_abs:.3g}, {rms(logits, bases[0]):.3g} root mean square where rounding "
        f"explains {state.limit:.3g}; the likeliest token {flip}"
    )
    return f"{how}; the unpadded run is wrong too, the MATH one is the measure" if len(bases) == 1 else how


def _caches(state: State, pads: Sequence[int]) -> None:
    """The masks of both caches, unpadded and padded."""
    prefill = state.prefill
    for pad in pads:
        total = prefill.length + pad
        state.say(f"masks of a dynamic and of a static cache, total length {total}")
        try:
            found = compare_caches(prefill, padded(prefill, total))
        except InputError as error:
            state.checklist.leave_out(CACHES, str(error))
            return
        if state.caches is None or not state.caches.different:
            state.caches = found
        if found.different:
            state.checklist.broken(CACHES, Finding(Point(1, total), found.headline, found.module, found.file))
        else:
            state.checklist.hold(CACHES, Point(1, total))


def _greedy(state: State, rows: Mapping[tuple[int, int], Mapping[str, Tensor]]) -> None:
    """What the model goes on to say, unpadded and in each of the batches."""
    prefill = state.prefill
    if not hasattr(prefill.model, "generate"):
        state.checklist.leave_out(GREEDY, "the model has no generate")
        return
    if prefill.side == "decoder" and prefill.padding_side == "right":
        state.checklist.leave_out(GREEDY, "a decoder padded on the right goes on after the padding")
        return
    if not rows:
        state.checklist.leave_out(GREEDY, "nothing was padded")
        return
    state.say(f"{TOKENS} greedy tokens")
    try:
        tokens, logits = generated(prefill, padded(prefill, prefill.length), TOKENS)
    except InputError as error:
        state.checklist.leave_out(GREEDY, str(error))
        return
    for (count, pad), inputs in rows.items():
        point = Point(count, prefill.length + pad)
        state.say(f"{TOKENS} greedy tokens at {point}")
        try:
            other = generated(prefill, inputs, TOKENS)[0]
        except InputError as error:
            state.checklist.leave_out(GREEDY, str(error))
            continue
        how = _parts(tokens, other[count - 1 : count] if count > 1 else other, logits, TIE * state.limit)
        if how:
            state.checklist.broken(GREEDY, Finding(point, how))
        else:
            state.checklist.hold(GREEDY, point)


def _parts(plain: Tensor, other: Tensor, logits: Tensor, tie: float) -> str:
    """The first token of (B, n) that differs and is no near tie in `logits` (n, B, vocabulary); "" without one.

    Behind a near tie the continuations may differ.
    """
    length = min(plain.shape[1], other.shape[1])
    for row in range(plain.shape[0]):
        at = next((at for at in range(length) if plain[row, at] != other[row, at]), None)
        if at is None:
            continue
        one, two = int(plain[row, at]), int(other[row, at])
        gap = float(logits[at, row, one] - logits[at, row, two])
        if not gap <= tie:
            return f"token {at} is {two} instead of {one}, whose logit is {gap:.3g} larger unpadded"
    return ""


def _beside(prefill: Prefill, pad: int, count: int) -> dict[str, Tensor] | None:
    """A batch of `count` rows: longer ones first, the prompt last; None when it cannot be made longer."""
    others = companions(prefill, pad, count)
    return batched([*others, prefill], prefill.length + pad) if others is not None else None


def _lean(run: Recording) -> Recording:
    """The recording without what happens inside the layers."""
    kept = tuple(value for value in run.values if value.stage == "mask" or not value.layer or value.stage in SHARED)
    return replace(run, values=kept)


SHARED = ("position_ids", "rotary")
"""Stages that may be seen at a layer and yet say something about the whole model."""


def _fits(prefill: Prefill, total: int) -> bool:
    """Whether the model has positions for so many tokens."""
    try:
        totals(prefill, PrefillOptions(total_length=total))
    except InputError:
        return False
    return True
