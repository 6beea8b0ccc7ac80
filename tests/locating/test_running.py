"""The paths a prefill can take, and that the model is as before afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as File

import pytest
import torch

from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, forward, padded, prepare
from sdpa_repro.errors import InputError
from sdpa_repro.locating.lengthening import lengthened
from sdpa_repro.locating.running import Path, running
from tests import models


@pytest.fixture(scope="module")
def short() -> Prefill:
    """The embedded model with two layers and 30 tokens of text."""
    prefill = lengthened(prepare(PrefillOptions(layers=2, text_only=True, device="cpu")), 30)
    assert prefill is not None
    return prefill


def logits(prefill: Prefill) -> torch.Tensor:
    return forward(prefill, padded(prefill, prefill.length + 3))


def implementations(prefill: Prefill) -> list[str]:
    config = prefill.model.config
    return [each._attn_implementation for each in (config, config.text_config, config.vision_config)]


@pytest.mark.parametrize("path", list(Path))
def test_every_path_gives_the_same_result_to_rounding_and_leaves_the_model_as_it_was(
    short: Prefill, path: Path
) -> None:
    before = implementations(short)
    plain = logits(short)
    with running(short, path) as prefill:
        found = logits(prefill)
    assert float((found - plain).abs().max()) < 0.5
    assert implementations(short) == before
    assert short.model.dtype == torch.bfloat16
    assert torch.equal(logits(short), plain)


def test_eager_attention_makes_no_sdpa_call(short: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: object, **words: object) -> torch.Tensor:
        called.append(1)
        return original(*args, **words)  # type: ignore[arg-type]  # whatever the model passes

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    with running(short, Path.EAGER) as prefill:
        logits(prefill)
    assert not called
    logits(short)
    assert called


def test_float32_runs_a_copy_with_float32_inputs(short: Prefill) -> None:
    with running(replace(short, inputs=short.inputs | {"pixel_values": torch.ones(1).bfloat16()}), Path.FLOAT32) as one:
        assert one.model is not short.model
        assert one.model.dtype == one.dtype == one.inputs["pixel_values"].dtype == torch.float32
        assert one.inputs["input_ids"].dtype == torch.int64


def test_float32_products_are_in_float32_whatever_the_process_asked_for(short: Prefill) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with running(short, Path.FLOAT32):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_model_is_put_back_when_the_run_fails(short: Prefill) -> None:
    before = implementations(short)
    with pytest.raises(RuntimeError, match="in between"), running(short, Path.EAGER):
        raise RuntimeError("in between")
    assert implementations(short) == before


def test_a_float32_model_has_no_float32_path(tmp_path: File) -> None:
    models.save_llama(tmp_path / "llama")
    prefill = prepare(PrefillOptions(model=str(tmp_path / "llama"), prompt="a cat", dtype="float32", device="cpu"))
    with pytest.raises(InputError, match="float32 already"), running(prefill, Path.FLOAT32):
        pass


def test_too_little_memory_for_a_copy_is_said(short: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdpa_repro.locating.running.free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"float32 copy of .* more than is free"), running(short, Path.FLOAT32):
        pass


def test_a_model_that_cannot_switch_says_so_and_stays(short: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    before = implementations(short)

    def refuse(kind: str) -> None:
        short.model.config.text_config._attn_implementation_internal = kind
        raise ValueError("no such attention")

    monkeypatch.setattr(short.model, "set_attn_implementation", refuse)
    with pytest.raises(InputError, match="has no eager attention: no such attention"), running(short, Path.EAGER):
        pass
    assert implementations(short) == before
