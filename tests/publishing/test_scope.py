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


def test_the_length_rule_is_given_for_each_head_dim() -> None:
    small, large = call_of(8), call_of(512)
    both = scope.length_scope(small, rule("L % 64 == 1"), large, rule("L % 32 == 1"))
    assert both == "at head_dim 8: L % 64 == 1; in the captured call (head_dim 512): L % 32 == 1"
    one = scope.length_scope(small, rule("L % 64 == 1"), large, {})
    assert one == "at head_dim 8: L % 64 == 1; the captured call has head_dim 512, where the rule may be another"
    assert scope.length_scope(small, rule("L % 64 == 1"), call_of(8), rule("L % 64 == 1")) == ""
    assert scope.length_scope(small, rule("L % 64 == 1"), None, {}) == ""
    assert scope.length_scope(small, {}, large, rule("L % 32 == 1")) == ""


def test_many_words_about_lengths_become_a_summary_and_a_list() -> None:
    sweep = "S varied at L = 65: 138 lengths fail (" + ", ".join(map(str, range(60))) + "), 9 pass"
    near = "nearest passing: L = 64, S = 64"
    found = {"rule": "L % 64 == 1", "fails": 151, "passes": 486, "words": ["fails when L % 64 == 1", sweep, "x", near]}
    short, more = scope.lengths({"length_rule": found})
    assert short == f"151 that fail and 486 that pass, all as L % 64 == 1 says; {near}"
    assert more == [sweep, "x"]
    assert scope.lengths({"length_rule": {**found, "words": ["x", near]}}) == (f"x; {near}", [])
    why, rest = scope.lengths({"length_rule": {"rule": None, "words": ["no rule fits", sweep, near]}})
    assert why == f"no rule fits; {near}"
    assert sweep in rest


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
