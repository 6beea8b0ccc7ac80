"""Under which conditions does a call fail? One factor is changed at a time, and the failure is looked for again.

The trials are plain callables (`replaying.trial`); nothing here knows where they run. Every answer is for the
failure that the call itself shows: a change that the backend declines, or that makes the call invalid, says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.answers import FAILING, Answer, Conditions, Outcome, Tried, Workaround
from sdpa_repro.explaining.factor import Decides, Factor, NoVariant, Offer, Setting, Variant
from sdpa_repro.explaining.factors import FACTORS
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.backends import first_line
from sdpa_repro.replaying.trial import Result, Trial, same_failure, without_output
from sdpa_repro.replaying.verdict import Status, unit_roundoff
from sdpa_repro.situation import affected

TrialFor = Callable[[Mapping[str, Any]], Trial]
"""From the switches to run under (a dump's context) to the question whether the suspected backend fails."""

FLAKY_RUNS = 3
"""Runs of every trial when two runs of the call itself did not agree; one failure among them is a failure."""

HIDDEN = 2.0
"""A pass in a coarser dtype counts when the original error is more than this multiple of that trial's threshold."""

ALTERNATIVES = (
    "attn_mask",
    "key_value_head_stride_0",
    "query_layout",
    "key_value_layout",
    "bool_mask",
    "float_mask",
    "mask_head_broadcast",
    "fully_masked_rows",
    "left_padding",
    "scale",
    "enable_gqa",
    "memory_overlap",
)
"""Factors of which one of two may be enough for a bug, so that changing either alone does not cure it."""

MOST_PAIRS = 28

CANNOT_BE_MADE = (RuntimeError, ValueError, IndexError, InputError)
"""What PyTorch and the changes raise for a call that they cannot handle."""


@dataclass
class _Search:
    """The trials of one call: the failure that is looked for, what has been found so far, when to stop."""

    trial_for: TrialFor
    context: Mapping[str, Any]
    deadline: float | None
    progress: Callable[[str], None]
    first: Result = field(default_factory=lambda: Result(Status.AGREES))
    runs: int = 1
    trials: int = 0
    answers: dict[str, tuple[bool | None, Answer]] = field(default_factory=dict)
    cures: list[tuple[str, str]] = field(default_factory=list)

    def ask(self, trial: Trial, call: AttentionCall) -> Result:
        """One trial; for a flaky failure the first failing of several runs, else the last."""
        for _ in range(self.runs):
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise OutOfTimeError
            self.trials += 1
            result = without_output(trial(call))
            if result.fails or result.status is not Status.AGREES:
                break
        return result

    def outcome(self, variant: Variant, original: AttentionCall) -> Tried:
        """Try one variant: it fails as soon as one of its forms does, and else the first one that could run counts."""
        trial = self.trial_for(self.context if variant.context is None else variant.context)
        ran: list[tuple[Outcome, str]] = []
        for call in (variant.call, *variant.forms):
            result = self.ask(trial, call)
            outcome = _outcome(result, self.first, original, call)
            reason = result.reason if outcome in (Outcome.DECLINED, Outcome.INVALID) else ""
            ran.append((outcome, reason))
            if outcome in FAILING:
                break
        best = ran[-1] if ran[-1][0] in FAILING else min(ran, key=lambda one: one[0] is not Outcome.PASSES)
        return Tried(variant.words, *best, variant.line, variant.decides, variant.qualifies)


def _outcome(result: Result, first: Result, original: AttentionCall, changed: AttentionCall) -> Outcome:
    if same_failure(result, first):
        return Outcome.FAILS
    if result.fails:
        return Outcome.FAILS_OTHERWISE
    if result.status is Status.DECLINED:
        return Outcome.DECLINED
    if result.status is not Status.AGREES:
        return Outcome.INVALID
    coarser = unit_roundoff(changed.query.dtype) > unit_roundoff(original.query.dtype)
    if coarser and first.status is Status.DIVERGES and first.checked and result.checked:
        visible = first.checked.max_abs > HIDDEN * result.checked.threshold
        return Outcome.PASSES if visible else Outcome.HIDDEN
    return Outcome.PASSES


def conditions(
    call: AttentionCall,
    trial_for: TrialFor,
    context: Mapping[str, Any],
    *,
    others: Mapping[str, Trial] | None = None,
    known: Sequence[Match] = (),
    deadline: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Conditions:
    """Which factors the failure of `call` needs, and what helps on this very call.

    trial_for: trials of the suspected backend under given switches; `context`: those of the call. others: trials of
    other backends by name ("MATH", "eager"), to verify as workarounds. known: matched upstream bugs, for the release
    to upgrade to. After `deadline` (of `time.monotonic`), or Ctrl-C, what has been found so far is returned.
    """
    search = _Search(trial_for, context, deadline, progress or (lambda text: None))
    try:
        if not _confirm(search, call):
            return Conditions(False, trials=search.trials)
    except (OutOfTimeError, KeyboardInterrupt):
        return Conditions(search.first.fails, not_tested=_untried(search), trials=search.trials, complete=False)
    pairs: list[tuple[str, str]] = []
    workarounds: list[Workaround] = []
    complete = True
    try:
        setting = _setting(search, context)
        for factor in FACTORS:
            search.progress(f"condition: {factor.words}")
            needed, answer = _answer(search, factor, call, setting)
            search.answers[factor.id] = (needed, answer)
        pairs = _alternatives(search, call, setting)
        workarounds = _verified_backends(search, call, others or {})
    except (OutOfTimeError, KeyboardInterrupt):
        complete = False
    return _collected(search, pairs, [*_lines(search), *workarounds, *_upgrades(known)], complete)


def _confirm(search: _Search, call: AttentionCall) -> bool:
    """Whether the call itself fails: two runs, and a third when neither failed."""
    trial = search.trial_for(search.context)
    search.progress("does the call fail?")
    results = [search.ask(trial, call), search.ask(trial, call)]
    failing = [result for result in results if result.fails]
    if not failing and all(result.status is Status.AGREES for result in results):
        results.append(search.ask(trial, call))
        failing = [result for result in results if result.fails]
    if not failing:
        return False
    search.first = failing[0]
    if not all(same_failure(result, failing[0]) for result in results):
        search.runs = FLAKY_RUNS
    return True


def _setting(search: _Search, context: Mapping[str, Any]) -> Setting:
    """A place that is wrong: the first wrong row's batch and head, or (0, 0) for a crash."""
    rows = search.first.checked.rows if search.first.checked else ()
    batch, head = rows[0][:2] if rows else (0, 0)
    return Setting(context, batch, head, crashes=search.first.status in (Status.CRASHED, Status.TIMEOUT))


def _answer(search: _Search, factor: Factor, call: AttentionCall, setting: Setting) -> tuple[bool | None, Answer]:
    """Is the factor needed? None when that could not be tested."""
    try:
        if factor.control is not None:
            same = search.outcome(Variant("control", factor.control(call)), call)
            setting = replace(setting, controlled=same.outcome is Outcome.FAILS)
        tried = _tried(search, factor.offer, call, setting)
        if isinstance(tried, NoVariant):
            return (False if tried.absent else None), Answer(factor.id, factor.words, why=tried.words)
        needed = _decided(tried, factor.decides)
        if not needed and factor.further is not None:
            more = _tried(search, factor.further, call, setting)
            if not isinstance(more, NoVariant):
                tried = [*tried, *more]
                needed = _decided(tried, Decides.ANY)
    except CANNOT_BE_MADE as error:
        return None, Answer(factor.id, factor.words, why=f"this change cannot be made here: {first_line(error)}")
    line = _cure(tried)
    if line:
        search.cures.append((factor.words, line))
    return needed, Answer(factor.id, factor.words, tuple(tried))


def _tried(search: _Search, offer: Offer, call: AttentionCall, setting: Setting) -> list[Tried] | NoVariant:
    """Every variant tried, in order."""
    offered = offer(call, setting)
    if isinstance(offered, NoVariant):
        return offered
    return [search.outcome(variant, call) for variant in offered]


def _decided(tried: Iterable[Tried], decides: Decides) -> bool | None:
    """The answer that the outcomes give; None when nothing that counts could run."""
    counts = [one.outcome for one in tried if one.decides]
    if decides is Decides.FIRST:
        counts = counts[:1]
    elif decides is Decides.LAST:
        counts = counts[-1:]
    known = [outcome is Outcome.PASSES for outcome in counts if outcome in (*FAILING, Outcome.PASSES)]
    if not known:
        return None
    return any(known) if decides is Decides.ANY else all(known)


def _cure(tried: Sequence[Tried]) -> str:
    """The line of the variant that cures with the least change.

    Of several tensors made dense together and each alone, one alone is named when it is the only one that cures.
    """
    lines = [one.line for one in tried if one.line and one.outcome is Outcome.PASSES]
    return "" if not lines else lines[-1] if len(lines) == 2 and len(tried) > 2 else lines[0]


def _alternatives(search: _Search, call: AttentionCall, setting: Setting) -> list[tuple[str, str]]:
    """Pairs of factors of which neither alone is needed, but one of the two is.

    All candidates are changed together first: when the call still fails then, no pair can cure it.
    """
    answers = search.answers
    candidates = [
        factor
        for factor in FACTORS
        if factor.id in ALTERNATIVES and answers[factor.id][0] is False and answers[factor.id][1].tried
    ]
    if len(candidates) < 2 or _cured_by(search, candidates, call, setting) is not True:
        return []
    found = []
    for first, second in list(combinations(candidates, 2))[:MOST_PAIRS]:
        search.progress(f"conditions together: {first.words}, {second.words}")
        if _cured_by(search, [first, second], call, setting):
            found.append((first.id, second.id))
    return found


def _cured_by(search: _Search, factors: Sequence[Factor], call: AttentionCall, setting: Setting) -> bool | None:
    """Whether the call passes with the first variant of each factor, one on top of the other; None: not all apply."""
    changed, made = call, 0
    try:
        for factor in factors:
            offered = factor.offer(changed, setting)
            variant = None if isinstance(offered, NoVariant) else next(iter(offered), None)
            if variant is not None:
                changed, made = variant.call, made + 1
    except CANNOT_BE_MADE:
        return None
    if made < 2:
        return None
    return search.outcome(Variant("together", changed), call).outcome is Outcome.PASSES


def _verified_backends(search: _Search, call: AttentionCall, others: Mapping[str, Trial]) -> list[Workaround]:
    """Other backends that are right on this call."""
    found = []
    for name, trial in others.items():
        search.progress(f"workaround: {name}")
        if search.ask(trial, call).status is Status.AGREES:
            found.append(Workaround(f"{name} is right on this call", backend_line(name), True))
    return found


def backend_line(name: str) -> str:
    """Python that makes a program use a backend."""
    if name == "eager":
        return 'model.set_attn_implementation("eager")'
    return f"with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.{name}): ...  # around the call"


def _lines(search: _Search) -> list[Workaround]:
    """The changes to this call that cured it and leave its right result as it is."""
    return [Workaround(f"cured without {words}", line, True) for words, line in search.cures]


def _upgrades(known: Sequence[Match]) -> list[Workaround]:
    """The releases that fix the known bugs, which cannot be tried here; none for a bug fixed in the running one."""
    return [
        Workaround(f"fixed in torch {match.fixed_in} ({match.issue})", f"pip install 'torch>={match.fixed_in}'", False)
        for match in known
        if match.fixed_in and affected(torch.__version__, None, None, match.fixed_in)
    ]


def _untried(search: _Search) -> tuple[Answer, ...]:
    return tuple(
        Answer(factor.id, factor.words, why="stopped before this was tried")
        for factor in FACTORS
        if factor.id not in search.answers
    )


def _collected(
    search: _Search, pairs: Sequence[tuple[str, str]], workarounds: Sequence[Workaround], complete: bool
) -> Conditions:
    """Sort the answers into needed, not needed and not tested."""
    paired = {factor for pair in pairs for factor in pair}
    answers = list(search.answers.values())
    return Conditions(
        fails=True,
        flaky=search.runs > 1,
        needed=tuple(answer for needed, answer in answers if needed),
        not_needed=tuple(answer for needed, answer in answers if needed is False and answer.id not in paired),
        not_tested=(*(answer for needed, answer in answers if needed is None), *_untried(search)),
        alternatives=tuple(pairs),
        workarounds=tuple({found.line: found for found in workarounds}.values()),
        trials=search.trials,
        complete=complete,
    )
