"""Two values are equal, within noise, different, or cannot be compared; the first token that differs is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sdpa_repro.locating.comparing import FACTOR, Difference, exact, floats, limit, movement, visibility, worst
from sdpa_repro.locating.notes import Value
from sdpa_repro.locating.table import Outcome


def value(tensor: Tensor, axis: int | None = -1, stage: str = "position_ids") -> Value:
    return Value(stage, "model", "", tensor, axis)


def hidden(tensor: Tensor) -> Value:
    return value(tensor, -2, "input")


def test_whole_numbers_are_equal_or_differ_at_a_token() -> None:
    ids = torch.arange(6)[None]
    other = ids.clone()
    other[0, 4] = 9
    assert exact(value(ids), value(ids.clone())).outcome is Outcome.EQUAL
    found = exact(value(ids), value(other))
    assert (found.outcome, found.moved, found.where) == (Outcome.DIFFERS, 1.0, "token 4: 9 instead of 4")
    assert found.detail == "1 of 6 tokens differ"


def test_pictures_of_the_same_bits_are_equal_with_nan_in_them() -> None:
    pixels = torch.tensor([[1.0, math.nan]])
    assert exact(value(pixels, None), value(pixels.clone(), None)).outcome is Outcome.EQUAL


def test_another_number_of_tokens_differs() -> None:
    found = exact(value(torch.zeros(1, 5)), value(torch.zeros(1, 4)))
    assert found.differs
    assert found.where == "shape (1, 4) instead of (1, 5)"


def test_a_key_more_or_less_is_named() -> None:
    plain = torch.ones(4, 4, dtype=torch.bool).tril()
    padded = plain.clone()
    padded[3, 1] = False
    found = visibility(plain, padded)
    assert found.where == "token 3 does not see token 1 in the padded run"
    assert visibility(padded, plain).where == "token 3 sees token 1 in the padded run"
    assert visibility(plain, plain).outcome is Outcome.EQUAL


@pytest.mark.parametrize(
    ("moved", "outcome"),
    [(0.0, Outcome.EQUAL), (0.9, Outcome.WITHIN_NOISE), (1.1, Outcome.DIFFERS), (math.nan, Outcome.DIFFERS)],
)
def test_a_float_may_move_by_a_factor_of_its_noise(moved: float, outcome: Outcome) -> None:
    plain = torch.zeros(1, 5, 3)
    padded = plain.clone()
    padded[0, 2, 1] = moved * FACTOR * 0.01
    found = floats(hidden(plain), hidden(padded), torch.full((5,), 0.01, dtype=torch.float64))
    assert found.outcome is outcome
    if outcome is Outcome.DIFFERS:
        assert found.where == "token 2, channel 1"
        assert found.detail == "1 of 5 tokens beyond noise"


def test_head_and_channel_of_a_query_are_named() -> None:
    plain = torch.zeros(1, 4, 5, 8)
    padded = plain.clone()
    padded[0, 3, 2, 6] = 1.0
    found = floats(value(plain, -2, "query"), value(padded, -2, "query"), torch.full((5,), 0.01, dtype=torch.float64))
    assert found.where == "token 2, head 3, channel 6"


def test_each_token_has_its_own_noise_but_none_less_than_the_middle_one() -> None:
    noise = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    assert limit(noise).tolist() == [FACTOR, FACTOR, 2 * FACTOR]


def test_without_noise_a_movement_is_not_judged_and_no_movement_is_equal() -> None:
    plain, padded = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    assert floats(hidden(plain), hidden(padded), None).outcome is Outcome.NOT_AVAILABLE
    assert floats(hidden(plain), hidden(plain), None).outcome is Outcome.EQUAL


def test_not_a_number_on_both_sides_has_not_moved() -> None:
    both = torch.tensor([[[math.nan, math.inf]]])
    assert movement(hidden(both), hidden(both.clone())).tolist() == [0.0]
    assert movement(hidden(both), hidden(torch.zeros(1, 1, 2))).tolist() == [math.inf]


def test_a_stage_is_equal_only_when_all_of_it_is() -> None:
    equal, noisy, wrong = (Difference(each) for each in (Outcome.EQUAL, Outcome.WITHIN_NOISE, Outcome.DIFFERS))
    assert worst([equal, noisy]) is noisy
    assert worst([equal, wrong, noisy]) is wrong
