"""The embedded model makes the attention calls of Gemma 4 12B's global layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_repro.capturing import tiny
from sdpa_repro.capturing.padding import pad_inputs


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.tiny_gemma4(dtype=torch.float32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    """Every SDPA call made during the test: query, key, value, keyword arguments."""
    seen: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = []
    real = F.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, **words: Any) -> Tensor:
        seen.append((query, key, value, words))
        return real(query, key, value, **words)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return seen


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(**inputs, logits_to_keep=1, use_cache=True).logits[:, -1]
    return logits


def test_the_global_layer_calls_sdpa_with_the_layout_of_the_12b_model(model: Any, calls: list[Any]) -> None:
    run(model, pad_inputs(tiny.tiny_inputs(model), 289, pad_token=tiny.PAD))
    query, key, value, words = calls[5]
    assert query.shape == (1, 16, 289, 512)
    assert query.stride() == (2367488, 512, 8192, 1)
    assert key.shape == value.shape == (1, 16, 289, 512)
    assert key.stride() == value.stride() == (0, 0, 512, 1)
    assert words["scale"] == 1.0
    assert not words.get("enable_gqa")
    mask = words["attn_mask"]
    assert mask.dtype == torch.bool
    visible = torch.ones(289, 289, dtype=torch.bool).tril()
    visible[:, :7] = False
    visible[9:73, 9:73] = True  # the tokens of an image see each other
    assert torch.equal(mask, visible[None, None])


def test_sliding_layers_come_first_and_have_a_narrower_head_and_a_window(model: Any, calls: list[Any]) -> None:
    run(model, tiny.tiny_inputs(model))
    assert [query.shape[-1] for query, _, _, _ in calls] == [256] * 5 + [512]
    mask = calls[0][3]["attn_mask"][0, 0]
    assert int(mask[-1].sum()) == 128
    assert mask[2, 65]  # row 2 and key 65 belong to one image: they see each other
    assert not mask[70, 71]  # text sees no later token


def test_scores_are_spread_like_those_of_a_trained_model(model: Any, calls: list[Any]) -> None:
    run(model, tiny.tiny_inputs(model))
    query, key, _, _ = calls[5]
    spread = float((query @ key.transpose(-1, -2)).std())
    assert 2 < spread < 4


def test_a_seed_gives_the_same_weights_in_every_dtype_and_leaves_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    single, half = tiny.tiny_gemma4(3, torch.float32), tiny.tiny_gemma4(3, torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), state)
    other = tiny.tiny_gemma4(4, torch.float32).get_input_embeddings().weight
    for one, two in zip(single.parameters(), half.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), two)
    assert not torch.equal(single.get_input_embeddings().weight, other)


def test_inputs_are_a_prompt_with_one_block_of_image_tokens(model: Any) -> None:
    inputs = tiny.tiny_inputs(model, length=100, images=1)
    ids = inputs["input_ids"][0].tolist()
    assert ids[:2] == [tiny.BOS, tiny.IMAGE_BEGIN]
    assert ids[2:66] == [tiny.IMAGE] * 64
    assert ids[66] == tiny.IMAGE_END
    assert all(token in tiny.TEXT for token in ids[67:])
    assert torch.equal(inputs["mm_token_type_ids"], (inputs["input_ids"] == tiny.IMAGE).long())
    assert inputs["pixel_values"].shape == (1, 64, 8 * 8 * 3)
    assert inputs["image_position_ids"].shape == (1, 64, 2)
    assert inputs["image_position_ids"][0, :9].tolist() == [[x, 0] for x in range(8)] + [[0, 1]]


@pytest.mark.parametrize(("length", "images", "batch"), [(282, 1, 1), (300, 2, 2), (12, 1, 1), (20, 0, 3)])
def test_every_combination_of_length_images_and_batch_runs(model: Any, length: int, images: int, batch: int) -> None:
    inputs = tiny.tiny_inputs(model, length, images=images, batch=batch)
    assert inputs["input_ids"].shape == (batch, length)
    assert run(model, inputs).isfinite().all()


def test_a_prompt_too_short_for_its_images_is_an_error(model: Any) -> None:
    with pytest.raises(ValueError, match="too short for 2 images"):
        tiny.tiny_inputs(model, 7, images=2)


def test_the_fault_of_pytorch_191937_would_change_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_gemma4()
    inputs = tiny.tiny_inputs(model)
    healthy = [run(model, pad_inputs(inputs, total, pad_token=tiny.PAD)) for total in (282, 288, 289, 290)]
    real = F.scaled_dot_product_attention

    def last_row_uses_mask_row_0(query: Tensor, key: Tensor, value: Tensor, **words: Any) -> Tensor:
        output = real(query, key, value, **words)
        if key.stride(1) == 0:
            words["attn_mask"] = words["attn_mask"][:, :, :1]
            output = torch.cat([output[:, :, :-1], real(query[:, :, -1:], key, value, **words)], dim=2)
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", last_row_uses_mask_row_0)
    faulty = run(model, pad_inputs(inputs, 289, pad_token=tiny.PAD))
    jitter = max(float((logits - healthy[0]).abs().max()) for logits in healthy)
    assert len({int(logits.argmax()) for logits in healthy}) == 1
    assert float((faulty - healthy[0]).abs().max()) > 5 * jitter
    assert int(faulty.argmax()) != int(healthy[0].argmax())


@pytest.mark.slow
def test_the_widened_model_has_about_100_million_parameters_and_the_same_layout(calls: list[Any]) -> None:
    model = tiny.widened()
    assert 90e6 < sum(weight.numel() for weight in model.parameters()) < 110e6
    run(model, tiny.tiny_inputs(model, 96))
    assert calls[5][0].shape == (1, 16, 96, 512)
    assert calls[5][1].stride() == (0, 0, 512, 1)
