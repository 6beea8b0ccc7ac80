"""A configuration cut to fewer layers stays consistent."""

from __future__ import annotations

import pytest

from sdpa_repro.capturing.layers import enough, kept, shortened

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = {"num_hidden_layers": 12, "layer_types": ([SLIDING] * 5 + [FULL]) * 2}


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, [5]), (2, [0, 5]), (6, [0, 1, 2, 3, 4, 5]), (7, [0, 1, 2, 3, 4, 5, 11])]
)
def test_the_last_layer_kept_is_a_full_attention_layer(layers: int, expected: list[int]) -> None:
    assert kept(GEMMA, layers) == expected


def test_stored_weights_keep_the_first_layers() -> None:
    assert kept(GEMMA, 3, prefix=True) == [0, 1, 2]


def test_layers_that_are_all_alike_are_the_first_ones() -> None:
    assert kept({"num_hidden_layers": 4}, 2) == [0, 1]


def test_every_per_layer_list_is_cut_to_the_same_layers() -> None:
    config = {**GEMMA, "sizes": list(range(12)), "other": [1, 2], "hidden_size": 8}
    short = shortened(config, 2)
    assert short == {
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "sizes": [0, 5],
        "other": [1, 2],
        "hidden_size": 8,
    }


def test_overrides_by_layer_number_follow_their_layer() -> None:
    config = {**GEMMA, "per_layer_config": {"05": {"head_dim": 512}, "11": {"head_dim": 512}}}
    assert shortened(config, 2)["per_layer_config"] == {"1": {"head_dim": 512}}
    assert shortened(config, 7)["per_layer_config"] == {"5": {"head_dim": 512}, "6": {"head_dim": 512}}


def test_text_sections_are_cut_and_vision_towers_are_left_whole() -> None:
    config = {
        "model_type": "some_vl",
        "text_config": {"model_type": "text", **GEMMA},
        "vision_config": {"model_type": "vision", "num_hidden_layers": 27},
    }
    short = shortened(config, 2)
    assert short["text_config"]["layer_types"] == [SLIDING, FULL]
    assert short["vision_config"]["num_hidden_layers"] == 27


def test_both_halves_of_an_encoder_decoder_are_cut() -> None:
    bart = {"num_hidden_layers": 6, "encoder_layers": 6, "decoder_layers": 3}
    assert shortened(bart, 4) == {"num_hidden_layers": 4, "encoder_layers": 4, "decoder_layers": 3}


def test_key_value_sharing_is_kept_for_the_last_layers_that_remain() -> None:
    config = {"num_hidden_layers": 10, "num_kv_shared_layers": 4}
    assert shortened(config, 7)["num_kv_shared_layers"] == 1
    assert shortened(config, 3)["num_kv_shared_layers"] == 0


def test_cross_attention_layers_are_renumbered() -> None:
    config = {"num_hidden_layers": 8, "cross_attention_layers": [1, 3, 6]}
    assert shortened(config, 4)["cross_attention_layers"] == [1, 3]


def test_more_layers_than_there_are_change_nothing() -> None:
    assert shortened(GEMMA, 40) == GEMMA


@pytest.mark.parametrize(("layers", "expected"), [(1, 6), (5, 6), (6, 6), (7, 12), (12, 12)])
def test_the_first_layers_must_end_in_full_attention_when_the_whole_model_does(layers: int, expected: int) -> None:
    assert enough({"text_config": GEMMA}, layers) == expected


def test_a_model_that_ends_in_a_sliding_layer_only_has_to_reach_a_full_one() -> None:
    config = {"num_hidden_layers": 8, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING]}
    assert [enough(config, layers) for layers in (1, 2, 3, 4, 8)] == [3, 3, 3, 4, 8]
    assert enough({"num_hidden_layers": 8}, 2) == 2
