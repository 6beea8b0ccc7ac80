"""Rules read back from their text, pairs counted once, and when the captured call's rule is stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.rules import Clause, Rule
from sdpa_repro.publishing import length_facts


def call_of(length: int) -> AttentionCall:
    return AttentionCall(*(torch.zeros(1, 1, length, 8) for _ in range(3)))


def explained(rule: str | None, **more: Any) -> dict[str, Any]:
    return {"length_rule": {"rule": rule, **more}}


@pytest.mark.parametrize(
    "rule",
    [
        Rule((Clause("S", "==", (1,), 32),)),
        Rule((Clause("L", "==", (1,), 64), Clause("L", ">", (1,)))),
        Rule((Clause("L", "in", (1, 5), 16), Clause("L", "<", against_s=True))),
        Rule((Clause("S", "from", (1, 9), 48), Clause("S", ">=", (128,)))),
    ],
    ids=str,
)
def test_a_rule_is_read_back_from_its_text(rule: Rule) -> None:
    assert length_facts.parsed(str(rule)) == rule


@pytest.mark.parametrize("text", [None, "", "L", "no simple rule", "L % 32 == 1 and x", "L == 1; import os"])
def test_other_text_is_no_rule(text: str | None) -> None:
    assert length_facts.parsed(text) is None


def test_a_pair_on_two_sweeps_counts_once() -> None:
    sweeps = [
        {"fixed": {"S - L": 2}, "failing": [[3, 4]], "passing": [[1, 2]]},
        {"fixed": {"S": 6}, "failing": [[4, 5]], "passing": []},
        {"fixed": {"L": 4}, "failing": [[6, 6]], "passing": [[1, 1]]},
    ]
    told = explained(None, sweeps=sweeps, apart=[{"L": 9, "S": 1, "fails": False}], fails=9, passes=9)
    assert length_facts.pairs(told) == {
        (3, 5): True,
        (4, 6): True,
        (1, 3): False,
        (2, 4): False,
        (5, 6): True,
        (4, 1): False,
        (9, 1): False,
    }
    assert length_facts.counts(told) == (3, 4)
    assert length_facts.counts(explained(None, fails=9, passes=8)) == (9, 8)
    assert length_facts.counts({}) is None


RIGHT = explained("S % 32 == 1", held_out=9, held_out_right=9)


def test_the_captured_calls_rule_is_stated_where_the_reduced_call_has_none() -> None:
    sweep = {"fixed": {"L": 33}, "failing": [[33, 33]], "passing": [[2, 32], [34, 66]]}
    few = explained(None, sweeps=[sweep])
    assert length_facts.adopted(few, RIGHT, call_of(33)) == "S % 32 == 1"
    assert length_facts.hidden(few, "S % 32 == 1") == (1, 2)


def test_the_captured_calls_rule_is_not_stated_where_it_would_be_wrong() -> None:
    assert length_facts.adopted(explained("L > 1"), RIGHT, call_of(33)) == ""
    assert length_facts.adopted({}, RIGHT, call_of(34)) == ""
    contrary = explained(None, sweeps=[{"fixed": {"L": 33}, "failing": [[33, 34]], "passing": []}])
    assert length_facts.adopted(contrary, RIGHT, call_of(33)) == ""
    missed = explained("S % 32 == 1", held_out=9, held_out_right=8)
    assert length_facts.adopted({}, missed, call_of(33)) == ""
    assert length_facts.adopted({}, explained("S % 32 == 1", held_out=0, held_out_right=0), call_of(33)) == ""
    assert length_facts.adopted({}, explained("x", held_out=1, held_out_right=1), call_of(33)) == ""
    assert length_facts.adopted({}, {}, call_of(33)) == ""


def test_a_call_is_told_from_another_by_its_sizes() -> None:
    assert length_facts.of_call(call_of(33)) == "head_dim 8, L = 33, S = 33"
