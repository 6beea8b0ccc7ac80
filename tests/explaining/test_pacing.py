"""A trial that cannot end in time is not begun; without a budget nothing is in the way."""

from __future__ import annotations

import math
import time

import pytest

from sdpa_repro.explaining.pacing import Budget, OutOfTimeError, Pace, work_of
from sdpa_repro.replaying.trial import Result
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.reducing.trials import AGREEING

SHORT, LONG = make_call(rows=33, width=16), make_call(rows=2049, width=16, mask=None)


def test_work_is_counted_in_multiply_adds() -> None:
    assert work_of(make_call(batch=2, heads=4, rows=3, keys=5, width=8, value_width=16)) == 2 * 4 * 3 * 5 * (8 + 16)


def test_a_trial_that_would_end_too_late_is_not_begun() -> None:
    asked: list[int] = []
    pace = Pace(Budget(60))
    pace.learn(work_of(LONG), 1000.0)
    trial = pace.trial(lambda call: asked.append(1) or AGREEING)  # type: ignore[func-returns-value]
    assert trial(SHORT).status is Status.AGREES
    with pytest.raises(OutOfTimeError):
        trial(LONG)
    assert asked == [1]


def test_short_calls_say_nothing_about_long_ones() -> None:
    pace = Pace(Budget(60))
    pace.learn(work_of(SHORT), 1.0)
    assert pace.expected(work_of(LONG)) == 0


def test_the_fastest_trial_counts() -> None:
    pace = Pace(Budget(60))
    for seconds in (8.0, 2.0, 4.0):
        pace.learn(1e8, seconds)
    assert pace.expected(1e9) == 20.0


def test_without_a_budget_a_trial_stays_what_it_is() -> None:
    def trial(call: object) -> Result:
        return AGREEING

    assert Pace(Budget()).trial(trial) is trial
    assert (Budget().deadline, Budget().left, Budget().slack) == (None, math.inf, 0.0)


def test_what_is_left_counts_from_the_start() -> None:
    late = Budget(5.0, time.monotonic() - 8.0)
    assert -4.0 < late.left < -2.9
    assert late.deadline == late.start + 5.0
