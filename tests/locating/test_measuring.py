"""One run of a sweep: what it notes, and what it takes for a difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as File

import pytest
import torch

from sdpa_repro.capturing.prefill import PrefillOptions, forward, padded, prepare
from sdpa_repro.locating.measuring import differences, measure
from tests import models
from tests.capturing import faults
from tests.locating.prefills import FAILING, LENGTH, small


def test_looking_changes_no_bit_of_the_logits() -> None:
    prefill = small()
    inputs = padded(prefill, FAILING)
    assert torch.equal(measure(prefill, inputs).logits, forward(prefill, inputs))


def test_padding_changes_nothing_that_the_layers_are_given() -> None:
    prefill = small()
    plain = measure(prefill, padded(prefill, LENGTH)).given
    assert sum(name.startswith("mask of call") for name in plain) == 3
    assert any("first layer" in name for name in plain)
    for side in ("left", "right"):
        other = measure(prefill, padded(prefill, FAILING, side)).given
        assert plain.keys() == other.keys()
        assert differences(plain, other) == ()


def test_a_position_a_mask_and_an_embedding_that_changed_are_named() -> None:
    prefill = small()
    plain = measure(prefill, padded(prefill, LENGTH)).given
    inputs = padded(prefill, FAILING)
    moved = inputs | {"position_ids": inputs["position_ids"] + 1}
    assert "position_embeddings" in " ".join(differences(plain, measure(prefill, moved).given))
    swapped = inputs | {"input_ids": inputs["input_ids"].roll(1)}
    assert "first layer" in differences(plain, measure(prefill, swapped).given)[0]
    untyped = inputs | {"mm_token_type_ids": torch.zeros_like(inputs["mm_token_type_ids"])}
    assert "mask of call" in differences(plain, measure(prefill, untyped).given)[0]


def test_a_wrong_call_is_found_in_its_layer_and_row(plant: Callable[[str], None]) -> None:
    prefill = small()
    plant("pytorch_191937")
    (call,) = measure(prefill, padded(prefill, FAILING)).wrong[0]
    assert (call.module, call.kernel) == ("model.language_model.layers.2.self_attn", "FLASH_ATTENTION")
    assert call.rows == (FAILING - 1,)
    assert measure(prefill, padded(prefill, FAILING + 1)).wrong == ((),)


def test_a_wrong_row_of_padding_does_not_count(plant: Callable[[str], None]) -> None:
    prefill = small()
    plant("pytorch_191937")
    assert measure(prefill, padded(prefill, FAILING, "right")).wrong == ((),)


def test_the_calls_of_each_row_of_a_batch_are_its_own(plant: Callable[[str], None]) -> None:
    prefill = small()
    plant("pytorch_191937")
    row = padded(prefill, FAILING)
    right = padded(prefill, FAILING, "right")
    batch = {name: torch.cat([row[name], right[name]]) for name in row}
    wrong = measure(prefill, batch).wrong
    assert len(wrong[0]) == 1
    assert wrong[1] == ()


def test_cross_attention_is_noted_on_the_encoders_valid_tokens(tmp_path: File) -> None:
    models.save_bart(tmp_path / "bart")
    prefill = prepare(PrefillOptions(model=str(tmp_path / "bart"), prompt="the cat sat on the mat", device="cpu"))
    plain = measure(prefill, padded(prefill, prefill.length)).given
    other = measure(prefill, padded(prefill, prefill.length + 3)).given
    assert any("encoder_attn" in name for name in plain)
    assert differences(plain, other) == ()


@pytest.fixture
def plant() -> Callable[[str], None]:
    """Plants a fault file; the real kernels come back after every test."""
    return faults.plant
