"""A shorter call that fails in the same way, to be explained in place of one whose trials take too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.answers import Conditions
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.explaining.length_result import LengthRule
from sdpa_repro.explaining.lengths import resizer
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.replaying.trial import Trial
from sdpa_repro.replaying.verdict import Status

PERIODS = (256, 512, 1024, 2048)
"""Lengths are shortened by multiples of these, so that every tile of a power of two is as full as it was."""

MASKS = ("distinct", "kept")
"""The masks that it may have, as in `lengths.with_lengths`."""


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
    sizes = list(_shorter(call.query.shape[-2], call.key.shape[-2]))
    for mask in MASKS if sizes else ():
        resize = resizer(call, mask=mask)
        for rows, keys in sizes:
            try:
                made = resize(rows, keys)
                result = trial(made)
            except (InputError, RuntimeError, ValueError):
                continue
            if result.fails and status in (result.status, Status.UNSTABLE):
                return StandIn(made, rows, keys, mask)
    return None


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
