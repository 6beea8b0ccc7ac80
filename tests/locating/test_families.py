"""Healthy models of other families differ by rounding alone, in every dtype and under any padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, padded, prepare
from sdpa_repro.locating.stages import Level, Outcome, StageTable, compare_stages
from sdpa_repro.locating.structure import stacks
from sdpa_repro.locating.verdict import conclude
from tests import models

DTYPES = ("bfloat16", "float16", "float32")
PROMPT = "the cat sat on the mat and saw one two three four five six seven eight " * 2
SAVED: dict[str, Callable[[Path], Path]] = {
    "llama": models.save_llama,
    "llava": models.save_llava,
    "bart": models.save_bart,
    "t5": models.save_t5,
}
CONFIGURED: dict[str, Callable[[Path], Path]] = {
    "gemma3": models.save_gemma3_config,
    "qwen2_vl": models.save_qwen2_vl_config,
}
FAMILIES = [*SAVED, *CONFIGURED]
IMAGES = ("llava", *CONFIGURED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name, save in (SAVED | CONFIGURED).items():
        save(root / name)
    Image.effect_noise((40, 36), 50).convert("RGB").save(root / "cat.png")
    return root


def family(folder: Path, name: str, dtype: str) -> Prefill:
    """A prefill of the family; a model without stored weights gets a made-up prompt of 282 tokens."""
    model = str(folder / name)
    if name in CONFIGURED:
        return prepare(PrefillOptions(model=model, random_weights=True, dtype=dtype))
    images = (str(folder / "cat.png"),) if name in IMAGES else ()
    return prepare(PrefillOptions(model=model, prompt=PROMPT, images=images, dtype=dtype))


def compare(prefill: Prefill, total: int) -> StageTable:
    return compare_stages(prefill, padded(prefill, prefill.length), padded(prefill, total))


def next_failing(length: int) -> int:
    """The next total length that leaves 1 on division by 32."""
    return length + 1 + (-length) % 32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_healthy_model_shows_nothing_beyond_noise(folder: Path, name: str, dtype: str) -> None:
    prefill = family(folder, name, dtype)
    for total in (prefill.length + 3, next_failing(prefill.length)):
        table = compare(prefill, total)
        verdict = conclude(None, table)
        assert verdict.level is Level.NOTHING, verdict.sentence
        assert {call["status"] for call in table.calls} == {"agrees"}
        seen = {stage.name for stage in table.stages if stage.status is not Outcome.NOT_AVAILABLE}
        assert {"input_ids", "attention_mask", "embeddings", "logits"} <= seen
        assert any(name.endswith("mask") and name != "attention_mask" for name in seen)
        assert sum(name.endswith("SDPA") for name in seen) >= 2


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_followed_from_pixels_to_embeddings(folder: Path, name: str) -> None:
    prefill = family(folder, name, "float32")
    found = {stage.name: stage.status for stage in compare(prefill, prefill.length + 3).stages}
    for stage in ("pixel inputs", "image features", "placeholder mask", "embeddings"):
        assert found[stage] in (Outcome.EQUAL, Outcome.WITHIN_NOISE), stage


def test_repeated_key_heads_are_the_same_as_shared_ones(folder: Path) -> None:
    prefill = family(folder, "llama", "float32")
    table = compare(prefill, prefill.length + 3)
    # the unpadded call has no mask and takes 2 key/value heads, the padded one gets them repeated for 4
    keys = [stage for stage in table.stages if stage.name.endswith(("key", "value"))]
    assert len(keys) == 4
    assert {stage.status for stage in keys} <= {Outcome.EQUAL, Outcome.WITHIN_NOISE}


def test_the_encoder_s_layers_come_first_and_cross_attention_is_told_apart(folder: Path) -> None:
    prefill = family(folder, "bart", "float32")
    names = [stage.name for stage in compare(prefill, prefill.length + 3).stages]
    assert names.index("encoder layer 1 output") < names.index("decoder layer 0 input")
    assert "decoder layer 0 encoder_attn key" in names
    assert "decoder layer 0 self_attn key" in names
    assert [stack.encoder for stack in stacks(prefill.model)] == [True, False]


def test_a_vision_tower_is_no_stack_of_text_layers(folder: Path) -> None:
    prefill = family(folder, "llava", "float32")
    (stack,) = stacks(prefill.model)
    assert stack.owner == "model.language_model"
    assert len(stack.layers) == 2
