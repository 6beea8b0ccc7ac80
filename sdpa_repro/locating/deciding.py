"""Which of three lengths decides: the total, the prompt's, or the padding's; and the rule over it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sdpa_repro.explaining.rules import Rule, fit
from sdpa_repro.locating.grid import Point, Unreachable

__all__ = ["LengthRule", "decide"]

UNUSED = -1
"""What stands for the second length in a rule over one."""

LENGTHS: Mapping[str, Callable[[Point], int]] = MappingProxyType(
    {
        "total": lambda point: point.total,
        "prompt": lambda point: point.prompt,
        "padding": lambda point: point.pad,
    }
)
WORDS = MappingProxyType({"total": "total length", "prompt": "prompt length", "padding": "padding"})


@dataclass(frozen=True)
class LengthRule:
    """Which lengths fail.

    rule: such as "total % 32 == 1", None when nothing fails, all fails, or no simple rule separates them. over: the
    length that decides ("total length", "prompt length", "padding", or two of them). against: for each other length a
    sentence that shows that it does not decide. fails, passes: (prompt, padding) pairs.
    """

    rule: str | None
    over: str
    sentence: str
    against: tuple[str, ...]
    fails: tuple[tuple[int, int], ...]
    passes: tuple[tuple[int, int], ...]
    unreachable: tuple[Unreachable, ...] = ()

    def document(self) -> dict[str, Any]:
        """The rule as plain values."""
        return {
            "rule": self.rule,
            "over": self.over,
            "sentence": self.sentence,
            "against": list(self.against),
            "fails": [list(pair) for pair in self.fails],
            "passes": [list(pair) for pair in self.passes],
            "unreachable": [vars(each) for each in self.unreachable],
        }


def decide(points: Sequence[Point], unreachable: Sequence[Unreachable] = ()) -> LengthRule:
    """The simplest rule over one of the three lengths, or failing that over two, that fits all points exactly."""
    fails = [point for point in points if point.why]
    passes = [point for point in points if not point.why]
    counts = f"{len(fails)} of {len(points)} lengths fail"
    if not fails or not passes:
        text = f"none of {len(points)} lengths fails" if not fails else f"all {len(points)} lengths fail"
        return _result(None, "", text, (), fails, passes, unreachable)
    found = {name: rule for name in LENGTHS if (rule := _over(name, fails, passes)) is not None}
    if not found:
        return _over_two(fails, passes, unreachable, counts)
    name = min(found, key=lambda each: (sum(clause.cost for clause in found[each].clauses), list(LENGTHS).index(each)))
    text = _named(found[name], name)
    against = tuple(_against(other, found.get(other), fails, passes) for other in LENGTHS if other != name)
    others = " or the ".join(WORDS[other] for other in LENGTHS if other != name)
    sentence = f"fails when {text}: the {WORDS[name]} decides, not the {others} ({counts})"
    return _result(text, WORDS[name], sentence, against, fails, passes, unreachable)


def _over(name: str, fails: Sequence[Point], passes: Sequence[Point]) -> Rule | None:
    """The rule over one length; None when a value of it both fails and passes, or nothing simple separates them."""
    value = LENGTHS[name]
    bad, good = {value(point) for point in fails}, {value(point) for point in passes}
    if bad & good:
        return None
    return fit([(each, UNUSED) for each in sorted(bad)], [(each, UNUSED) for each in sorted(good)])


def _over_two(
    fails: Sequence[Point], passes: Sequence[Point], unreachable: Sequence[Unreachable], counts: str
) -> LengthRule:
    """A rule over two lengths, when none alone decides."""
    against = tuple(_against(name, None, fails, passes) for name in LENGTHS)
    for one, other in (("total", "padding"), ("prompt", "padding")):
        bad, good = (sorted({(LENGTHS[one](each), LENGTHS[other](each)) for each in part}) for part in (fails, passes))
        rule = fit(bad, good)
        if rule is not None:
            text = _named(rule, one, other)
            words = f"{WORDS[one]} and {WORDS[other]}"
            sentence = f"fails when {text}: {words} decide together ({counts})"
            return _result(text, words, sentence, against, fails, passes, unreachable)
    return _result(None, "", f"no simple rule over the lengths ({counts})", against, fails, passes, unreachable)


def _named(rule: Rule, first: str, second: str = "") -> str:
    """The rule with the names of the lengths in the places of L and S."""
    return re.sub(r"\b[LS]\b", lambda found: first if found[0] == "L" else second, str(rule))


def _against(name: str, rule: Rule | None, fails: Sequence[Point], passes: Sequence[Point]) -> str:
    """Why a length does not decide: a value of it that fails and passes, or the rule that it would take."""
    value = LENGTHS[name]
    for bad in fails:
        for good in passes:
            if value(bad) == value(good):
                return (
                    f"not the {WORDS[name]}: {value(bad)} fails in {bad.prompt} + {bad.pad} tokens "
                    f"and passes in {good.prompt} + {good.pad}"
                )
    if rule is not None:
        return f"over the {WORDS[name]} it would take {_named(rule, name)}"
    return f"no simple rule over the {WORDS[name]}"


def _result(
    rule: str | None,
    over: str,
    sentence: str,
    against: tuple[str, ...],
    fails: Sequence[Point],
    passes: Sequence[Point],
    unreachable: Sequence[Unreachable],
) -> LengthRule:
    bad, good = (tuple((point.prompt, point.pad) for point in part) for part in (fails, passes))
    return LengthRule(rule, over, sentence, against, bad, good, tuple(unreachable))
