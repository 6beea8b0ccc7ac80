"""A shorter call that fails in the same way, to be explained in place of one whose trials take too long."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.explaining.answers import Conditions
from sdpa_repro.explaining.conditions import CANNOT_BE_MADE
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.explaining.length_result import LengthRule
from sdpa_repro.explaining.lengths import resizer
from sdpa_repro.explaining.pacing import Budget
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.trial import Trial
from sdpa_repro.replaying.verdict import Status
from sdpa_repro.replaying.worker import Worker

PERIODS = (256, 512, 1024, 2048)
"""Lengths are shortened by multiples of these, so that every tile of a power of two is as full as it was."""

MASKS = ("distinct", "kept")
"""The masks that it may have, as in `lengths.with_lengths`."""

CELL_SECONDS = 10.0
"""Seconds after which a backend hangs on a call this short."""


@dataclass(frozen=True)
class StandIn:
    """The shorter call, and how it was made: L, S and the kind of mask."""

    call: AttentionCall
    rows: int
    keys: int
    mask: str

    @property
    def words(self) -> str:
        """Where it is, for people."""
        return f"at L = {self.rows}, S = {self.keys}"


def stand_in(call: AttentionCall, trial: Trial, status: Status) -> StandIn | None:
    """The shortest of a few calls of the same kind that fails with this status (in any way when runs differ), or None.

    `trial` may raise OutOfTimeError, which is passed on.
    """
    for place in shorter_calls(call):
        try:
            result = trial(place.call)
        except CANNOT_BE_MADE:
            continue
        if result.fails and status in (result.status, Status.UNSTABLE):
            return place
    return None


def replayed_shorter(
    seen: Replay,
    budget: Budget,
    fails: Callable[[Replay], bool],
    *,
    preload: Sequence[str | Path] = (),
    progress: Callable[[str], None] | None = None,
) -> tuple[StandIn | None, Replay]:
    """The first of the same few calls whose replay fails, and that replay, as one of the dump that `seen` is about.

    For a call that there was no time to judge. None, and `seen` itself, when none of them fails before the budget ends.
    """
    dump = load(seen.path, seen.device)
    words: dict[str, Any] = {"device": seen.device, "dtypes": ("captured",), "runs": 1, "timeout": CELL_SECONDS}
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as folder, Worker(preload) as worker:
        for number, place in enumerate(shorter_calls(prepared(dump, None))):
            if budget.left < 0:
                break
            short = Path(folder) / f"{number}.pt"  # a worker keeps the last dump by its name
            save(snapshot(place.call, context=dump.context), short)
            found = replay(short, **words, worker=worker, progress=progress)
            if fails(found):
                return place, replace(found, path=seen.path)
    return None, seen


def shorter_calls(call: AttentionCall) -> Iterator[StandIn]:
    """Calls of the same kind and residues of the lengths: the shortest first, and all with distinct mask rows first."""
    sizes = list(_shorter(call.query.shape[-2], call.key.shape[-2]))
    for mask in MASKS if sizes else ():
        resize = resizer(call, mask=mask)
        for rows, keys in sizes:
            try:
                made = resize(rows, keys)
            except CANNOT_BE_MADE:
                continue
            yield StandIn(made, rows, keys, mask)


def _shorter(rows: int, keys: int) -> Iterator[tuple[int, int]]:
    """L and S of the same residues, at most a quarter of the work; S stays the longer one where it was."""
    for period in PERIODS:
        fewer_rows, fewer_keys = (min(length, length % period + period) for length in (rows, keys))
        if rows <= keys and fewer_rows > fewer_keys:
            fewer_keys = min(keys, fewer_keys + -(-(fewer_rows - fewer_keys) // period) * period)
        if 4 * fewer_rows * fewer_keys <= rows * keys:
            yield fewer_rows, fewer_keys


def conditions_at(found: Conditions, place: StandIn) -> Conditions:
    """What was found on the stand-in, its workarounds marked as tried there."""
    helps = tuple(
        replace(help_, verified=False, at=place.words) if help_.verified else help_ for help_ in found.workarounds
    )
    return replace(found, workarounds=helps)


def hypothesis_at(found: Hypothesis | None, place: StandIn) -> Hypothesis | None:
    """The sentence with the lengths it was seen at, since it speaks of rows."""
    if found is None or found.sentence is None:
        return found
    return replace(found, sentence=f"{found.sentence} ({place.words})")


def poison_at(found: Poison, place: StandIn) -> Poison:
    """The words with the lengths they are about."""
    return replace(found, words=f"{found.words} ({place.words})") if found.reads_outside is not None else found


def rule_for(found: LengthRule, rows: int, keys: int) -> LengthRule:
    """The rule found on the stand-in, None in it when the call of these lengths, which fails, contradicts it."""
    if found.fitted is None or found.fitted.fails(rows, keys):
        return found
    why = f"the rule that holds at short lengths ({found.rule}) does not hold at L = {rows}, S = {keys}"
    return replace(found, rule=None, fitted=None, over=None, why=why)
