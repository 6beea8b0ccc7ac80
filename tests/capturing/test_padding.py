"""Padding puts every sequence-aligned input in lockstep and leaves the others alone."""

from __future__ import annotations

import pytest
import torch

from sdpa_repro.capturing.padding import last_valid, pad_inputs, positions_of, sequence_aligned


def batch() -> dict[str, torch.Tensor]:
    """Two rows of three tokens, the second one naturally left-padded."""
    return {
        "input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "token_type_ids": torch.tensor([[1, 1, 0], [0, 0, 0]]),
        "mm_token_type_ids": torch.tensor([[0, 2, 0], [0, 1, 0]]),
        "labels": torch.tensor([[5, 6, 7], [-100, 8, 9]]),
        "cross_attention_mask": torch.ones(2, 3, 1, 4, dtype=torch.long),
        "pixel_values": torch.ones(2, 3, 4),
        "image_position_ids": torch.ones(2, 3, 2, dtype=torch.long),
        "image_grid_thw": torch.ones(2, 3, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2], [0, 1, 2]]),
    }


def test_left_padding_equals_the_hand_built_batch() -> None:
    padded = pad_inputs(batch(), 5, pad_token=4)
    assert padded["input_ids"].tolist() == [[4, 4, 5, 6, 7], [4, 4, 0, 8, 9]]
    assert padded["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert padded["token_type_ids"].tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert padded["mm_token_type_ids"].tolist() == [[0, 0, 0, 2, 0], [0, 0, 0, 1, 0]]
    assert padded["labels"].tolist() == [[-100, -100, 5, 6, 7], [-100, -100, -100, 8, 9]]
    assert padded["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 0, 0, 0, 1]]
    assert padded["cross_attention_mask"].shape == (2, 5, 1, 4)
    assert padded["cross_attention_mask"][:, :2].sum() == 0


def test_right_padding_equals_the_hand_built_batch() -> None:
    padded = pad_inputs(batch(), 5, pad_token=4, side="right")
    assert padded["input_ids"].tolist() == [[5, 6, 7, 4, 4], [0, 8, 9, 4, 4]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]
    assert padded["mm_token_type_ids"].tolist() == [[0, 2, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert padded["labels"].tolist() == [[5, 6, 7, -100, -100], [-100, 8, 9, -100, -100]]
    assert padded["position_ids"].tolist() == [[0, 1, 2, 2, 2], [0, 0, 1, 1, 1]]


def test_image_inputs_are_untouched_even_when_their_shape_is_that_of_the_prompt() -> None:
    inputs = batch()
    padded = pad_inputs(inputs, 5, pad_token=4)
    for name in ("pixel_values", "image_position_ids", "image_grid_thw"):
        assert padded[name] is inputs[name]


def test_an_unknown_integer_input_of_the_prompts_shape_is_padded_with_zero() -> None:
    inputs = {**batch(), "modality_mask": torch.ones(2, 3, dtype=torch.bool), "scores": torch.ones(2, 3)}
    assert sequence_aligned(inputs)["modality_mask"] == 0
    assert "scores" not in sequence_aligned(inputs)
    assert pad_inputs(inputs, 4, pad_token=4)["modality_mask"].tolist() == [[False, True, True, True]] * 2


def test_a_missing_mask_counts_as_all_valid() -> None:
    padded = pad_inputs({"input_ids": torch.tensor([[5, 6]])}, 3, pad_token=0)
    assert padded["attention_mask"].tolist() == [[0, 1, 1]]


def test_without_positions_a_stale_position_ids_is_dropped() -> None:
    assert "position_ids" not in pad_inputs(batch(), 5, pad_token=4, positions=False)


def test_padding_to_the_own_length_only_adds_positions() -> None:
    inputs = batch()
    padded = pad_inputs(inputs, 3, pad_token=4)
    assert torch.equal(padded["input_ids"], inputs["input_ids"])
    assert padded["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]


def test_a_total_below_the_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 tokens, more than 2"):
        pad_inputs(batch(), 2, pad_token=4)


def test_positions_count_valid_tokens_from_zero() -> None:
    assert positions_of(torch.tensor([[0, 0, 1, 1, 0, 1]])).tolist() == [[0, 0, 0, 1, 1, 2]]


def test_the_last_valid_token_is_found_on_either_side() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert last_valid(mask).tolist() == [3, 1, 3, 0]
