"""Why a dump's call fails: its conditions, its lengths, what was computed instead, and whether it is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sdpa_repro import environment, ranks
from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import Dump, load
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.answers import Conditions
from sdpa_repro.explaining.assisting import Helpers, Plan
from sdpa_repro.explaining.conditions import conditions
from sdpa_repro.explaining.confirming import confirmed
from sdpa_repro.explaining.explanation import Explanation
from sdpa_repro.explaining.hurried import LATER, replay_within, unjudged
from sdpa_repro.explaining.hypotheses import Hypothesis, hypothesis
from sdpa_repro.explaining.length_rule import LengthRule, length_rule
from sdpa_repro.explaining.pacing import Budget, OutOfTimeError, Pace, work_of
from sdpa_repro.explaining.poison import Poison, poison, poison_isolated
from sdpa_repro.explaining.stand_in import (
    StandIn,
    conditions_at,
    hypothesis_at,
    poison_at,
    replayed_shorter,
    rule_for,
    stand_in,
)
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.interrupts import interrupts
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.trial import Trial, in_process, isolated
from sdpa_repro.replaying.verdict import Status

__all__ = ["PARTS", "Explanation", "explain", "suspect", "throttled", "with_rule"]

PARTS = ("conditions", "hypothesis", "length_rule", "poison")
"""The parts in the order in which they are worked out; known issues come with the replay."""

TRIALS = 150
"""Trials that all parts take at least; where the time does not last for them, a shorter call is explained."""

TIMEOUT, LEAST_TIMEOUT = 30.0, 5.0
"""Seconds after which a trial is taken to hang: usually, and where there is little time."""

Progress = Callable[[str], None]
TrialFor = Callable[[Mapping[str, Any]], Trial]


def explain(
    path: str | Path,
    *,
    device: str | None = None,
    backend: str | None = None,
    preload: Sequence[str | Path] = (),
    lengths: tuple[int, int] | None = None,
    budget: float | None = None,
    parts: Sequence[str] = PARTS,
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
    replayed: Replay | None = None,
) -> Explanation:
    """Replay a dump in its captured dtype and explain the failure of `backend` (default: the guilty one).

    lengths: range of L and S for the length rule. budget: seconds for all of it, the replay included, after which
    what is known is returned, as it is on Ctrl-C (`complete=False`); where a trial takes so long that it would not
    last, a shorter call that fails in the same way is explained (`stand_in`). preload: Python files run in every
    process before the first call, this one included. over_ranks: this is rank 0 of several under torchrun, and the
    others run `assisting.assist`: the lengths are split over all of them. replayed: a replay of the captured dtype made
    before. Raises InputError for a bad dump or option.
    """
    with Helpers(over_ranks and ranks.world() > 1) as helpers:
        return _explain(path, device, backend, preload, lengths, budget, parts, seed, progress, helpers, replayed)


def _explain(
    path: str | Path,
    device: str | None,
    backend: str | None,
    preload: Sequence[str | Path],
    lengths: tuple[int, int] | None,
    budget: float | None,
    parts: Sequence[str],
    seed: int,
    progress: Progress | None,
    helpers: Helpers,
    replayed: Replay | None,
) -> Explanation:
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise InputError(f"unknown part {sorted(unknown)[0]!r}: choose from {', '.join(PARTS)}")
    time_given = Budget(budget or None)
    say = progress or (lambda text: None)
    result = replayed
    left_out: tuple[str, ...] = ()
    if result is None:
        result, left_out = replay_within(
            path, time_given, device=device, backend=backend, preload=preload, progress=progress
        )
    chosen, place = suspect(result, backend), None
    judged = chosen is not None or not unjudged(left_out)
    if not judged:
        say("there is no time to judge the call: looking for a shorter one that fails")
        place, result = replayed_shorter(
            result, time_given, lambda one: suspect(one, backend) is not None, preload=preload, progress=progress
        )
        chosen = suspect(result, backend)
    if chosen is None:
        seconds = time.monotonic() - time_given.start
        left: dict[str, Any] = {"complete": not left_out, "left_out": left_out, "judged": judged}
        return Explanation(Path(path), None, result, seconds=seconds, **left)
    dump = load(path, result.device)
    if any(cell.status is Status.ERROR for cell in _wrong_cells(result, chosen)):
        parts = ()  # trials take an exception for a refused call
    work = _Work(dump, chosen, result, tuple(preload), Pace(time_given), throttled(say), dump.context, place, judged)
    if not work.crashes:
        environment.preload([Path(file) for file in preload])
    found: dict[str, Any] = {}
    complete = True
    with interrupts() as pressed, ExitStack() as stack:
        try:
            trial_for = stack.enter_context(work.trials())
            work = _shortened(work, trial_for)
            work = stack.enter_context(_few_threads(work, trial_for))
            steps: dict[str, Callable[[], Any]] = {
                "conditions": partial(_conditions, work, trial_for),
                "hypothesis": partial(_hypothesis, work, trial_for),
                "length_rule": partial(_length_rule, work, trial_for, lengths, seed, helpers),
                "poison": partial(_poison, work, trial_for),
            }
            for part in (part for part in PARTS if part in parts):
                if work.late or pressed:
                    complete = False
                    break
                say(f"explaining: {part.replace('_', ' ')}")
                found[part] = steps[part]()
                complete &= getattr(found[part], "complete", True)
            if judged and work.shorter is not None and found.get("conditions") is not None:
                say("trying the workarounds on the call itself")
                right = {cell.backend for cell in result.cells if cell.status is Status.AGREES}
                whole = prepared(dump, None)
                found["conditions"] = confirmed(found["conditions"], whole, trial_for, dump.context, right)
        except (KeyboardInterrupt, OutOfTimeError):
            complete = False
    if found.get("conditions") is not None and found.get("length_rule") is not None:
        found["conditions"] = with_rule(found["conditions"], found["length_rule"])
    place = work.shorter
    missing = () if complete else tuple(part for part in PARTS if part in parts and part not in found)
    return Explanation(
        Path(path),
        chosen.value,
        result,
        **found,
        seconds=time.monotonic() - time_given.start,
        complete=complete,
        interrupted=bool(pressed),
        judged=judged,
        stand_in=None if place is None else (place.rows, place.keys),
        left_out=(*left_out, *missing),
    )


def with_rule(conditions: Conditions, rule: LengthRule) -> Conditions:
    """The conditions with the lengths that a rule decides among the needed ones.

    A condition is tried at a few lengths only, which a fault that begins at some length may survive.
    """
    if rule.rule is None or rule.over is None:
        return conditions
    decided = {f"length_{name}" for name in rule.over.split(" and ")}
    moved = tuple(
        replace(answer, why=f"fails when {rule.rule}")
        for answer in (*conditions.not_needed, *conditions.not_tested)
        if answer.id in decided
    )
    kept, open_ = (
        tuple(answer for answer in answers if answer.id not in decided)
        for answers in (conditions.not_needed, conditions.not_tested)
    )
    return replace(conditions, needed=(*conditions.needed, *moved), not_needed=kept, not_tested=open_)


def throttled(say: Progress, seconds: float = 2.0) -> Progress:
    """Pass on at most one text in so many seconds: a sign of life, not a log."""
    spoke = time.monotonic()

    def sometimes(text: str) -> None:
        nonlocal spoke
        if time.monotonic() - spoke >= seconds:
            spoke = time.monotonic()
            say(text)

    return sometimes


def suspect(result: Replay, backend: str | None = None) -> Backend | None:
    """The backend to explain: the one asked for, else the first guilty one; None when nothing is wrong."""
    if backend is not None:
        try:
            chosen = Backend(backend)
        except ValueError:
            known = ", ".join(member.value for member in Backend)
            raise InputError(f"no backend {backend!r}: choose from {known}") from None
        cell = next((cell for cell in result.cells if cell.backend == chosen.value), None)
        return chosen if cell is not None and cell.wrong else None
    if not result.guilty:
        return None
    name = result.guilty[0]
    right = any(cell.backend == name and cell.status is Status.AGREES for cell in result.cells)
    named = name in {member.value for member in Backend}
    return Backend(name) if named and not right else Backend.DEFAULT  # right: only the default path that named it fails


def _wrong_cells(result: Replay, backend: Backend) -> list[Cell]:
    """The cells in which a backend failed, by itself or through the default path."""
    return [cell for cell in result.cells if backend.value in (cell.backend, cell.kernel) and cell.wrong]


@dataclass(frozen=True)
class _Work:
    """What the parts share."""

    dump: Dump
    backend: Backend
    replay: Replay
    preload: tuple[str | Path, ...]
    pace: Pace
    say: Progress
    context: Mapping[str, Any]
    shorter: StandIn | None = None
    """What is explained in place of the dumped call, for want of time."""
    judged: bool = True
    """Whether the dumped call was seen to fail; else the replay is that of the shorter one."""

    @property
    def late(self) -> bool:
        return self.pace.budget.left < 0

    @property
    def deadline(self) -> float | None:
        """When the time is up."""
        return self.pace.budget.deadline

    @property
    def crashes(self) -> bool:
        """Whether trials must not run in this process."""
        statuses = [c.status for c in self.replay.cells if self.backend.value in (c.backend, c.kernel)]
        return any(status in (Status.CRASHED, Status.TIMEOUT) for status in statuses)

    @property
    def call(self) -> AttentionCall:
        """The call to explain, with its layout."""
        return prepared(self.dump, None) if self.shorter is None else self.shorter.call

    @contextmanager
    def trials(self) -> Iterator[TrialFor]:
        """Trials of the backend under given switches, in worker processes when it crashes."""
        if not self.crashes:
            yield lambda context: self.pace.trial(in_process(self.backend, context))
            return
        timeout = min(TIMEOUT, max(LEAST_TIMEOUT, (self.pace.budget.seconds or math.inf) / 10))
        with ExitStack() as stack:
            made: dict[str, Trial] = {}

            def trial_for(context: Mapping[str, Any]) -> Trial:
                key = repr(sorted(context.items()))
                if key not in made:
                    trial = stack.enter_context(isolated(self.backend, context, preload=self.preload, timeout=timeout))
                    made[key] = self.pace.trial(trial)
                return made[key]

            yield trial_for


def _shortened(work: _Work, trial_for: TrialFor) -> _Work:
    """The work on a shorter call, where the time does not last for trials of the dumped one and another one fails."""
    cells = _wrong_cells(work.replay, work.backend)
    if work.pace.budget.seconds is None or work.late or not cells or work.shorter is not None:
        return work
    call = work.call
    work.pace.learn(work_of(call), 2 * max(cell.seconds or 0.0 for cell in cells))  # checking takes as long again
    if work.pace.budget.left > TRIALS * work.pace.expected(work_of(call)):
        return work
    work.say("looking for a shorter call that fails in the same way")
    return replace(work, shorter=stand_in(call, trial_for(work.context), cells[0].status))


@contextmanager
def _few_threads(work: _Work, trial_for: TrialFor) -> Iterator[_Work]:
    """Work on one CPU thread where the failure survives that: trials are small, and threads wait for each other."""
    one = work.context.get("threads", torch.get_num_threads()) == 1
    if one or work.dump.call.query.device.type != "cpu" or work.crashes:
        yield work
        return
    alone = {**work.context, "threads": 1}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield replace(work, context=alone) if trial_for(alone)(work.call).fails else work
    finally:
        torch.set_num_threads(before)


def _rivals(work: _Work) -> dict[str, Trial]:
    """Trials of the other backends, by name, that are right on the dumped call or were left out there."""
    rivals = (
        Backend.MATH,
        Backend.EAGER,
        Backend.FLASH_ATTENTION,
        Backend.EFFICIENT_ATTENTION,
        Backend.CUDNN_ATTENTION,
    )
    right = {cell.backend for cell in work.replay.cells if cell.status is Status.AGREES or cell.reason == LATER}
    return {
        str(rival.value): work.pace.trial(in_process(rival, work.context))
        for rival in rivals
        if rival is not work.backend and rival.value in right
    }


def _conditions(work: _Work, trial_for: TrialFor) -> Conditions:
    found = conditions(
        work.call,
        trial_for,
        work.context,
        others=_rivals(work),
        known=work.replay.known,
        deadline=work.deadline,
        progress=work.say,
    )
    return found if work.shorter is None else conditions_at(found, work.shorter)


def _hypothesis(work: _Work, trial_for: TrialFor) -> Hypothesis | None:
    call, trial = work.call, trial_for(work.context)
    found = hypothesis(call, trial(call).output, trial, deadline=work.deadline, progress=work.say)
    return found if work.shorter is None else hypothesis_at(found, work.shorter)


def _length_rule(
    work: _Work, trial_for: TrialFor, lengths: tuple[int, int] | None, seed: int, helpers: Helpers
) -> LengthRule:
    low, high = lengths or (1, None)
    work = work if lengths is None or not work.judged else replace(work, shorter=None)
    place = work.shorter
    made = None if place is None else (place.rows, place.keys, place.mask)
    plan = Plan(work.backend, work.replay.device, work.context, work.crashes, made)
    found = length_rule(
        work.call,
        helpers.share(plan, trial_for(work.context)),
        low=low,
        high=high,
        deadline=work.deadline,
        progress=work.say,
        seed=seed,
    )
    whole = work.dump.call
    return found if place is None or not work.judged else rule_for(found, whole.query.shape[-2], whole.key.shape[-2])


def _poison(work: _Work, trial_for: TrialFor) -> Poison:
    if work.crashes and not work.judged:
        return Poison(None, "not tested: there is no time to run the call itself")
    if work.crashes:
        path, left = work.dump.path or work.replay.path, max(LEAST_TIMEOUT, work.pace.budget.left)
        return poison_isolated(
            path, work.backend, device=work.replay.device, preload=work.preload, timeout=min(2 * TIMEOUT, left)
        )
    found = poison(work.call, trial_for(work.context), deadline=work.deadline)
    return found if work.shorter is None else poison_at(found, work.shorter)
