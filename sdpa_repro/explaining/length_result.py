"""What became of the search for a length rule: counts of each sweep, the rule, and both in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.explaining.length_ranks import Pair
from sdpa_repro.explaining.rules import Rule
from sdpa_repro.visibility import ranges, ranges_text

TOGETHER, ROWS, KEYS = "L and S", "L", "S"
"""What a sweep varies."""


@dataclass(frozen=True)
class Sweep:
    """What was tried on one line. vary: "L and S" (S - L kept), "L" (S fixed), "S" (L fixed).

    fails, passes, untested: the numbers tried, of L (of S when that is varied), in order.
    """

    axis: Axis
    fails: tuple[int, ...]
    passes: tuple[int, ...]
    untested: tuple[int, ...]

    @property
    def decides(self) -> bool:
        """Whether varying this changes the outcome."""
        return bool(self.fails and self.passes)

    def words(self, rule: Rule | None) -> str:
        """One line: range, and how many lengths fail and pass; by the rule when there is one."""
        tried = sorted((*self.fails, *self.passes))
        if not tried:
            return f"{self._title()}: nothing could be tested"
        title = f"{self._title()}, {tried[0]}…{tried[-1]}"
        if not self.passes or not self.fails:
            return f"{title}: {_all(len(tried), 'tried', 'fail' if self.fails else 'pass')}"
        where = self._where(rule)
        if where:
            others = f"all {len(self.passes)} others pass" if len(self.passes) > 1 else "the other one passes"
            return f"{title}: {_all(len(self.fails), f'with {where}', 'fail')}, {others}"
        return f"{title}: {_plural(len(self.fails))} fail ({_listed(self.fails)}), {len(self.passes)} pass"

    def document(self) -> dict[str, Any]:
        """Plain JSON types; lengths as inclusive ranges."""
        lists = {"failing": self.fails, "passing": self.passes, "not_tested": self.untested}
        fixed = {ROWS: {"S": self.axis.keys}, KEYS: {"L": self.axis.rows}}
        return {
            "vary": self.axis.vary,
            "fixed": fixed.get(self.axis.vary, {"S - L": self.axis.keys - self.axis.rows}),
            "fails": len(self.fails),
            "passes": len(self.passes),
            **{name: [list(part) for part in ranges(numbers)] for name, numbers in lists.items()},
        }

    def _title(self) -> str:
        if self.axis.vary == ROWS:
            return f"L varied at S = {self.axis.keys}"
        if self.axis.vary == KEYS:
            return f"S varied at L = {self.axis.rows}"
        apart = self.axis.keys - self.axis.rows
        return "S = L" if not apart else f"L varied with S = L {'+' if apart > 0 else '-'} {abs(apart)}"

    def _where(self, rule: Rule | None) -> str:
        """The clauses that matter here, when they say it exactly."""
        if rule is None or any(not rule.fails(*self.axis.at(number)) for number in self.fails):
            return ""
        if any(rule.fails(*self.axis.at(number)) for number in self.passes):
            return ""
        telling = [
            clause for clause in rule.clauses if any(not clause.holds(*self.axis.at(number)) for number in self.passes)
        ]
        return str(Rule(tuple(telling)))


@dataclass(frozen=True)
class LengthRule:
    """Which lengths fail.

    rule: for example "L % 32 == 1 and L > 1"; None when there is none, and `why` says so. over: "L", "S" or
    "L and S", the lengths that decide; None when none does or it is not known. fails, passes: pairs of lengths
    tried. held_out: how many were predicted after the fit, held_out_right: how many of them rightly.
    below, above: the nearest passing pairs, (L, S), next to the failing one. complete is False when time ran out
    or Ctrl-C was pressed.
    """

    rule: str | None
    over: str | None
    fails: int
    passes: int
    held_out: int
    held_out_right: int
    below: Pair | None
    above: Pair | None
    sweeps: tuple[Sweep, ...]
    apart: tuple[tuple[int, int, bool], ...] = ()
    """Pairs off the sweeps: L, S and whether they fail."""
    untested: dict[str, int] = field(default_factory=dict)
    """Why pairs could not be tested, and how many."""
    complete: bool = True
    why: str = ""
    refits: int = 0
    """Fits that a held-out length proved wrong."""
    fitted: Rule | None = None

    def words(self) -> list[str]:
        """Sentences: the rule, the counts of each sweep, the predictions, the neighbours, what is missing."""
        words = [f"fails when {self.rule}" if self.rule else self.why]
        words += [sweep.words(self.fitted) for sweep in self.sweeps if len(sweep.fails) + len(sweep.passes) > 1]
        if self.held_out:
            words.append(f"{_plural(self.held_out)} held out of the fit: {self.held_out_right} predicted right")
        near = " and ".join(f"L = {pair[0]}, S = {pair[1]}" for pair in (self.below, self.above) if pair)
        words += [f"nearest passing: {near}"] if near else []
        words += [f"{_plural(count)} not tested: {reason}" for reason, count in sorted(self.untested.items())]
        return words if self.complete else [*words, "incomplete: stopped before all lengths were tried"]

    def document(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "rule": self.rule,
            "over": self.over,
            "fails": self.fails,
            "passes": self.passes,
            "held_out": self.held_out,
            "held_out_right": self.held_out_right,
            "neighbours": {"below": _pair(self.below), "above": _pair(self.above)},
            "sweeps": [sweep.document() for sweep in self.sweeps],
            "refits": self.refits,
            "apart": [{"L": rows, "S": keys, "fails": fails} for rows, keys, fails in self.apart],
            "not_tested": dict(self.untested),
            "complete": self.complete,
            "why": self.why,
            "words": self.words(),
        }


def _pair(pair: Pair | None) -> list[int] | None:
    return list(pair) if pair else None


def _listed(numbers: tuple[int, ...]) -> str:
    return ranges_text(ranges(numbers), limit=8)


def _plural(number: int) -> str:
    return f"{number} length{'s' * (number != 1)}"


def _all(number: int, which: str, verb: str) -> str:
    """ "all 11 lengths with L % 32 == 1 fail", "1 length tried passes"."""
    if number == 1:
        return f"1 length {which} {verb}{'es' if verb == 'pass' else 's'}"
    return f"all {number} lengths {which} {verb}"
