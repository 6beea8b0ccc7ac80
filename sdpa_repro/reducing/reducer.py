"""The search: propose simpler calls, keep those that fail in the same way, until none is left.

It knows nothing about files or printing: it takes a call, a function that tries one, and passes (functions that
propose simpler calls). General reducers of text stall here, since failures are congruences of the lengths; the
passes know that. The shape of the search is picire's: an exception that stops it carries the best result so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sdpa_repro.errors import InputError
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.reducing.candidate import Candidate, sound
from sdpa_repro.reducing.order import simpler
from sdpa_repro.replaying.trial import Result, Trial, same_failure, without_output
from sdpa_repro.replaying.verdict import Status

CLEAR = 2.0
"""A wrong number stays this many times over its threshold, or as far as it was, so that it fails elsewhere too."""

ROUNDS = 8
"""More rounds over all passes than any reduction has needed."""


@dataclass(frozen=True)
class Clues:
    """What the first failure and the captured values tell the passes."""

    batch: int = 0
    head: int = 0
    row: int = 0
    seed: int = 0
    low: float = 0.0
    """The lowest score (scaled query·key, mask added where finite) that a visible key has, and the highest."""
    high: float = 0.0
    frozen: frozenset[str] = frozenset()
    """Names of what must stay as it is."""


Pass = Callable[[Candidate, Clues], Iterator[Candidate]]
"""Proposes calls that may be simpler than a candidate, those most worth trying first."""


class Stopped(Exception):  # noqa: N818 (an outcome, not a fault)
    """The time is up; `best` is the simplest call that failed so far."""

    def __init__(self, best: Candidate) -> None:
        super().__init__("the time is up")
        self.best = best


@dataclass
class Search:
    """Trials with a memory: how many there were, what each said, and the simplest call that fails."""

    trial: Trial
    best: Candidate
    first: Result
    deadline: float | None = None
    progress: Callable[[str], None] | None = None
    calls: int = 1
    seen: dict[str, Result] = field(default_factory=dict)
    told: bool = False
    """Whether `first` comes from elsewhere, since a trial of the whole call takes too long."""

    def result(self, candidate: Candidate) -> Result:
        """Try a candidate, once; Stopped when the time is up."""
        if candidate.key not in self.seen:
            if self.late:
                raise Stopped(self.best)
            self.calls += 1
            try:
                self.seen[candidate.key] = without_output(self.trial(candidate.call))
            except OutOfTimeError:
                raise Stopped(self.best) from None
        return self.seen[candidate.key]

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def fails(self, candidate: Candidate) -> bool:
        """Whether the candidate is a proper call and fails as the first one did, by a clear margin."""
        return not sound(candidate.call) and self.same(self.result(candidate))

    def same(self, result: Result) -> bool:
        """Whether a result is the failure that is being reduced."""
        far = result.ratio >= min(CLEAR, self.first.ratio) or result.status is not Status.DIVERGES
        return same_failure(result, self.first) and far

    def result_of_best(self) -> Result:
        """What the best call gives, with its output where there is one: that takes one more trial."""
        known = self.seen[self.best.key]
        if known.checked is None or (self.told and known is self.first):
            return known
        self.calls += 1
        return self.trial(self.best.call)

    def keep(self, candidate: Candidate) -> None:
        """Take a candidate that fails as the best one."""
        self.best = candidate
        if self.progress is not None:
            left = "" if self.deadline is None else f", {max(0.0, self.deadline - time.monotonic()):.0f} s left"
            captured = ", ".join(name for name in candidate.captured if name != "attn_mask")
            values = f"captured {captured}" if captured else "closed forms"
            self.progress(f"{self.calls} calls: fails at {candidate.sizes} ({values}){left}")


def begin(
    call: Candidate,
    trial: Trial,
    *,
    deadline: float | None = None,
    progress: Callable[[str], None] | None = None,
    seen: Result | None = None,
) -> Search:
    """The search after its first trial. seen: what that gave, when it has been made before.

    Raises InputError when the call is no proper one or does not fail here.
    """
    reason = sound(call.call)
    if reason:
        raise InputError(f"there is nothing to reduce: {reason}")
    first = trial(call.call) if seen is None else seen
    if not first.fails:
        said = f" ({first.reason})" if first.reason else ""
        raise InputError(f"the call does not fail here: {first.status.value}{said}; replay it to see what it does")
    search = Search(trial, call, without_output(first), deadline, progress, told=seen is not None)
    search.seen[call.key] = search.first
    return search


def improve(search: Search, propose: Pass, clues: Clues) -> None:
    """Apply one pass until it finds nothing simpler that fails."""
    while found := first_failing(search, propose(search.best, clues)):
        search.keep(found)


def first_failing(search: Search, proposals: Iterator[Candidate]) -> Candidate | None:
    """The first proposal that is simpler than the best call and fails."""
    for proposal in proposals:
        if simpler(proposal, search.best) and search.fails(proposal):
            return proposal
    return None


def fixpoint(search: Search, passes: Sequence[Pass], clues: Clues) -> None:
    """Apply all passes in order, again and again, until a whole round finds nothing."""
    for _ in range(ROUNDS):
        before = search.best
        for propose in passes:
            improve(search, propose, clues)
        if search.best is before:
            return
