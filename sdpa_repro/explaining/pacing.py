"""A budget of seconds, and trials that are not begun when they could not end in it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.trial import Result, Trial
from sdpa_repro.visibility import scores_shape

SLACK = 0.15
"""Share of the budget by which a step that is under way may be late."""

TELLING = 1e7
"""Multiply-adds of a trial from which its time says something about larger ones."""


class OutOfTimeError(Exception):
    """The deadline has passed, or the next step would not end before it; what is known so far stands."""


@dataclass(frozen=True)
class Budget:
    """`seconds` from `start` (of `time.monotonic`); None: as long as it takes."""

    seconds: float | None = None
    start: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float | None:
        """When the time is up, for `time.monotonic`."""
        return None if self.seconds is None else self.start + self.seconds

    @property
    def left(self) -> float:
        """Seconds left, negative ones once it is late."""
        return math.inf if self.seconds is None else self.start + self.seconds - time.monotonic()

    @property
    def slack(self) -> float:
        """Seconds by which a step may end late."""
        return SLACK * (self.seconds or 0.0)


@dataclass
class Pace:
    """How long trials take here, to tell whether another one fits into the budget.

    rate: seconds a multiply-add of the fastest trial so far, None when there was none that tells.
    """

    budget: Budget
    rate: float | None = None

    def trial(self, trial: Trial) -> Trial:
        """The same trial; it raises OutOfTimeError instead of beginning what would end too late."""
        if self.budget.seconds is None:
            return trial

        def timed(call: AttentionCall) -> Result:
            work, start = work_of(call), time.monotonic()
            if self.expected(work) > self.budget.left + self.budget.slack:
                raise OutOfTimeError
            result = trial(call)
            self.learn(work, time.monotonic() - start)
            return result

        return timed

    def expected(self, work: float) -> float:
        """Seconds that a trial of so many multiply-adds takes at least."""
        return (self.rate or 0.0) * work

    def learn(self, work: float, seconds: float) -> None:
        """Take note of a trial; small ones say nothing about large ones."""
        if work >= TELLING:
            self.rate = min(self.rate or math.inf, seconds / work)


def work_of(call: AttentionCall) -> float:
    """Multiply-adds of one attention over the call."""
    return math.prod(scores_shape(call)) * float(call.query.shape[-1] + call.value.shape[-1])
