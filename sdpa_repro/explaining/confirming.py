"""Workarounds that were found on a shorter call, tried on the dumped one while there is time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.answers import Conditions, Workaround
from sdpa_repro.explaining.conditions import CANNOT_BE_MADE, TrialFor, backend_line
from sdpa_repro.explaining.factor import NoVariant, Setting
from sdpa_repro.explaining.factors import FACTORS
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.replaying.verdict import Status


def confirmed(
    found: Conditions,
    call: AttentionCall,
    trial_for: TrialFor,
    context: Mapping[str, Any],
    right: Collection[str],
) -> Conditions:
    """The conditions with those workarounds marked as verified with which `call` itself is right.

    right: names of the backends that a replay of `call` has found right. The first trial that there is no time for
    ends it.
    """
    helps = list(found.workarounds)
    for index, help_ in enumerate(helps):
        try:
            if help_.at and _cures(help_, call, trial_for, context, right):
                helps[index] = replace(help_, verified=True, at="")
        except OutOfTimeError:
            break
        except CANNOT_BE_MADE:
            continue
    return replace(found, workarounds=tuple(helps))


def _cures(
    help_: Workaround,
    call: AttentionCall,
    trial_for: TrialFor,
    context: Mapping[str, Any],
    right: Collection[str],
) -> bool:
    """Whether the call is right with the line of a workaround; False when nothing that can be tried has that line."""
    if help_.line in map(backend_line, right):
        return True
    for factor in FACTORS:
        offered = factor.offer(call, Setting(context)) if factor.words in help_.words else ()
        for variant in () if isinstance(offered, NoVariant) else offered:
            if variant.line == help_.line:
                switches = context if variant.context is None else variant.context
                return trial_for(switches)(variant.call).status is Status.AGREES
    return False
