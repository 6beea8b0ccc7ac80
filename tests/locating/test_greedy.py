"""Greedy continuations, padded and unpadded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as File

import pytest
import torch

from sdpa_repro.capturing.prefill import PrefillOptions, forward, padded, prepare
from sdpa_repro.errors import InputError
from sdpa_repro.locating.greedy import Continuation, continuations
from sdpa_repro.locating.running import Path
from tests import models
from tests.capturing import faults
from tests.locating.prefills import FAILING, LENGTH, full, small


def test_a_healthy_model_goes_on_in_the_same_way_on_both_paths() -> None:
    prefill = small()
    found = continuations(prefill, FAILING - LENGTH, 3)
    assert [each.path for each in found] == [Path.DEFAULT, Path.MATH]
    first = int(forward(prefill, padded(prefill, LENGTH)).argmax())
    for each in found:
        assert each.plain == each.padded
        assert each.plain[0] == first
        assert 1 <= len(each.plain) <= 3
        assert each.first is None
        assert "same" in each.sentence


def test_the_planted_fault_changes_what_is_said_and_math_does_not() -> None:
    prefill = small()
    padding = FAILING - LENGTH
    faults.plant("pytorch_191937")
    default, math = continuations(prefill, padding, 8)
    assert math.first is None
    inputs = padded(prefill, FAILING)
    assert default.padded[0] == int(forward(prefill, inputs).argmax())


def test_the_first_token_that_differs_is_named() -> None:
    found = Continuation(Path.DEFAULT, 7, (4, 5, 6), (4, 9, 6))
    assert found.first == 1
    assert found.sentence == "greedy, default: token 1 differs: 5 unpadded, 9 with 7 tokens of padding"
    shorter = Continuation(Path.MATH, 7, (4, 5, 6), (4, 5))
    assert shorter.first == 2
    assert "6 unpadded, the end with 7" in shorter.sentence
    assert shorter.document()["first_difference"] == 2


def test_an_encoder_decoder_model_continues_on_its_decoder(tmp_path: File) -> None:
    models.save_bart(tmp_path / "bart")
    prefill = prepare(PrefillOptions(model=str(tmp_path / "bart"), prompt="the cat sat", device="cpu"))
    default, math = continuations(prefill, 5, 3)
    assert default.plain == default.padded == math.plain
    assert default.plain


def test_a_model_without_positions_for_the_answer_says_so() -> None:
    with pytest.raises(InputError, match="positions for 58 tokens: 59 are too many"):
        continuations(full(), 0, 2)
    assert continuations(full(), 0, 1)[0].first is None


def test_what_cannot_generate_says_so() -> None:
    prefill = small()
    with pytest.raises(InputError, match="goes on after the padding"):
        continuations(replace(prefill, padding_side="right"), 3, 2)
    with pytest.raises(InputError, match="has no generate"):
        continuations(replace(prefill, model=torch.nn.Linear(1, 1)), 3, 2)
