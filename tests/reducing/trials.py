"""Trials that need no kernel: a call fails when a condition on it says so."""

from __future__ import annotations

from collections.abc import Callable

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.check import LiveCheck
from sdpa_repro.replaying.trial import Result, Trial
from sdpa_repro.replaying.verdict import Status

Condition = Callable[[AttentionCall], bool]


def diverging(ratio: float = 10.0) -> Result:
    return Result(Status.DIVERGES, LiveCheck("diverges", 1.0, 1.0 / ratio, ratio, ((0, 0, 0),), 1))


AGREEING = Result(Status.AGREES, LiveCheck("agrees"))


def failing(condition: Condition) -> Trial:
    """A trial that diverges exactly where the condition holds."""
    return lambda call: diverging() if condition(call) else AGREEING


def lengths(call: AttentionCall) -> tuple[int, int]:
    return call.query.shape[2], call.key.shape[2]
