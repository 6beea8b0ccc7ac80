"""What the kernel computed instead: hypotheses held against every wrong row, until one is left or none.

A hypothesis is reported when it predicts every wrong row to noise, in the call and on other values on which the
failure recurs, and no other hypothesis does. Right answers are not predicted by construction: only wrong rows count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.believed import Counterfactual
from sdpa_repro.explaining.counterfactuals import counterfactuals
from sdpa_repro.explaining.evidence import Evidence, gather, other_values
from sdpa_repro.explaining.log_sums import separated_by_log_sum_exp
from sdpa_repro.explaining.mask_rows import Rule, mask_row_rules, with_rule, wrapped_offsets
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.explaining.sentence import sentence_of
from sdpa_repro.replaying.check import full_precision
from sdpa_repro.replaying.trial import Result, Trial

ENOUGH = 2
"""Other sets of values on which the failure has to recur before the search for more of them ends."""

NEAR = 0.5
"""Share of the wrong rows from which a hypothesis that fails is worth showing."""

SHOWN = 5
"""Near misses kept."""

HEADS, ROWS = 3, 3
"""Heads and rows of each in the sample that rules most hypotheses out."""

CHUNK = 1024
"""Rows of one head compared at a time."""

SMALL = 1e11
"""Operations of a call up to which one thread does the comparing: its many small steps are over before several
threads have met, and on a busy machine meeting takes ten times longer than the work."""


@dataclass(frozen=True)
class NearMiss:
    """A hypothesis that fails: how many of the wrong rows it predicts, and why it is not reported."""

    id: str
    words: str
    matched: int
    wrong_rows: int
    reason: str


@dataclass(frozen=True)
class Hypothesis:
    """The answer for a call that is wrong; `id` and `sentence` are None when nothing explains it.

    `sets`: on how many sets of values the sentence holds, the call's own included. `complete` is False when the
    search was cut short.
    """

    id: str | None
    sentence: str | None
    near: tuple[NearMiss, ...] = ()
    tied: tuple[str, ...] = ()
    """Ids of hypotheses that predict the same rows and could not be told apart."""
    sets: int = 0
    complete: bool = True


def hypothesis(
    call: AttentionCall,
    output: Tensor | None,
    trial: Trial,
    *,
    deadline: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Hypothesis | None:
    """Say what the kernel computed instead of `call`, in float64 and on wrong rows alone.

    output: (B, H, L, Ev) of the failing backend on these very tensors; None for a crash. trial: runs that backend
    on another call. deadline: `time.monotonic()` after which the search stops (`complete=False`), as it does on
    Ctrl-C. Returns None when there is no output or nothing in it is wrong.
    """
    if output is None or 0 in output.shape or call.dropout_p > 0:
        return None
    survivors: list[Counterfactual] = []
    near: list[NearMiss] = []
    try:
        before = torch.get_num_threads()
        with torch.no_grad(), full_precision(), _threads(1 if _operations(call) < SMALL else before):
            try:
                first = gather(call, output)
            except ValueError:  # shapes that are no attention: there is nothing to compare with
                return None
            if not first.count:
                return None
            own_threads = _with_threads(trial, before)  # a kernel may depend on their number
            others = list(_recurring(call, own_threads, _clock(deadline), progress))
            for found in _search(first, others, _clock(deadline), progress):
                (near if isinstance(found, NearMiss) else survivors).append(found)  # type: ignore[arg-type]
            return _answer(first, others, survivors, near)
    except (KeyboardInterrupt, OutOfTimeError, torch.OutOfMemoryError):
        reason = "the search was cut short before its rivals were tested"
        near += [NearMiss(c.id, c.clause, 0, 0, reason) for c in survivors]
        return Hypothesis(None, None, _closest(near), complete=False)


def _operations(call: AttentionCall) -> float:
    """Floating-point operations of one attention over the call."""
    return 2.0 * prod(call.query.shape) * call.key.shape[-2] * 2


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """`count` threads for the block, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_threads(trial: Trial, count: int) -> Trial:
    def run(call: AttentionCall) -> Result:
        with _threads(count):
            return trial(call)

    return run


def _clock(deadline: float | None) -> Callable[[], None]:
    def look() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise OutOfTimeError

    return look


def _recurring(
    call: AttentionCall, trial: Trial, look: Callable[[], None], progress: Callable[[str], None] | None
) -> Iterator[Evidence]:
    """The call on other values, where it fails with an output again."""
    found = 0
    for number, other in enumerate(other_values(call), 1):
        look()
        if found >= ENOUGH:
            return
        if progress:
            progress(f"hypotheses: other values, set {number}")
        result = trial(other)
        if result.fails and result.output is not None:
            evidence = gather(other, result.output)
            if evidence.count:
                found += 1
                yield evidence


def _search(
    first: Evidence, others: list[Evidence], look: Callable[[], None], progress: Callable[[str], None] | None
) -> Iterator[Counterfactual | NearMiss]:
    """Every hypothesis that predicts all wrong rows everywhere, and those that come near."""
    telling = others[0] if others else first
    rules = mask_row_rules(telling.call, telling.places, telling.matches)
    elsewhere = [{c.key: c for c in _candidates(other.call, rules)} for other in others]
    candidates = _candidates(first.call, rules)
    for number, candidate in enumerate(candidates, 1):
        look()
        if progress:
            progress(f"hypotheses: {number} of {len(candidates)}")
        sample = _sample(first)
        if not _matched(first, candidate, sample, least=NEAR * _size(sample)):
            continue
        matched = _matched(first, candidate, first.wrong)
        if matched < first.count:
            if matched >= NEAR * first.count:
                yield _near(first, candidate, matched, "does not predict the other wrong rows")
        elif not others:
            yield _near(first, candidate, matched, "on other values the failure did not recur, so it is unconfirmed")
        elif all(_holds(other, known.get(candidate.key)) for other, known in zip(others, elsewhere, strict=True)):
            yield candidate
        else:
            yield _near(first, candidate, matched, "does not predict the wrong rows on other values")


def _candidates(call: AttentionCall, rules: list[Rule]) -> list[Counterfactual]:
    return [*counterfactuals(call), *(with_rule(call, rule) for rule in rules), *wrapped_offsets(call)]


def _near(first: Evidence, candidate: Counterfactual, matched: int, reason: str) -> NearMiss:
    return NearMiss(candidate.id, sentence_of(first, candidate), matched, first.count, reason)


def _holds(evidence: Evidence, candidate: Counterfactual | None) -> bool:
    """Whether a hypothesis predicts every wrong row."""
    if candidate is None:
        return False
    return _matched(evidence, candidate, evidence.wrong, least=evidence.count) == evidence.count


def _matched(
    evidence: Evidence, candidate: Counterfactual, places: Mapping[tuple[int, int], Tensor], *, least: float = 0.0
) -> int:
    """How many of the rows at `places` hold what the hypothesis predicts; 0 as soon as `least` is out of reach."""
    count, left = 0, _size(places)
    for (batch, head), rows in places.items():
        for part in rows.split(CHUNK):
            believed = candidate.compute(batch, head, part)
            if believed is not None:
                count += int(evidence.matches(batch, head, part, believed).sum())
            left -= len(part)
            if count + left < least:
                return 0
    return count


def _sample(evidence: Evidence) -> dict[tuple[int, int], Tensor]:
    """A few wrong rows, spread over heads and positions."""
    chosen = _spread(list(evidence.wrong), HEADS)
    return {place: evidence.wrong[place][_spread(list(range(len(evidence.wrong[place]))), ROWS)] for place in chosen}


def _spread(items: list[int] | list[tuple[int, int]], count: int) -> list:  # type: ignore[type-arg]
    """At most `count` of the items, first and last among them, evenly spread."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _size(places: Mapping[tuple[int, int], Tensor]) -> int:
    return sum(len(rows) for rows in places.values())


def _answer(
    first: Evidence, others: list[Evidence], survivors: list[Counterfactual], near: list[NearMiss]
) -> Hypothesis:
    """The plainest survivor's sentence; others that say something else are named as not to be told apart."""
    sets = 1 + len(others)
    if not survivors:
        return Hypothesis(None, None, _closest(near))
    best = survivors[0]
    sentence = sentence_of(first, best)
    if best.id == "rows_nan" and len(survivors) == 1:
        bound = separated_by_log_sum_exp([first, *others])
        if bound is not None:
            sentence += f": exactly the rows whose log-sum-exp is {bound}"
            return Hypothesis("nan_log_sum_exp", sentence, _closest(near), sets=sets)
    rivals = {c.clause: c.id for c in survivors if c.clause != best.clause}
    if rivals:
        sentence += f"; here that cannot be told apart from: {'; '.join(list(rivals)[:3])}"
    return Hypothesis(best.id, sentence, _closest(near), tuple(dict.fromkeys(rivals.values())), sets)


def _closest(near: list[NearMiss]) -> tuple[NearMiss, ...]:
    return tuple(sorted(near, key=lambda miss: -miss.matched)[:SHOWN])
