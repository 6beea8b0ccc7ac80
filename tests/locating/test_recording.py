"""A recording shows what a run computed, on valid tokens, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_repro.capturing.prefill import Prefill, forward, padded
from sdpa_repro.locating.notes import Notes, Value
from sdpa_repro.locating.recording import Recording, record
from tests.locating import prefills
from tests.locating.prefills import FAILING, LENGTH, WINDOW


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    return prefills.small()


@pytest.fixture(scope="module")
def left(prefill: Prefill) -> Recording:
    return record(prefill, padded(prefill, FAILING), check=True)


def only(recording: Recording, stage: str, point: str, part: str = "") -> Value:
    (found,) = [value for value in recording.stage(stage) if value.point == point and value.part == part]
    return found


def attachments(model: Any) -> list[tuple[int, int, list[str]]]:
    """Hooks and instance attributes of every module."""
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module))) for module in model.modules()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_the_same_bits_with_and_without_a_recording(dtype: torch.dtype) -> None:
    prefill = prefills.small(dtype)
    inputs = padded(prefill, FAILING)
    assert torch.equal(record(prefill, inputs, check=True).logits, forward(prefill, inputs))


def test_nothing_stays_attached(prefill: Prefill) -> None:
    from transformers.models.gemma4_unified import modeling_gemma4_unified as gemma

    functions = dict(vars(gemma))
    before = attachments(prefill.model)
    record(prefill, padded(prefill, FAILING))
    record(prefill, padded(prefill, FAILING), inside="model.language_model.layers.1")
    assert attachments(prefill.model) == before
    assert {name: value for name, value in vars(gemma).items() if value is not functions.get(name)} == {}


def test_nothing_stays_attached_when_the_model_raises(prefill: Prefill) -> None:
    before = attachments(prefill.model)
    inputs = padded(prefill, FAILING)
    with pytest.raises(Exception, match=r".+"):
        record(prefill, {**inputs, "pixel_values": inputs["pixel_values"][:, :3]})
    assert attachments(prefill.model) == before


def test_left_padding_is_left_out(prefill: Prefill, left: Recording) -> None:
    assert left.valid.tolist() == list(range(FAILING - LENGTH, FAILING))
    assert torch.equal(only(left, "input_ids", "inputs").tensor, prefill.inputs["input_ids"])
    assert torch.equal(only(left, "position_ids", "inputs").tensor, torch.arange(LENGTH)[None])


def test_right_padding_is_left_out(prefill: Prefill) -> None:
    right = record(prefill, padded(prefill, FAILING, "right"))
    assert right.valid.tolist() == list(range(LENGTH))
    assert torch.equal(only(right, "input_ids", "model").tensor, prefill.inputs["input_ids"])


def test_a_value_is_seen_wherever_it_passes(left: Recording) -> None:
    points = [value.point for value in left.stage("position_ids")]
    assert points[:3] == ["inputs", "", "model"]
    assert {"model.language_model", "model.language_model.rotary_emb", "model.language_model.layers.0"} <= set(points)
    types = [value.point for value in left.stage("token types")]
    assert types[-1] == "get_block_sequence_ids_for_mask"


def test_block_ids_number_the_images(left: Recording, prefill: Prefill) -> None:
    image = prefill.inputs["mm_token_type_ids"].bool()
    for value in left.stage("image block ids"):
        assert torch.equal(value.tensor, torch.where(image, 0, -1))


def test_masks_are_what_may_be_seen_between_valid_tokens(left: Recording, prefill: Prefill) -> None:
    row, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    image = prefill.inputs["mm_token_type_ids"][0].bool()
    one_image = image[:, None] & image
    masks = {value.part: value.tensor for value in left.stage("mask")}
    assert len(left.stage("mask")) == 2
    assert torch.equal(masks["global"], (key <= row) | one_image)
    assert torch.equal(masks["sliding"], ((key <= row) & (key > row - WINDOW)) | one_image)


def test_features_stand_at_their_placeholders(left: Recording, prefill: Prefill) -> None:
    image = prefill.inputs["mm_token_type_ids"].bool()
    assert torch.equal(only(left, "placeholder mask", "model", "0").tensor, image)
    features = only(left, "image features", "model").tensor
    embedded = only(left, "embeddings", "model.language_model").tensor
    assert torch.equal(embedded[image], features)


def test_every_call_shows_its_tensors_and_its_check(left: Recording) -> None:
    last = f"model.language_model.layers.{prefills.LAYERS - 1}.self_attn"
    assert [value.point for value in left.stage("call")][-1] == last
    assert only(left, "query", last).tensor.shape == (1, 16, LENGTH, 512)
    assert only(left, "key", last).tensor.shape == (1, 1, LENGTH, 512)  # one head seen 16 times is kept once
    assert only(left, "attention", last).tensor.shape == (1, 16, LENGTH, 512)
    assert [check.status for check in left.checks] == ["agrees"] * prefills.LAYERS


def test_a_layer_is_recorded_before_it_is_changed_in_place(left: Recording) -> None:
    first, second = (f"model.language_model.layers.{index}" for index in (0, 1))
    assert torch.equal(only(left, "output", first).tensor, only(left, "input", second).tensor)


def test_one_row_of_a_batch_is_recorded(prefill: Prefill, left: Recording) -> None:
    recording = record(prefill, padded(prefills.beside_another(prefill), FAILING), row=1)
    for stage in ("input_ids", "position_ids", "token types", "pixel inputs", "placeholder mask", "image block ids"):
        for alone, together in zip(left.stage(stage), recording.stage(stage), strict=True):
            assert torch.equal(alone.tensor, together.tensor), stage
    for stage in ("image features", "embeddings", "query", "key", "value"):
        for alone, together in zip(left.stage(stage), recording.stage(stage), strict=True):
            torch.testing.assert_close(alone.tensor, together.tensor, rtol=1e-3, atol=1e-3)


def test_a_causal_flag_counts_as_a_causal_mask() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    model: Any = LlamaForCausalLM(config).eval()
    ids = torch.arange(5)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prefill = Prefill(model, inputs, "llama", torch.float32, torch.device("cpu"), 5, "decoder", "left", 0)
    recording = record(prefill, padded(prefill, 5))
    (mask,) = recording.stage("mask")
    assert torch.equal(mask.tensor, torch.ones(5, 5, dtype=torch.bool).tril())


def test_another_way_to_run_the_model_can_be_recorded(prefill: Prefill) -> None:
    from transformers import StaticCache

    inputs = padded(prefill, FAILING)

    def run() -> Tensor:
        cache = StaticCache(config=prefill.model.config.get_text_config(), max_cache_len=80)
        with torch.inference_mode():
            logits: Tensor = prefill.model(**inputs, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    recording = record(prefill, inputs, run=run)
    assert {value.part for value in recording.stage("mask")} == {"global", "sliding"}
    assert all(value.tensor.shape == (LENGTH, LENGTH) for value in recording.stage("mask"))


def test_what_cannot_be_looked_at_is_noted_and_the_model_goes_on(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Notes.add

    def add(self: Notes, stage: str, *args: Any, **words: Any) -> None:
        if stage in ("rotary", "image features", "query", "output"):
            raise RuntimeError(f"no {stage}")
        original(self, stage, *args, **words)

    monkeypatch.setattr(Notes, "add", add)
    inputs = padded(prefill, FAILING)
    recording = record(prefill, inputs)
    assert torch.equal(recording.logits, forward(prefill, inputs))
    assert not [value for value in recording.values if value.stage in ("rotary", "image features", "query", "output")]
    assert {"RuntimeError: no rotary", "RuntimeError: no image features", "RuntimeError: no output"} <= set(
        recording.problems
    )
    assert any("no query" in problem for problem in recording.problems)


def test_inside_a_layer_the_modules_are_seen_in_the_order_they_finish(prefill: Prefill) -> None:
    recording = record(prefill, padded(prefill, FAILING), inside="model.language_model.layers.1")
    points = [value.point for value in recording.stage("inside")]
    assert points[0] == "model.language_model.layers.1.input_layernorm"
    assert points.index("model.language_model.layers.1.mlp.down_proj") < points.index(
        "model.language_model.layers.1.mlp"
    )
    assert all(value.tensor.shape[value.axis] == LENGTH for value in recording.stage("inside") if value.axis)


def test_a_layer_that_is_fed_does_not_see_what_came_before_it(prefill: Prefill, left: Recording) -> None:
    inputs = padded(prefill, LENGTH)
    inputs["input_ids"] = inputs["input_ids"].flip(-1) % 400
    inputs = {name: tensor for name, tensor in inputs.items() if "pixel" not in name and "image" not in name}
    fed = record(prefill, inputs, feed=left)
    assert not torch.equal(only(fed, "input_ids", "inputs").tensor, prefill.inputs["input_ids"])
    query = "model.language_model.layers.1.self_attn"
    torch.testing.assert_close(only(fed, "query", query).tensor, only(left, "query", query).tensor)
