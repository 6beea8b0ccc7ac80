"""What of an issue holds for the reduced call alone, and the worst element in numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.publishing import scope
from tests.calls import make_call
from tests.definition import attention


def rule(text: str) -> dict[str, Any]:
    return {"length_rule": {"rule": text}}


def call_of(width: int) -> AttentionCall:
    return AttentionCall(*(torch.zeros(1, 2, 5, width) for _ in range(3)))


def test_the_worst_element_is_told_with_what_it_should_be() -> None:
    call = replace(call_of(8), value=torch.full((1, 2, 5, 8), 32.0))
    wrong = torch.full((1, 2, 5, 8), 32.0)
    wrong[0, 1, 4, 3] = 0
    assert scope.worst_element(call, wrong, 32.0) == "element [0, 1, 4, 3]: expected 32, got 0"
    assert scope.worst_element(call, wrong.new_full(wrong.shape, float("nan")), float("nan")) == (
        "element [0, 0, 0, 0]: expected 32, got nan"
    )


def test_an_output_of_another_failure_or_of_none_says_nothing() -> None:
    call = call_of(8)
    right = torch.zeros(1, 2, 5, 8)
    assert scope.worst_element(call, right, 0.0) == ""
    assert scope.worst_element(call, right + 1, 32.0) == ""
    assert scope.worst_element(call, right + 1, float("inf")) == ""
    assert scope.worst_element(call, None, 1.0) == ""
    assert scope.worst_element(call, right + 1, None) == ""
    assert scope.worst_element(call, torch.ones(3), 1.0) == ""


def test_a_row_without_a_key_is_never_the_worst() -> None:
    call = make_call(rows=9, width=8, padding=3, dtype=torch.float32)
    output = attention(call).nan_to_num(0.0).float()
    output[:, :, 0] = 1e6
    output[0, 0, 8, 0] += 4
    assert scope.worst_element(call, output, 4.0).startswith("element [0, 0, 8, 0]: ")


def test_the_length_rule_says_what_holds_for_the_captured_call() -> None:
    small, large = call_of(8), call_of(512)
    here = rule("L % 64 == 1")
    other = scope.rule_note(small, here, large, rule("L % 32 == 1"))
    assert other == " (in the captured call, head_dim 512: L % 32 == 1)"
    same = scope.rule_note(small, here, large, here)
    assert same == " (the same in the captured call, head_dim 512)"
    one = scope.rule_note(small, here, large, {})
    assert one == " (at head_dim 8; not known for the captured call, head_dim 512)"
    assert scope.rule_note(small, here, call_of(8), here) == ""
    assert scope.rule_note(small, here, None, {}) == ""
    assert scope.rule_note(small, {}, large, rule("L % 32 == 1")) == ""


def test_many_words_about_lengths_become_a_summary_and_a_list() -> None:
    sweep = "S varied at L = 65: 138 lengths fail (" + ", ".join(map(str, range(60))) + "), 9 pass"
    near = "nearest passing: L = 64, S = 64"
    held = "90 lengths held out of the fit: 90 predicted right"
    words = ["fails when L % 64 == 1", sweep, "x", held, near]
    found = {"rule": "L % 64 == 1", "fails": 151, "passes": 486, "held_out": 90, "words": words}
    short, more = scope.lengths({"length_rule": found})
    counted = "151 pairs (L, S) fail and 486 pass, all as the rule says (90 of them held out of the fit)"
    assert short == f"{counted}; {near}"
    assert more == [sweep, "x"]
    assert scope.lengths({"length_rule": {**found, "words": ["x", near]}}) == (f"x; {near}", [])
    why, rest = scope.lengths({"length_rule": {"rule": None, "words": ["no rule fits", sweep, near]}})
    assert why == f"no rule fits; {near}"
    assert sweep in rest


def swept(text: str | None, **more: Any) -> dict[str, Any]:
    """S = L, 2…66 and S at L = 33, 2…66, with S % 32 == 1 failing and one pair in both; two pairs apart."""
    sweeps = [
        {"vary": "L and S", "fixed": {"S - L": 0}, "failing": [[33, 33], [65, 65]], "passing": [[2, 32], [34, 64]]},
        {"vary": "S", "fixed": {"L": 33}, "failing": [[33, 33], [65, 65]], "passing": [[2, 32], [34, 64], [66, 66]]},
    ]
    apart = [{"L": 7, "S": 97, "fails": True}, {"L": 9, "S": 12, "fails": False}]
    words = ["S = L: " + "a" * 120, "S varied: " + "b" * 120, "nearest passing: L = 32, S = 32"]
    told = {"rule": text, "sweeps": sweeps, "apart": apart, "words": words, **more}
    return {"length_rule": told}


def test_the_listed_lengths_add_up_to_what_the_table_says() -> None:
    short, more = scope.lengths(swept("S % 32 == 1"))
    assert short.startswith("4 pairs (L, S) fail and 126 pass, all as the rule says; nearest ")
    assert more[2:] == [
        "pairs (L, S) apart from these: (7, 97) fails; (9, 12) passes",
        "a pair on several of these lines counts once: 4 pairs (L, S) fail and 126 pass",
    ]


def test_the_lengths_of_the_captured_call_are_told_where_its_rule_is_stated() -> None:
    few = swept(None)
    few["length_rule"]["sweeps"][1].update(failing=[[33, 33]], passing=[[2, 32], [34, 66]])
    told = swept("S % 32 == 1", held_out=9, held_out_right=9)
    short, more = scope.lengths(few, told, call_of(64), "S % 32 == 1")
    assert short == (
        "captured call: 4 pairs (L, S) fail and 126 pass, all as the rule says (9 of them held out of the fit); "
        "reduced call: at its values 1 of the 4 pairs that the rule names do not show it"
    )
    assert more[0].startswith("captured call: S = L: aaa")
    assert more[-1].endswith("3 pairs (L, S) fail and 127 pass")


def test_a_rule_of_the_captured_call_that_is_not_stated_of_the_reduced_one_is_told_of_the_captured_one() -> None:
    short, _ = scope.lengths({"length_rule": {"words": ["no rule"]}}, rule("S > 9"), call_of(64))
    assert short == "no rule; the captured call (head_dim 64, L = 5, S = 5) fails when S > 9"


@pytest.mark.parametrize(
    ("line", "captured", "reduced", "note"),
    [
        ("attn_mask, is_causal = None, True", {}, True, " (for this reduced call)"),
        ("attn_mask, is_causal = None, True", {}, False, ""),
        ("key, value = key.contiguous(), value.contiguous()", {}, True, ""),
        ('model.set_attn_implementation("eager")', {}, False, " (models of transformers)"),
    ],
)
def test_a_line_says_where_it_holds(line: str, captured: dict[str, Any], reduced: bool, note: str) -> None:
    assert scope.workaround_note(line, captured, reduced=reduced) == note


def test_a_line_that_was_tried_on_the_captured_call_holds_there() -> None:
    line = "attn_mask, is_causal = None, True"
    for verified, note in ((True, ""), (False, " (for this reduced call)")):
        told = {"workarounds": [{"words": "x", "line": line, "verified": verified}]}
        assert scope.workaround_note(line, told, reduced=True) == note


def test_the_layout_names_tensors_that_are_alike_together() -> None:
    key = torch.zeros(1, 1, 5, 8).expand(1, 2, 5, 8)
    call = AttentionCall(torch.zeros(1, 2, 5, 8), key, key, is_causal=True)
    assert scope.layout(call) == (
        "float32; query (1, 2, 5, 8) stride (80, 40, 8, 1); key and value (1, 2, 5, 8) stride (40, 0, 8, 1); is_causal"
    )
