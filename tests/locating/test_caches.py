"""A dynamic and a static cache beside each other: what differs is named, and the model is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, padded, prepare
from sdpa_repro.errors import InputError
from sdpa_repro.locating import caches
from sdpa_repro.locating.caches import compare_caches, generated, masks_of
from sdpa_repro.locating.recording import Recording, Value, record
from tests import models
from tests.locating.prefills import FAILING, WINDOW, small


def test_both_kinds_of_masks_are_compared_and_each_difference_is_real() -> None:
    prefill = small()
    inputs = padded(prefill, FAILING)
    found = compare_caches(prefill, inputs)
    runs = [
        masks_of(record(prefill, inputs, run=lambda cache=cache: generated(prefill, inputs, 1, cache)[1][0]))
        for cache in ("dynamic", "static")
    ]
    assert found.masks == ("sliding", "global")
    assert {mask.shape for run in runs for mask in run.values()} == {(prefill.length, prefill.length)}
    assert set(found.different) == {kind for kind in runs[0] if not torch.equal(runs[0][kind], runs[1][kind])}
    if found.different:  # transformers 5.24: images see themselves in other layers and across the window
        assert found.prepared
        assert found.equal_inputs
        assert "Gemma4UnifiedModel.forward makes the masks of the dynamic cache" in found.sentence
        assert "Gemma4UnifiedForConditionalGeneration.create_masks_for_generate those of the static" in found.sentence
        image = prefill.inputs["mm_token_type_ids"][0].bool()
        entries = torch.cat([(runs[0][kind] != runs[1][kind]).nonzero() for kind in found.different])
        ahead = bool((entries[:, 1] > entries[:, 0]).all())
        assert bool(image[entries].all()) == ("all between tokens of images" in found.sentence)
        assert ahead == all("all towards later tokens" in how for how in found.different.values())


def test_without_an_image_both_caches_meet_the_causal_mask_and_the_window() -> None:
    prefill = small(images=0)
    found = compare_caches(prefill, padded(prefill, FAILING))
    assert found.different == {}
    assert found.sentence == ""
    assert found.tokens[0] == found.tokens[1]
    seen = masks_of(record(prefill, padded(prefill, FAILING)))
    distance = torch.arange(prefill.length)[:, None] - torch.arange(prefill.length)
    assert torch.equal(seen["global"], distance >= 0)
    assert torch.equal(seen["sliding"], (distance >= 0) & (distance < WINDOW))


def test_a_mask_that_differs_is_told_from_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = small(images=0)
    original = type(prefill.model).create_masks_for_generate

    def blind(*args: Any, **words: Any) -> Any:
        masks = original(*args, **words)
        sliding = masks["sliding_attention"].clone()
        sliding[..., 5, 3] = False
        return {**masks, "sliding_attention": sliding}

    monkeypatch.setattr(type(prefill.model), "create_masks_for_generate", staticmethod(blind))
    found = compare_caches(prefill, padded(prefill, prefill.length))
    assert list(found.different) == ["sliding"]
    assert found.different["sliding"].startswith("token 5 sees token 3 with a dynamic cache and does not with a static")
    assert found.prepared


def test_a_difference_is_kept_when_no_memory_is_left_to_look_further(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = small(images=0)
    full = InputError("out of memory on cuda: give a shorter prompt")
    causal = torch.ones(58, 58, dtype=torch.bool).tril()
    runs = iter([causal, causal.clone().index_fill_(0, torch.tensor(5), False)])

    def recorded(*args: Any, **words: Any) -> Recording:
        mask = next(runs, None)
        if mask is None:
            raise full
        value = Value("mask", "model", "model.layers.0", mask, 0, maker="model")
        return Recording((value,), torch.arange(58), 58, 0, torch.zeros(1, 4))

    monkeypatch.setattr(caches, "record", recorded)
    found = compare_caches(prefill, padded(prefill, 58))
    assert found.prepared is None
    assert found.different[""].startswith("token 5 sees token 0 with a dynamic cache and does not with a static one")
    assert found.sentence.endswith("the next-token logits of this prompt stay the same")


def test_other_inputs_for_one_cache_are_told_apart_from_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = small()

    def lost(prefill: Prefill, inputs: dict[str, Tensor], count: int, cache: str) -> tuple[Tensor, Tensor]:
        types = {"mm_token_type_ids": torch.zeros_like(inputs["mm_token_type_ids"])} if cache == "static" else {}
        return generated(prefill, {**inputs, **types}, count, cache)

    monkeypatch.setattr(caches, "generated", lost)
    found = compare_caches(prefill, padded(prefill, 58))
    assert not found.equal_inputs
    assert "gives the two caches other ids, token types or positions" in found.sentence


def test_generate_leaves_nothing_on_the_model() -> None:
    prefill = small(images=0)
    inputs = padded(prefill, prefill.length)
    before = set(vars(prefill.model))
    tokens, logits = generated(prefill, inputs, 2, "static")
    assert set(vars(prefill.model)) == before
    prefill.model._previous_max_cache_length = 7
    try:
        generated(prefill, inputs, 1, "static")
        assert prefill.model._previous_max_cache_length == 7
    finally:
        del prefill.model._previous_max_cache_length
    assert tokens.shape == (1, 2)
    assert logits.shape[:2] == (2, 1)
    assert torch.equal(tokens[0], logits[:, 0].argmax(-1))


def test_models_that_do_not_take_both_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save_bart(tmp_path / "bart")
    bart = prepare(PrefillOptions(model=str(tmp_path / "bart"), prompt="the cat", device="cpu"))
    with pytest.raises(InputError, match="the encoder, which has no cache"):
        compare_caches(bart, padded(bart, bart.length))

    def refused(*args: Any, **words: Any) -> Any:
        raise ValueError("this model has a state")

    monkeypatch.setattr(caches, "generated", refused)
    with pytest.raises(InputError, match=r"takes no dynamic cache: .*this model has a state"):
        compare_caches(small(images=0), padded(small(images=0), 58))
