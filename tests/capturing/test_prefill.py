"""Padded and unpadded prefills of several families agree on a healthy CPU, through the real auto classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sdpa_repro.capturing import tiny
from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, forward, padded, prepare, totals
from sdpa_repro.errors import InputError
from tests import models

PADS = (1, 3, 7, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of several families, two images and two files of rows."""
    root = tmp_path_factory.mktemp("models")
    models.save_llama(root / "llama")
    models.save_llama(root / "llama-chat", chat=True, pad=False)
    models.save_llava(root / "llava")
    models.save_bart(root / "bart")
    models.save_qwen2_vl_config(root / "qwen2-vl")
    models.save_gemma4_config(root / "gemma4")
    for index, name in enumerate(("cat.png", "dog.png")):
        Image.effect_noise((40, 36), 50 + 40 * index).convert("RGB").save(root / name)
    chat = [{"role": "user", "content": "describe this"}]
    seen = [{"role": "user", "content": [{"type": "image", "path": "dog.png"}, {"type": "text", "text": "a cat"}]}]
    write(root / "text.jsonl", [{"prompt": "the cat sat on the mat and saw"}, {"prompt": "a cat"}, {"messages": chat}])
    write(root / "images.jsonl", [{"prompt": "the cat", "images": ["cat.png", "dog.png"]}, {"messages": seen}])
    return root


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")


def float32(**words: Any) -> Prefill:
    return prepare(PrefillOptions(dtype="float32", device="cpu", **words))


def assert_padding_changes_nothing(prefill: Prefill, *sides: str, pads: tuple[int, ...] = PADS) -> None:
    """Next-token logits with padding equal those without, to float32 rounding."""
    plain = forward(prefill, padded(prefill, prefill.length))
    assert plain.shape == (prefill.inputs["input_ids"].shape[0], plain.shape[1])
    assert plain.dtype == torch.float32
    assert float(plain.std()) > 0.05
    for side in sides:
        for pad in pads:
            other = forward(prefill, padded(prefill, prefill.length + pad, side))
            torch.testing.assert_close(other, plain, rtol=0, atol=2e-5)


def test_the_embedded_model_is_the_default_and_padding_changes_nothing() -> None:
    prefill = float32()
    assert (prefill.name, prefill.length, prefill.side) == (tiny.NAME, 282, "decoder")
    assert prefill.embedded
    assert_padding_changes_nothing(prefill, "left", pads=(1, 7))


def test_the_embedded_model_is_bfloat16_unless_asked() -> None:
    prefill = prepare(PrefillOptions(text_only=True, layers=1))
    assert prefill.dtype == torch.bfloat16
    assert "pixel_values" not in prefill.inputs
    assert prefill.model.config.text_config.layer_types == ["full_attention"]


def test_a_decoder_loads_from_its_folder_and_padding_changes_nothing(folder: Path) -> None:
    prefill = float32(model=str(folder / "llama"), prompt="the cat sat on the mat")
    assert type(prefill.model).__name__ == "LlamaForCausalLM"
    assert prefill.model.config._attn_implementation == "sdpa"
    assert (prefill.name, prefill.length) == ("llama", 6)
    assert any("plain text" in note for note in prefill.notes)
    assert_padding_changes_nothing(prefill, "left", "right")


def test_a_naturally_padded_batch_keeps_its_rows_and_gives_what_each_row_gives_alone(folder: Path) -> None:
    batch = float32(model=str(folder / "llama"), input=str(folder / "text.jsonl"))
    assert batch.inputs["attention_mask"].sum(-1).tolist() == [8, 2, 2]
    assert batch.inputs["attention_mask"][1].tolist() == [0] * 6 + [1, 1]
    assert_padding_changes_nothing(batch, "left", "right")
    alone = float32(model=str(folder / "llama"), prompt="a cat")
    together = forward(batch, padded(batch, batch.length))
    torch.testing.assert_close(together[1:2], forward(alone, padded(alone, 2)), rtol=0, atol=2e-5)


def test_the_chosen_side_pads_the_batch_too(folder: Path) -> None:
    batch = float32(model=str(folder / "llama"), input=str(folder / "text.jsonl"), padding_side="right")
    assert batch.inputs["attention_mask"][1].tolist() == [1, 1] + [0] * 6
    assert padded(batch, 9)["attention_mask"][0].tolist() == [1] * 8 + [0]


def test_the_chat_template_is_applied_and_a_missing_pad_token_is_replaced(folder: Path) -> None:
    prefill = float32(model=str(folder / "llama-chat"), prompt="a cat")
    words = models.tokenizer().convert_ids_to_tokens(prefill.inputs["input_ids"][0].tolist())
    assert words == ["<s>", "user", ":", "a", "cat", "assistant", ":"]
    assert padded(prefill, 8)["input_ids"][0, 0] == 2
    assert any("no pad token" in note for note in prefill.notes)
    batch = float32(model=str(folder / "llama-chat"), input=str(folder / "text.jsonl"))
    assert_padding_changes_nothing(batch, "left")


def test_a_vision_language_model_gets_its_image_through_its_processor(folder: Path) -> None:
    prefill = float32(model=str(folder / "llava"), images=(str(folder / "cat.png"),), prompt="describe this")
    assert type(prefill.model).__name__ == "LlavaForConditionalGeneration"
    assert int((prefill.inputs["input_ids"] == models.SPECIAL.index("<image>")).sum()) == 16
    assert prefill.inputs["pixel_values"].shape == (1, 3, 32, 32)
    assert padded(prefill, prefill.length + 7)["pixel_values"] is prefill.inputs["pixel_values"]
    assert_padding_changes_nothing(prefill, "left", "right")


def test_rows_may_have_different_numbers_of_images(folder: Path) -> None:
    prefill = float32(model=str(folder / "llava"), input=str(folder / "images.jsonl"))
    tokens = (prefill.inputs["input_ids"] == models.SPECIAL.index("<image>")).sum(-1)
    assert tokens.tolist() == [32, 16]
    assert prefill.inputs["pixel_values"].shape == (3, 3, 32, 32)
    assert_padding_changes_nothing(prefill, "left")


def test_text_only_leaves_the_images_of_the_rows_out(folder: Path) -> None:
    prefill = float32(model=str(folder / "llava"), input=str(folder / "images.jsonl"), text_only=True)
    assert "pixel_values" not in prefill.inputs


def test_an_encoder_decoder_model_is_padded_on_its_encoder_and_says_so(folder: Path) -> None:
    prefill = float32(model=str(folder / "bart"), prompt="the cat sat on the mat")
    assert (prefill.side, prefill.padding_side) == ("encoder", "right")
    assert "encoder-decoder model: the encoder's input is padded, on the right" in prefill.notes
    assert "position_ids" not in padded(prefill, 9)
    assert_padding_changes_nothing(prefill, "right")


def test_left_padding_of_learned_positions_is_said_to_change_the_result(folder: Path) -> None:
    prefill = float32(model=str(folder / "bart"), prompt="the cat sat", padding_side="left")
    assert any("learned positions" in note for note in prefill.notes)


def test_m_rope_positions_are_left_to_the_model(folder: Path) -> None:
    prefill = float32(model=str(folder / "qwen2-vl"), random_weights=True, layers=2)
    assert "position_ids" not in padded(prefill, 300)
    assert prefill.model.config.get_text_config().num_hidden_layers == 2
    assert_padding_changes_nothing(prefill, "left", "right")


def test_m_rope_models_get_positions_when_there_is_no_image(folder: Path) -> None:
    prefill = float32(model=str(folder / "qwen2-vl"), random_weights=True, layers=1, text_only=True)
    assert padded(prefill, prefill.length + 2)["position_ids"][0, :4].tolist() == [0, 0, 0, 1]
    assert_padding_changes_nothing(prefill, "left")


def test_a_folder_with_only_a_configuration_becomes_a_model_with_a_synthetic_image(folder: Path) -> None:
    prefill = float32(model=str(folder / "gemma4"), random_weights=True, layers=2)
    assert prefill.model.config.text_config.layer_types == ["sliding_attention", "full_attention"]
    assert prefill.inputs["pixel_values"].shape == (1, 144, 192)
    assert int((prefill.inputs["input_ids"] == tiny.IMAGE).sum()) == 144
    assert any("random tokens with one random image" in note for note in prefill.notes)
    assert_padding_changes_nothing(prefill, "left", pads=(7,))


def test_random_weights_are_the_same_for_a_seed_and_made_in_the_data_type(folder: Path) -> None:
    options = PrefillOptions(model=str(folder / "llama"), random_weights=True, dtype="bfloat16", device="cpu", seed=5)
    one, two = prepare(options), prepare(options)
    assert one.dtype == torch.bfloat16
    for first, second in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(first, second)


def test_fewer_layers_of_a_model_with_weights_keep_the_first_ones(folder: Path) -> None:
    whole = float32(model=str(folder / "llama"), prompt="a")
    part = float32(model=str(folder / "llama"), prompt="a", layers=1)
    assert len(part.model.model.layers) == 1
    kept, first = (
        part.model.model.layers[0].self_attn.q_proj.weight,
        whole.model.model.layers[0].self_attn.q_proj.weight,
    )
    assert torch.equal(kept, first)


def test_totals_are_the_one_asked_for_or_one_of_each_residue(folder: Path) -> None:
    prefill = float32(model=str(folder / "llama"), prompt="the cat sat")
    assert totals(prefill, PrefillOptions(pad=7)) == [10]
    assert totals(prefill, PrefillOptions(pad=0)) == [3]
    assert totals(prefill, PrefillOptions(total_length=289)) == [289]
    every = totals(prefill, PrefillOptions())
    assert every == list(range(3, 67))
    assert {total % 64 for total in every} == set(range(64))


def test_totals_stop_where_learned_positions_end(folder: Path) -> None:
    prefill = float32(model=str(folder / "bart"), prompt="the cat sat")
    assert totals(prefill, PrefillOptions()) == list(range(3, 65))
    with pytest.raises(InputError, match="positions for 64 tokens: 65 are too many"):
        totals(prefill, PrefillOptions(total_length=65))


def test_a_total_shorter_than_the_prompt_is_an_error(folder: Path) -> None:
    prefill = float32(model=str(folder / "llama"), prompt="the cat sat")
    with pytest.raises(InputError, match="3 tokens: a total length of 2 is too short"):
        totals(prefill, PrefillOptions(total_length=2))
    with pytest.raises(InputError, match="too short"):
        padded(prefill, 2)


def test_logits_are_those_of_a_full_forward_at_the_last_valid_token(folder: Path) -> None:
    prefill = float32(model=str(folder / "llama"), input=str(folder / "text.jsonl"), padding_side="right")
    batch = padded(prefill, 11)
    with torch.inference_mode():
        full = prefill.model(**batch).logits
    expected = torch.stack([full[0, 7], full[1, 1], full[2, 1]])
    torch.testing.assert_close(forward(prefill, batch), expected, rtol=0, atol=1e-5)


def test_progress_is_told_before_each_slow_step(folder: Path) -> None:
    said: list[str] = []
    prepare(PrefillOptions(model=str(folder / "llama"), device="cpu"), said.append)
    assert said == ["reading the configuration of llama", "loading llama"]


def test_running_out_of_memory_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = float32(model=str(folder / "llama"), prompt="a")

    def full(**_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(prefill.model, "forward", full)
    with pytest.raises(InputError, match="out of memory on cpu: use a smaller --layers"):
        forward(prefill, padded(prefill, 4))


def test_an_error_of_the_model_itself_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = float32(model=str(folder / "llama"), prompt="a")

    def broken(**_: Any) -> None:
        raise RuntimeError("kernel failed")

    monkeypatch.setattr(prefill.model, "forward", broken)
    with pytest.raises(RuntimeError, match="kernel failed"):
        forward(prefill, padded(prefill, 4))
