"""The prompt at other lengths and in batches."""

from __future__ import annotations

from pathlib import Path as File

import pytest
import torch
from PIL import Image

from sdpa_repro.capturing import tiny
from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, forward, padded, prepare
from sdpa_repro.locating.lengthening import batched, lengthened, shortest
from tests import models


@pytest.fixture(scope="module")
def image() -> Prefill:
    return prepare(PrefillOptions(layers=1, device="cpu"))


@pytest.fixture(scope="module")
def text() -> Prefill:
    return prepare(PrefillOptions(layers=1, text_only=True, device="cpu"))


def made(prefill: Prefill, length: int) -> Prefill:
    found = lengthened(prefill, length)
    assert found is not None
    return found


@pytest.mark.parametrize("length", [70, 100, 281, 282, 283, 600])
def test_the_image_stays_and_the_text_after_it_gives(image: Prefill, length: int) -> None:
    other = made(image, length)
    ids, types = other.inputs["input_ids"][0], other.inputs["mm_token_type_ids"][0]
    assert other.length == len(ids) == len(types) == len(other.inputs["attention_mask"][0]) == length
    assert torch.equal(ids[:67], image.inputs["input_ids"][0][:67])
    assert int((ids == tiny.IMAGE).sum()) == int(types.sum()) == 64
    assert torch.equal(ids[-2:], image.inputs["input_ids"][0][-2:])
    assert other.inputs["pixel_values"] is image.inputs["pixel_values"]
    assert not set(ids[67:].tolist()) & {tiny.IMAGE, tiny.IMAGE_BEGIN, tiny.IMAGE_END}
    assert forward(other, padded(other, length + 1)).isfinite().all()


def test_lengths_below_the_image_do_not_exist(image: Prefill, text: Prefill) -> None:
    # begin of text, begin of image, 64 tokens, end of image, one of text, and the last two
    assert shortest(image) == 1 + 1 + 64 + 1 + 1 + 2
    assert lengthened(image, 69) is None
    assert lengthened(text, 2) is None
    assert made(text, 31).length == 31


def test_an_image_in_the_middle_of_the_prompt_is_kept_with_what_is_before_it(tmp_path: File) -> None:
    models.save_llava(tmp_path / "llava")
    Image.effect_noise((40, 36), 50).convert("RGB").save(tmp_path / "cat.png")
    words = "describe this and say what you saw on the mat"
    options = PrefillOptions(
        model=str(tmp_path / "llava"), images=(str(tmp_path / "cat.png"),), prompt=words, device="cpu"
    )
    prefill = prepare(options)
    image = models.SPECIAL.index("<image>")
    for length in (prefill.length - 4, prefill.length + 40):
        other = made(prefill, length)
        assert int((other.inputs["input_ids"] == image).sum()) == int((prefill.inputs["input_ids"] == image).sum())
        assert forward(other, padded(other, length)).isfinite().all()


def test_rows_of_a_batch_give_what_each_gives_alone(image: Prefill) -> None:
    rows = [image, made(image, 289), made(image, 285)]
    batch = batched(rows, 289)
    assert batch["input_ids"].shape == (3, 289)
    assert batch["attention_mask"].sum(1).tolist() == [282, 289, 285]
    assert batch["position_ids"][:, -1].tolist() == [281, 288, 284]
    together = forward(image, batch)
    for at, row in enumerate(rows):
        alone = forward(row, padded(row, row.length))
        assert float((together[at] - alone[0]).abs().max()) < 0.25


def test_a_batch_of_several_rows_keeps_its_length(tmp_path: File) -> None:
    models.save_llama(tmp_path / "llama")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a cat sat on the mat"}\n')
    prefill = prepare(PrefillOptions(model=str(tmp_path / "llama"), input=str(tmp_path / "rows.jsonl"), device="cpu"))
    assert lengthened(prefill, prefill.length + 1) is None
    assert lengthened(prefill, prefill.length) is prefill
