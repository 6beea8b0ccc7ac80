"""The written test needs neither this package nor luck: it passes on a healthy model and fails with a fault planted."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.capturing import tiny
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.errors import InputError
from sdpa_repro.locating import written_test
from sdpa_repro.locating.shrinking import VOCABULARY, shrunk
from sdpa_repro.locating.written_test import source, tiny_prefill, write_test
from tests import models
from tests.locating import planted


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test of the embedded model, written but not run."""
    path = tmp_path_factory.mktemp("written") / "test_gemma.py"
    prefill, seed = tiny_prefill(PrefillOptions())
    path.write_text(source(prefill, seed, tiny.NAME), encoding="utf-8")
    return path


def failing(module: dict[str, Any], fault: AbstractContextManager[None] | None, total: int) -> set[str]:
    """Names of the tests that fail for one total length, in a batch of one and of two."""
    model = module["build"]()
    plain, failed = module["run"](model), set()
    for batch in (1, 2):
        if fault is not None and batch == 1:
            fault.__enter__()
        padded = module["run"](model, total, batch)
        for name in [name for name in module if name.startswith("test_") and "greedy" not in name]:
            try:
                module[name](plain, padded)
            except AssertionError:
                failed.add(name)
    if fault is not None:
        fault.__exit__(None, None, None)
    return failed


def names(*words: str) -> set[str]:
    """Full names of tests by their first word."""
    every = {
        "embeddings": "test_embeddings_and_image_features_stay_in_place",
        "positions": "test_positions_of_valid_tokens_do_not_depend_on_padding",
        "block": "test_block_ids_of_valid_tokens_do_not_depend_on_padding",
        "visible": "test_valid_tokens_see_the_same_valid_tokens",
        "layers": "test_layers_and_logits_move_by_rounding_alone",
    }
    return {every[word] for word in words}


def test_it_imports_torch_transformers_and_pytest_alone(gemma: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(gemma.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found == {"contextlib", "unittest", "pytest", "torch", "transformers"}
    assert all(len(line) <= 120 for line in gemma.read_text(encoding="utf-8").splitlines())


def test_it_pads_around_a_multiple_of_32_and_sees_images(gemma: Path) -> None:
    module = runpy.run_path(str(gemma))
    assert module["CASES"] == [(total, batch) for total in (63, 64, 65) for batch in (1, 2)]
    assert failing(module, None, 65) == set()
    seen = module["run"](module["build"]())
    assert seen["block_ids"]
    assert len(seen["visible"]) == 2
    assert not seen["visible"][0].equal(seen["visible"][1])
    assert module["greedy"](module["build"](), 65, 2) == module["greedy"](module["build"]())


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (planted.features_one_off, names("embeddings", "layers")),
        (planted.token_type_lost, names("block", "visible", "layers")),
        (planted.block_ids_wrong_at_a_boundary, names("visible", "layers")),
        (planted.sliding_window_one_short, names("visible", "layers")),
    ],
    ids=["features", "types", "blocks", "window"],
)
def test_it_fails_with_a_fault_in_the_model_s_code(
    gemma: Path, fault: Callable[[], AbstractContextManager[None]], broken: set[str]
) -> None:
    failed = failing(runpy.run_path(str(gemma)), fault(), 65)
    # features shift every hidden state, and block ids that differ are a mask that differs
    assert broken <= failed <= broken | names("block")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["embedded", "llama"])
def test_the_file_is_run_before_it_is_said_to_work(family: str, tmp_path: Path) -> None:
    model = None if family == "embedded" else str(models.save_llama(tmp_path / "llama"))
    written = write_test(PrefillOptions(model=model), tmp_path / "test_padding.py")
    assert written.exit_status == 0, written.output
    assert f"{written.path} works: " in written.sentence
    passed = 36 if family == "embedded" else 30
    assert f"{passed} passed" in written.summary
    assert written.document()["works"] is True
    with pytest.raises(InputError, match="exists"):
        write_test(PrefillOptions(model=model), tmp_path / "test_padding.py")


def test_a_test_that_fails_is_not_said_to_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_test, "_run", lambda text, name: (1, "E  assert False\n1 failed, 35 passed in 2.00s"))
    written = write_test(PrefillOptions(text_only=True), tmp_path / "test_padding.py")
    assert written.exit_status == 1
    assert "is written and fails here: 1 failed, 35 passed" in written.sentence
    assert not written.document()["works"]


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"test_padding\.py"):
        write_test(PrefillOptions(), tmp_path / "test.txt")
    with pytest.raises(InputError, match="no folder"):
        write_test(PrefillOptions(), tmp_path / "missing" / "test_padding.py")
    models.save_bart(tmp_path / "bart")
    with pytest.raises(InputError, match="encoder-decoder"):
        write_test(PrefillOptions(model=str(tmp_path / "bart")), tmp_path / "test_padding.py")
    assert not (tmp_path / "test_padding.py").exists()


def test_small_configurations_keep_what_shapes_the_attention_calls() -> None:
    config = tiny.configuration(layers=12, hidden=256, heads=16, window=1024)
    small = shrunk(config).get_text_config().to_dict()
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert (small["num_hidden_layers"], small["hidden_size"], small["sliding_window"]) == (2, 64, 16)
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["head_dim"]) == (4, 2, 256)
    prefill, _ = tiny_prefill(PrefillOptions(text_only=True))
    layers = prefill.model.model.language_model.layers
    # 4 query heads: of width 256 and 2 key/value heads in the sliding layer, of width 512 and 1 in the global one
    assert [layer.self_attn.q_proj.out_features for layer in layers] == [4 * 256, 4 * 512]
    assert [layer.self_attn.k_proj.out_features for layer in layers] == [2 * 256, 512]


def test_special_tokens_move_into_the_small_vocabulary_and_stay_apart() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        bos_token_id=128_000,
        eos_token_id=[128_001, 128_009],
        pad_token_id=511,
    )
    small = shrunk(config)
    tokens = [small.bos_token_id, *small.eos_token_id, small.pad_token_id]
    assert small.vocab_size == VOCABULARY
    assert small.pad_token_id == 511
    assert len(set(tokens)) == 4
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 1, 128)
