"""Which of the lengths decides, on lengths of which the answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sdpa_repro.locating.deciding import decide
from sdpa_repro.locating.grid import Point, Unreachable, planned


def points(fails: Callable[[int, int], bool], prompt: int = 282) -> list[Point]:
    """The lengths of a whole sweep and grid, failing as `fails(prompt, padding)` says."""
    tried = dict.fromkeys([(prompt, pad) for pad in range(64)] + planned(prompt))
    return [Point(own, pad, "wrong" if fails(own, pad) else "") for own, pad in tried]


@pytest.mark.parametrize(
    ("fails", "rule", "over"),
    [
        (lambda prompt, pad: (prompt + pad) % 32 == 1, "total % 32 == 1", "total length"),
        (lambda prompt, pad: (prompt + pad) % 64 == 1, "total % 64 == 1", "total length"),
        (lambda prompt, pad: pad % 32 == 7, "padding % 32 == 7", "padding"),
        (lambda prompt, pad: pad > 0, "padding >= 1", "padding"),
        (lambda prompt, pad: prompt == 282, "prompt == 282", "prompt length"),
        (lambda prompt, pad: prompt + pad == 289, "total == 289", "total length"),
    ],
)
def test_the_length_that_decides_is_named_with_its_rule(
    fails: Callable[[int, int], bool], rule: str, over: str
) -> None:
    found = decide(points(fails))
    assert (found.rule, found.over) == (rule, over)
    assert f"the {over} decides, not the " in found.sentence


def test_each_length_that_does_not_decide_has_a_counterexample() -> None:
    found = decide(points(lambda prompt, pad: (prompt + pad) % 32 == 1))
    by = {text.partition(":")[0]: text for text in found.against}
    assert set(by) == {"not the prompt length", "not the padding"}
    assert "fails in 282 + 7 tokens and passes in 282 + 0" in by["not the prompt length"]


def test_two_lengths_may_decide_together() -> None:
    found = decide(points(lambda prompt, pad: (prompt + pad) % 32 == 1 and pad > 0))
    assert found.over == "total length and padding"
    assert found.rule == "total % 32 == 1 and padding >= 1"


def test_without_a_failure_or_without_a_success_there_is_no_rule() -> None:
    none = decide(points(lambda prompt, pad: False), [Unreachable(31, 31, "too short")])
    assert (none.rule, none.fails) == (None, ())
    assert none.sentence.startswith("none of ")
    assert none.document()["unreachable"] == [{"prompt": 31, "total": 31, "reason": "too short"}]
    assert decide(points(lambda prompt, pad: True)).sentence.startswith("all ")


def test_a_failure_without_a_pattern_is_said_to_have_none() -> None:
    wild = {(282, 0), (282, 5), (282, 11), (282, 12), (282, 29), (282, 40), (282, 58), (33, 31), (97, 190)}
    found = decide(points(lambda prompt, pad: (prompt, pad) in wild))
    assert found.rule is None or found.fails == tuple(sorted(found.fails))


def test_prompt_padding_and_total_each_take_all_lengths_around_the_tiles() -> None:
    pairs = planned(282)
    wanted = {31, 32, 33, 63, 64, 65, 95, 96, 97, 287, 288, 289, 290}
    assert wanted <= {prompt for prompt, _ in pairs}
    assert wanted <= {pad for _, pad in pairs}
    assert wanted <= {prompt + pad for prompt, pad in pairs}
    assert len(set(pairs)) == len(pairs)
