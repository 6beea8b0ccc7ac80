"""Why a dump's call fails: its conditions, its lengths, what was computed instead, and whether it is known."""

from __future__ import annotations

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
from sdpa_repro.explaining.hypotheses import Hypothesis, hypothesis
from sdpa_repro.explaining.length_rule import LengthRule, length_rule
from sdpa_repro.explaining.poison import Poison, poison, poison_isolated
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.interrupts import interrupts
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.trial import Trial, in_process, isolated
from sdpa_repro.replaying.verdict import Status

PARTS = ("conditions", "hypothesis", "length_rule", "poison")
"""The parts in the order in which they are worked out; known issues come with the replay."""

Progress = Callable[[str], None]
TrialFor = Callable[[Mapping[str, Any]], Trial]


@dataclass(frozen=True)
class Explanation:
    """What is known about the failure of one dump's call. Parts that were not worked out are None.

    `backend` is None, and everything else empty, when the call does not fail here.
    """

    path: Path
    backend: str | None
    replay: Replay
    conditions: Conditions | None = None
    hypothesis: Hypothesis | None = None
    length_rule: LengthRule | None = None
    poison: Poison | None = None
    seconds: float = 0.0
    complete: bool = True
    interrupted: bool = False
    """Whether Ctrl-C cut it short."""

    @property
    def known(self) -> tuple[Match, ...]:
        """Upstream issues that fit, the best fit first."""
        return self.replay.known

    @property
    def cause(self) -> str:
        """One sentence: what the backend does, and for which lengths; what is not known is not said."""
        if self.backend is None:
            return self.replay.sentence
        what = self.hypothesis.sentence if self.hypothesis else None
        rule = self.length_rule.rule if self.length_rule else None
        if what is None and rule is None:
            return self.replay.sentence
        subject = f"{self.backend}: {what}" if what else f"{self.backend} is wrong"
        return f"{subject}, when {rule}" if rule else subject

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable."""
        found = self.conditions.document() if self.conditions else {}
        return {
            "file": self.path.name,
            "backend": self.backend,
            "sentence": self.cause,
            "verdict": self.replay.verdict.value,
            "needed": found.get("needed", []),
            "not_needed": found.get("not_needed", []),
            "not_tested": found.get("not_tested", []),
            "alternatives": found.get("alternatives", []),
            "why": found.get("why", {}),
            "workarounds": found.get("workarounds", []),
            "length_rule": self.length_rule.document() if self.length_rule else None,
            "hypothesis": _hypothesis_document(self.hypothesis),
            "poison": self.poison.document() if self.poison else None,
            "known": self.replay.document()["known"],
            "replay": self.replay.document(),
            "seconds": self.seconds,
            "complete": self.complete,
            "preloaded": [dict(record) for record in self.replay.preloaded],
            "environment": dict(self.replay.environment),
        }


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

    lengths: range of L and S for the length rule. budget: seconds after which what is known is returned, as it
    is on Ctrl-C (`complete=False`). preload: Python files run in every process before the first call, this one
    included. over_ranks: this is rank 0 of several under torchrun, and the others run `assisting.assist`: the lengths
    are split over all of them. replayed: a replay of the captured dtype made before. Raises InputError for a bad dump
    or option.
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
    start = time.monotonic()
    say = progress or (lambda text: None)
    result = replayed or replay(path, device=device, dtypes=("captured",), runs=1, preload=preload, progress=progress)
    chosen = suspect(result, backend)
    if chosen is None:
        return Explanation(Path(path), None, result, seconds=time.monotonic() - start)
    dump = load(path, result.device)
    deadline = start + budget if budget else None
    work = _Work(dump, chosen, result, tuple(preload), deadline, throttled(say), dump.context)
    if not work.crashes:
        environment.preload([Path(file) for file in preload])
    found: dict[str, Any] = {}
    complete = True
    with interrupts() as pressed, work.trials() as trial_for, _few_threads(work, trial_for) as work:
        steps: dict[str, Callable[[], Any]] = {
            "conditions": partial(_conditions, work, trial_for),
            "hypothesis": partial(_hypothesis, work, trial_for),
            "length_rule": partial(_length_rule, work, trial_for, lengths, seed, helpers),
            "poison": partial(_poison, work, trial_for),
        }
        try:
            for part in (part for part in PARTS if part in parts):
                if work.late or pressed:
                    complete = False
                    break
                say(f"explaining: {part.replace('_', ' ')}")
                found[part] = steps[part]()
                complete &= getattr(found[part], "complete", True)
        except KeyboardInterrupt:
            complete = False
    if found.get("conditions") is not None and found.get("length_rule") is not None:
        found["conditions"] = with_rule(found["conditions"], found["length_rule"])
    seconds, interrupted = time.monotonic() - start, bool(pressed)
    return Explanation(
        Path(path), chosen.value, result, **found, seconds=seconds, complete=complete, interrupted=interrupted
    )


def with_rule(conditions: Conditions, rule: LengthRule) -> Conditions:
    """The conditions with the lengths that a rule decides among the needed ones.

    A condition is tried at a few lengths only, which a fault that begins at some length may survive.
    """
    if rule.rule is None or rule.over is None:
        return conditions
    decided = {f"length_{name}" for name in rule.over.split(" and ")}
    moved = tuple(
        replace(answer, why=f"fails when {rule.rule}") for answer in conditions.not_needed if answer.id in decided
    )
    kept = tuple(answer for answer in conditions.not_needed if answer.id not in decided)
    return replace(conditions, needed=(*conditions.needed, *moved), not_needed=kept)


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
    names = {member.value for member in Backend}
    return Backend(result.guilty[0]) if result.guilty[0] in names else Backend.DEFAULT


@dataclass(frozen=True)
class _Work:
    """What the parts share."""

    dump: Dump
    backend: Backend
    replay: Replay
    preload: tuple[str | Path, ...]
    deadline: float | None
    say: Progress

    context: Mapping[str, Any]

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    @property
    def crashes(self) -> bool:
        """Whether trials must not run in this process."""
        statuses = [c.status for c in self.replay.cells if self.backend.value in (c.backend, c.kernel)]
        return any(status in (Status.CRASHED, Status.TIMEOUT) for status in statuses)

    @property
    def call(self) -> AttentionCall:
        """A fresh copy of the call with its layout."""
        return prepared(self.dump, None)

    @contextmanager
    def trials(self) -> Iterator[TrialFor]:
        """Trials of the backend under given switches, in worker processes when it crashes."""
        if not self.crashes:
            yield partial(in_process, self.backend)
            return
        with ExitStack() as stack:
            made: dict[str, Trial] = {}

            def trial_for(context: Mapping[str, Any]) -> Trial:
                key = repr(sorted(context.items()))
                if key not in made:
                    made[key] = stack.enter_context(isolated(self.backend, context, preload=self.preload))
                return made[key]

            yield trial_for


@contextmanager
def _few_threads(work: _Work, trial_for: TrialFor) -> Iterator[_Work]:
    """Work on one CPU thread where the failure survives that: trials are small, and threads wait for each other."""
    if work.dump.call.query.device.type != "cpu" or work.crashes:
        yield work
        return
    alone = {**work.context, "threads": 1}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield replace(work, context=alone) if trial_for(alone)(work.call).fails else work
    finally:
        torch.set_num_threads(before)


def _conditions(work: _Work, trial_for: TrialFor) -> Conditions:
    rivals = (
        Backend.MATH,
        Backend.EAGER,
        Backend.FLASH_ATTENTION,
        Backend.EFFICIENT_ATTENTION,
        Backend.CUDNN_ATTENTION,
    )
    right = {cell.backend for cell in work.replay.cells if cell.status is Status.AGREES}
    others: dict[str, Trial] = {
        str(rival.value): in_process(rival, work.context)
        for rival in rivals
        if rival is not work.backend and rival.value in right
    }
    return conditions(
        work.call,
        trial_for,
        work.context,
        others=others,
        known=work.replay.known,
        deadline=work.deadline,
        progress=work.say,
    )


def _hypothesis(work: _Work, trial_for: TrialFor) -> Hypothesis | None:
    call, trial = work.call, trial_for(work.context)
    return hypothesis(call, trial(call).output, trial, deadline=work.deadline, progress=work.say)


def _length_rule(
    work: _Work, trial_for: TrialFor, lengths: tuple[int, int] | None, seed: int, helpers: Helpers
) -> LengthRule:
    low, high = lengths or (1, None)
    plan = Plan(work.backend, work.replay.device, work.context, work.crashes)
    return length_rule(
        work.call,
        helpers.share(plan, trial_for(work.context)),
        low=low,
        high=high,
        deadline=work.deadline,
        progress=work.say,
        seed=seed,
    )


def _poison(work: _Work, trial_for: TrialFor) -> Poison:
    if work.crashes:
        return poison_isolated(
            work.dump.path or work.replay.path, work.backend, device=work.replay.device, preload=work.preload
        )
    return poison(work.call, trial_for(work.context), deadline=work.deadline)


def _hypothesis_document(found: Hypothesis | None) -> dict[str, Any] | None:
    if found is None or found.id is None:
        return None
    return {"id": found.id, "sentence": found.sentence, "tied": list(found.tied), "sets": found.sets}
