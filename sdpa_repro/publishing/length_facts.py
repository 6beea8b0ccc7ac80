"""Which lengths fail: the pairs that were tried, and the rule of the captured call where the reduced one has none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.rules import Clause, Rule
from sdpa_repro.publishing.escaping import mapping

_RANGE = re.compile(r"(\d+) <= ([LS])(?: % (\d+))? <= (\d+)")
_LIST = re.compile(r"([LS])(?: % (\d+))? in \((\d+(?:, \d+)*)\)")
_COMPARISON = re.compile(r"([LS])(?: % (\d+))? (==|!=|<=|>=|<|>) (S|\d+)")


def parsed(text: Any) -> Rule | None:
    """The rule that is written so, such as "L % 32 == 1 and L > 1"; None for any other text."""
    clauses = [_clause(part) for part in str(text or "").split(" and ")]
    return None if None in clauses else Rule(tuple(clause for clause in clauses if clause is not None))


def _clause(text: str) -> Clause | None:
    if match := _RANGE.fullmatch(text):
        return Clause(match[2], "from", (int(match[1]), int(match[4])), int(match[3] or 0))
    if match := _LIST.fullmatch(text):
        return Clause(match[1], "in", tuple(map(int, match[3].split(", "))), int(match[2] or 0))
    if match := _COMPARISON.fullmatch(text):
        against = match[4] == "S"
        return Clause(match[1], match[3], () if against else (int(match[4]),), int(match[2] or 0), against)
    return None


def pairs(explained: Mapping[str, Any]) -> dict[tuple[int, int], bool]:
    """Every pair (L, S) that was tried, once, and whether it fails; from an explanation's document."""
    rule = mapping(explained.get("length_rule"))
    found: dict[tuple[int, int], bool] = {}
    for sweep in map(mapping, rule.get("sweeps") or ()):
        fixed = mapping(sweep.get("fixed"))
        for name, fails in (("failing", True), ("passing", False)):
            for first, last in sweep.get(name) or ():
                for number in range(first, last + 1):
                    found[_at(number, fixed)] = fails
    for one in map(mapping, rule.get("apart") or ()):
        found[one["L"], one["S"]] = one["fails"] is True
    return found


def _at(number: int, fixed: Mapping[str, int]) -> tuple[int, int]:
    """L and S of one number of a sweep that keeps L, S, or the difference of the two."""
    if "L" in fixed:
        return fixed["L"], number
    return number, fixed["S"] if "S" in fixed else number + fixed.get("S - L", 0)


def counts(explained: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many pairs (L, S) fail and how many pass, each counted once; None where that is not known."""
    tried = pairs(explained)
    if tried:
        failing = sum(tried.values())
        return failing, len(tried) - failing
    rule = mapping(explained.get("length_rule"))
    fails, passes = rule.get("fails"), rule.get("passes")
    return (fails, passes) if isinstance(fails, int) and isinstance(passes, int) else None


def adopted(explained: Mapping[str, Any], told: Mapping[str, Any], call: AttentionCall) -> str:
    """The captured call's rule where it is to be stated for want of one of the reduced call; else "".

    explained, call: the reduced call; told: of the captured one. It must have predicted every held-out pair, and no
    pair at which the reduced call fails may contradict it: a pass may be an error that its values hide in rounding.
    """
    text = mapping(told.get("length_rule")).get("rule")
    if mapping(explained.get("length_rule")).get("rule") or not _predicted(told):
        return ""
    rule = parsed(text)
    if rule is None or not rule.fails(call.query.shape[-2], call.key.shape[-2]):
        return ""
    return "" if any(fails and not rule.fails(*pair) for pair, fails in pairs(explained).items()) else str(rule)


def _predicted(explained: Mapping[str, Any]) -> bool:
    rule = mapping(explained.get("length_rule"))
    return bool(rule.get("held_out")) and rule.get("held_out_right") == rule.get("held_out")


def hidden(explained: Mapping[str, Any], rule: str) -> tuple[int, int]:
    """Of the pairs tried at which the rule says that it fails: how many pass, and how many there are."""
    known = parsed(rule)
    said = [fails for pair, fails in pairs(explained).items() if known is not None and known.fails(*pair)]
    return said.count(False), len(said)


def of_call(call: AttentionCall) -> str:
    """What tells one call from another in a sentence: "head_dim 64, L = 97, S = 97"."""
    return f"head_dim {call.query.shape[-1]}, L = {call.query.shape[-2]}, S = {call.key.shape[-2]}"
