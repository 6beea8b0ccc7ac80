"""The search for a length rule: which lengths to try, the fit, and predictions that may prove it wrong.

The rule is fitted to most of the lengths that were tried and has to predict the rest, then lengths beyond the
range and pairs of L and S that no sweep went through. After a wrong prediction it is fitted again, to all that is
known by then, and has to predict other lengths; a rule that keeps being wrong is no rule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdpa_repro.explaining.length_probe import Probe
from sdpa_repro.explaining.length_ranks import Pair
from sdpa_repro.explaining.length_result import TOGETHER, LengthRule, Sweep
from sdpa_repro.explaining.length_sweeps import ENOUGH_FAILURES, Field, so_far, try_lengths
from sdpa_repro.explaining.lengths import Resize
from sdpa_repro.explaining.rules import LARGEST_MODULUS, Clause, Rule, fit, gap

HELD_OUT = 8
"""One tested length in this many is held out of the first fit."""

FRESH = 5
"""Pairs of L and S apart from the sweeps that are predicted to fail, and to pass, and then tried."""

SECOND_LOOKS = 8
"""Passing lengths of one kind that are tried again with other masks; all of them when one fails then."""

ROUNDS = 4
"""Fits in all before it is said that there is no simple rule."""

BISECTIONS = 12
"""Trials to find where a bound lies."""

FEWEST = (3, 12)
"""Failing and passing lengths from which an interrupted search says a rule."""


@dataclass
class Search:
    """State of one search."""

    probe: Probe
    field: Field
    rule: Rule | None = None
    settled: bool = False
    why: str = ""
    held_out: int = 0
    held_out_right: int = 0
    refits: int = 0

    def run(self) -> None:
        """Try the lengths, then settle on a rule or on why there is none."""
        for axis in self.field.axes:
            try_lengths(self.probe, self.field, axis)
        self._look_again()
        self._settle()
        self.settled = True

    def holds_with(self, resize: Resize) -> bool:
        """Whether the nearest failing and passing lengths fail and pass with another form of the call too."""
        failing = {pair for axis in self.field.axes for pair in _nearest_failing(so_far(self.probe, axis))}
        answer = self.answer()
        passing = {pair for pair in (answer.below, answer.above) if pair}
        other = Probe(self.probe.trial, (resize, self.probe.resizes[-1]), self.probe.deadline, self.probe.progress)
        for pair in sorted(failing):
            if other.ask(*pair) is False and other.look_again(*pair) is False:
                return False
        return not any(other.ask(*pair) for pair in sorted(passing))

    def _look_again(self) -> None:
        """Ask once more, with other masks, where a simple rule would fail if it had one clause less.

        A fault that is too faint to see at some lengths, or hidden by their mask, would else pass for a bound.
        """
        for _ in range(ROUNDS):
            fails, passes = self.probe.pairs(True), self.probe.pairs(False)
            rough = fit(fails, passes, exceptions=max(2, len(passes) // 20))
            if rough is None:
                doubtful = [_sampled(passes, SECOND_LOOKS * 8, self.field.seed)]
            else:
                doubtful = [[pair for pair in passes if rough.fails(*pair)]]
                doubtful += [_excluded_alone(rough, clause, passes) for clause in rough.clauses]
            changed = [self._doubt(pairs) for pairs in doubtful]
            if not any(changed):
                return

    def _doubt(self, pairs: Sequence[Pair]) -> bool:
        """Look again at some pairs that passed, and at all of them when one fails now. Whether one does."""
        looks = [self.probe.look_again(*pair) for pair in _sampled(pairs, SECOND_LOOKS, self.field.seed)]
        if not any(looks):
            return False
        for pair in _sampled(pairs, SECOND_LOOKS * 16, self.field.seed):
            self.probe.look_again(*pair)
        return True

    def _settle(self) -> None:
        """Fit, predict, and fit again after a wrong prediction."""
        if self._nothing_decides():
            return
        held = self._held_out()
        for _ in range(ROUNDS):
            rule = self._fit(held)
            if rule is None and held:
                held = set()
                rule = self._fit(held)
            if rule is None:
                break
            tried = {*held, *self._ask_fresh(rule)} if self._wrong(rule, held) == 0 else held
            wrong = self._wrong(rule, tried)
            self.held_out, self.held_out_right = len(tried), len(tried) - wrong
            if not wrong:
                self.rule = rule
                return
            self.refits += 1
            held = set()
        self.why = "no simple rule over residues and bounds of L and S"

    def _nothing_decides(self) -> bool:
        if self._all_fail():
            self.why = "every length tried fails"
        return bool(self.why)

    def _all_fail(self) -> bool:
        """Whether every length that could be tested fails."""
        return not self.probe.pairs(False)

    def _held_out(self) -> set[Pair]:
        """A seeded part of the failing and of the passing lengths; few failing ones are all needed for the fit."""
        fails, passes = self.probe.pairs(True), self.probe.pairs(False)
        fails = [pair for pair in fails if pair != (self.field.rows, self.field.keys)]
        few = 0 if len(fails) <= ENOUGH_FAILURES else max(1, len(fails) // HELD_OUT)
        return {*_sampled(fails, few, self.field.seed), *_sampled(passes, len(passes) // HELD_OUT, self.field.seed)}

    def _fit(self, held: set[Pair]) -> Rule | None:
        """The simplest rule for what is known and not held out, its bounds tried out where they leave a gap."""
        rule: Rule | None = None
        for _ in range(2):
            fails = [pair for pair in self.probe.pairs(True) if pair not in held]
            passes = [pair for pair in self.probe.pairs(False) if pair not in held]
            rule = fit(fails, passes)
            if rule is None:
                break
            tried = [self._bisect(rule, clause, fails, passes) for clause in rule.clauses]
            if not any(tried):
                break
        return rule

    def _bisect(self, rule: Rule, clause: Clause, fails: Sequence[Pair], passes: Sequence[Pair]) -> bool:
        """Try lengths between the last one a bound excludes and the first one that fails. Whether any was tried."""
        if not clause.is_bound:
            return False
        outside, inside = gap(rule, clause, fails, passes)
        axis = self.field.axes[1 if clause.variable == "L" else 2]
        others = [other for other in rule.clauses if other is not clause]
        known = {*self.probe.outcomes, *self.probe.untested}
        between = [
            number
            for number in range(min(outside, inside) + 1, max(outside, inside))
            if axis.at(number) not in known and all(other.holds(*axis.at(number)) for other in others)
        ]
        asked = False
        for _ in range(BISECTIONS):
            between = [number for number in between if min(outside, inside) < number < max(outside, inside)]
            if not between:
                break
            number, asked = between.pop(len(between) // 2), True
            outcome = self.probe.ask(*axis.at(number))
            if outcome is not None:
                outside, inside = (outside, number) if outcome else (number, inside)
        return asked

    def _wrong(self, rule: Rule, pairs: Iterable[Pair]) -> int:
        """How many pairs the rule is wrong about, after a second look at those it says fail."""
        wrong = 0
        for pair in sorted(pairs):
            outcome = self.probe.outcomes[pair]
            if rule.fails(*pair) and not outcome:
                outcome = bool(self.probe.look_again(*pair))
            wrong += rule.fails(*pair) is not outcome
        return wrong

    def _ask_fresh(self, rule: Rule) -> set[Pair]:
        """Lengths beyond the range and pairs apart from the sweeps, half of them predicted to fail, now tried."""
        pairs = [*self._beyond(rule), *self._apart(rule, True), *self._apart(rule, False)]
        return {pair for pair in pairs if self.probe.ask(*pair) is not None}

    def _beyond(self, rule: Rule) -> list[Pair]:
        """The next two lengths that should fail, L and S tied, and those beside them."""
        if self.field.high is not None:
            return []
        axis = self.field.axes[0]
        tried = [number for pair in self.probe.outcomes if (number := axis.number(pair)) is not None]
        numbers = range(max(tried) + 1, max(tried) + 2 * LARGEST_MODULUS + 1)
        failing = [number for number in numbers if rule.fails(*axis.at(number))][:2]
        passing = [near for number in failing for near in (number - 1, number + 1) if near in numbers]
        passing = [number for number in passing if not rule.fails(*axis.at(number))] or list(numbers[:2])
        return [axis.at(number) for number in (*failing, *passing[:2])]

    def _apart(self, rule: Rule, fails: bool) -> list[Pair]:
        """Seeded pairs of L and S, from 2 on, that no sweep has tried."""
        (low_rows, high_rows), (low_keys, high_keys) = (self.field.range(axis) for axis in self.field.axes[1:])
        draw = random.Random(self.field.seed + 101 * self.refits + fails)
        count = 1 if fails and self.probe.costly else FRESH
        found: list[Pair] = []
        for _ in range(4000):
            rows = draw.randint(low_rows, max(low_rows, high_rows))
            pair = (rows, draw.randint(max(2, low_keys), max(2, low_keys, high_keys)))
            new = pair not in self.probe.outcomes and pair not in self.probe.untested and pair not in found
            if new and rule.fails(*pair) is fails:
                found.append(pair)
            if len(found) == count:
                break
        return found

    def _over(self, rule: Rule | None, sweeps: Sequence[Sweep]) -> str | None:
        """Which lengths decide."""
        if rule is not None:
            return rule.over or None
        return None if self._all_fail() else _deciding(sweeps)

    def answer(self, *, complete: bool = True, why: str = "") -> LengthRule:
        """What is known now; an interrupted search gives the rule that fits so far when there is enough to fit."""
        fails, passes = self.probe.pairs(True), self.probe.pairs(False)
        rule, why = self.rule, why or self.why
        if not self.settled and not complete and not why:
            enough = len(fails) >= FEWEST[0] and len(passes) >= FEWEST[1]
            rule = rule or (fit(fails, passes) if enough else None)
            why = "stopped before a rule could be told"
        sweeps = tuple(so_far(self.probe, axis) for axis in self.field.axes)
        on_sweeps = {pair for pair in (*fails, *passes) for axis in self.field.axes if axis.number(pair) is not None}
        below, above = _neighbours(sweeps)
        return LengthRule(
            rule=str(rule) if rule else None,
            over=self._over(rule, sweeps),
            fails=len(fails),
            passes=len(passes),
            held_out=self.held_out,
            held_out_right=self.held_out_right,
            below=below,
            above=above,
            sweeps=sweeps,
            apart=tuple((*pair, self.probe.outcomes[pair]) for pair in sorted({*fails, *passes} - on_sweeps)),
            untested=dict(Counter(self.probe.untested.values())),
            complete=complete,
            why="" if rule else why,
            refits=self.refits,
            fitted=rule,
        )


def _sampled(pairs: Sequence[Pair], count: int, seed: int) -> list[Pair]:
    return random.Random(seed).sample(list(pairs), min(count, len(pairs)))


def _deciding(sweeps: Sequence[Sweep]) -> str | None:
    """Which lengths decide where there is no rule that says it."""
    deciding = [sweep.axis.vary for sweep in sweeps if sweep.decides]
    alone = [vary for vary in deciding if vary != TOGETHER]
    return " and ".join(alone) or (TOGETHER if deciding else None)


def _neighbours(sweeps: Sequence[Sweep]) -> tuple[Pair | None, Pair | None]:
    """The nearest passing pairs on either side of the failing one, on the first sweep that has any."""
    for sweep in sweeps:
        below = [number for number in sweep.passes if number < sweep.axis.origin]
        above = [number for number in sweep.passes if number > sweep.axis.origin]
        if below or above:
            return (
                sweep.axis.at(below[-1]) if below else None,
                sweep.axis.at(above[0]) if above else None,
            )
    return None, None


def _nearest_failing(found: Sweep) -> list[Pair]:
    """The failing lengths of a sweep next to the failing call's own, one on either side."""
    below = [number for number in found.fails if number < found.axis.origin][-1:]
    above = [number for number in found.fails if number > found.axis.origin][:1]
    return [found.axis.at(number) for number in (*below, *above)]


def _excluded_alone(rule: Rule, clause: Clause, passes: Sequence[Pair]) -> list[Pair]:
    """Passing pairs that only this clause of the rule keeps from failing; none for a rule of one clause."""
    others = [other for other in rule.clauses if other is not clause]
    return [pair for pair in passes if others and all(other.holds(*pair) for other in others)]
