"""The walk finds the call that a faulty kernel answers wrongly, and calls rounding rounding."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_repro import dump
from sdpa_repro.capturing.prefill import Prefill, of_model, padded
from sdpa_repro.locating import stages
from sdpa_repro.locating.calls import Check
from sdpa_repro.locating.perturbing import shaken
from sdpa_repro.locating.recording import Recording
from sdpa_repro.locating.stages import Level, Outcome, StageTable, compare_stages
from sdpa_repro.locating.verdict import conclude
from sdpa_repro.locating.walking import of_row, rows_of, wrong_on_valid
from tests.faults import emulation
from tests.locating import prefills
from tests.locating.prefills import FAILING, LENGTH

FAULT = Path(__file__).resolve().parent.parent / "faults" / "pytorch_191937.py"
GUILTY = f"model.language_model.layers.{prefills.LAYERS - 1}.self_attn"
GUILTY_STAGE = f"layer {prefills.LAYERS - 1} SDPA"


def compare(prefill: Prefill, total: int, **options: Any) -> StageTable:
    return compare_stages(prefill, padded(prefill, prefill.length), padded(prefill, total), **options)


def outcomes(table: StageTable) -> dict[str, Outcome]:
    return {stage.name: stage.status for stage in table.stages}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faulty_kernel_is_found_in_its_layer_and_row(dtype: torch.dtype, tmp_path: Path) -> None:
    runpy.run_path(str(FAULT))
    table = compare(prefills.small(dtype), FAILING, out=tmp_path)
    first = table.first
    assert first is not None
    assert (first.name, first.level, first.module) == (GUILTY_STAGE, Level.BACKEND, GUILTY)
    before = table.stages[: table.stages.index(first)]
    assert {stage.status for stage in before} <= {Outcome.EQUAL, Outcome.WITHIN_NOISE}
    assert table.backend == "FLASH_ATTENTION"
    assert not table.poisoned
    verdict = conclude(None, table)
    assert verdict.level is Level.BACKEND
    assert f"query row {FAILING - 1}, the last of {FAILING}, in 16 of 16 heads" in verdict.sentence
    assert "FLASH_ATTENTION" in verdict.sentence
    assert GUILTY in verdict.sentence
    assert "\n" not in verdict.sentence
    assert table.dump is not None
    loaded = dump.load(table.dump)
    assert loaded.call.query.shape[-2] == FAILING
    assert loaded.origin["module"] == GUILTY
    assert list(tmp_path.glob("*.pt")) == [table.dump]


def test_a_poisoned_baseline_gives_the_same_verdict_and_is_called_poisoned(tmp_path: Path) -> None:
    runpy.run_path(str(FAULT))
    table = compare(prefills.small(length=FAILING), FAILING + 7, out=tmp_path)
    first = table.first
    assert first is not None
    assert (first.name, first.level, first.module) == (GUILTY_STAGE, Level.BACKEND, GUILTY)
    assert table.poisoned
    assert table.wrong_runs == ("unpadded",)
    assert table.dump is not None
    assert dump.load(table.dump).call.query.shape[-2] == FAILING
    verdict = conclude(None, table)
    assert verdict.poisoned
    assert "poisoned baseline" in verdict.sentence
    assert f"total length {FAILING} (unpadded)" in verdict.sentence


def test_both_runs_can_be_wrong() -> None:
    runpy.run_path(str(FAULT))
    table = compare(prefills.small(length=FAILING), FAILING + 32)
    assert table.first is not None
    assert table.first.name == GUILTY_STAGE
    assert table.wrong_runs == ("unpadded", "padded")


def test_a_length_beside_the_failing_one_is_clean() -> None:
    runpy.run_path(str(FAULT))
    table = compare(prefills.small(), FAILING + 1)
    assert table.first is None
    assert table.dump is None


def test_a_text_only_prompt_shows_the_fault_and_no_image_stages() -> None:
    runpy.run_path(str(FAULT))
    table = compare(prefills.small(images=0), FAILING)
    assert table.first is not None
    assert table.first.name == GUILTY_STAGE
    found = outcomes(table)
    for name in ("pixel inputs", "image features"):
        assert found[name] is Outcome.NOT_AVAILABLE


def test_right_padding_is_compared_at_the_last_valid_token() -> None:
    runpy.run_path(str(FAULT))
    prefill = replace(prefills.small(), padding_side="right")
    table = compare(prefill, FAILING)
    # the last row is padding here: what is wrong there reaches no valid token
    assert table.first is None
    assert any(call["status"] == "diverges" for call in table.calls)


def test_a_row_of_a_batch_is_compared_with_the_row_alone() -> None:
    prefill = prefills.small()
    batch = prefills.beside_another(prefill)
    inputs = (padded(prefill, LENGTH), padded(batch, FAILING))
    assert compare_stages(prefill, *inputs, row=1).first is None
    runpy.run_path(str(FAULT))
    first = compare_stages(prefill, *inputs, row=1).first
    assert first is not None
    assert (first.name, first.level) == (GUILTY_STAGE, Level.BACKEND)


def test_a_layer_that_is_run_through_several_times_is_fed_each_time_what_it_had() -> None:
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 32}
    config = AlbertConfig(**sizes, num_hidden_layers=3, num_attention_heads=2, initializer_range=0.1, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AlbertForMaskedLM(config).eval()
    prefill = of_model(model, {"input_ids": torch.arange(3, 23)[None]}, padding_side="right")
    for total in (20, 33):
        table = compare(prefill, total)
        assert table.first is None, conclude(None, table).sentence
        assert sum(stage.name.endswith("SDPA") for stage in table.stages) == 3


@pytest.mark.slow
def test_a_call_that_is_wrong_in_other_rows_of_both_runs_is_not_this_row_s() -> None:
    prefill = prefills.beside_another(prefills.small())

    def change(output: Tensor, _: emulation.Arguments) -> Tensor:
        output[1, :, -1] *= 2.0
        return output

    emulation.replace_flash(change)
    assert compare(prefill, FAILING, row=0).first is None
    table = compare(prefill, FAILING, row=1)
    assert table.first is not None
    assert table.first.where.startswith(f"query row {FAILING - 1}, the last of {FAILING}, in")
    assert table.first is not None
    assert table.first.level is Level.BACKEND
    assert "row 1 of a batch of 2" in conclude(None, table).sentence


@pytest.mark.slow
def test_a_layer_is_accused_by_no_few_shaken_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def seldom(model: Any, seed: int) -> Iterator[None]:
        """As a router near a tie: most runs, here the first ones, do not show that it can jump."""
        if seed < stages.DRAWS:
            yield
            return
        with shaken(model, seed):
            yield

    monkeypatch.setattr(stages, "shaken", seldom)
    table = compare(prefills.small(torch.bfloat16), FAILING)
    assert any((stage.moved or 0.0) > 0.0 for stage in table.stages if stage.name.endswith("output"))
    assert table.first is None


def test_shaken_runs_give_every_float_stage_its_noise() -> None:
    table = compare(prefills.small(), FAILING)
    floating = [stage for stage in table.stages if stage.name.endswith(("query", "key", "value", "output", "logits"))]
    assert floating
    assert all(stage.noise is not None and 0 < stage.noise < 1e-2 for stage in floating)


def test_what_was_not_seen_is_never_called_equal() -> None:
    prefill = prefills.small(images=0)
    for stage in compare(prefill, FAILING).stages:
        if stage.detail.startswith("not seen"):
            assert stage.status is Outcome.NOT_AVAILABLE
            assert stage.moved is None


def test_every_class_has_a_document_of_plain_values() -> None:
    import json

    table = compare(prefills.small(images=0), FAILING)
    found = json.loads(json.dumps(table.document()))
    assert found["first"] is None
    assert found["total"] == FAILING
    assert {"name", "status", "moved", "noise", "where", "module", "file", "detail"} <= set(found["stages"][0])
    assert json.loads(json.dumps(conclude(None, table).document()))["level"] == "nothing beyond dtype noise"


def check(rows: tuple[tuple[int, int, int], ...], wrong_rows: int, lengths: tuple[int, int] = (9, 9)) -> Check:
    place = {"index": 0, "module": "m", "kernel": "MATH", "lengths": lengths, "batches": 2, "heads": 4}
    return Check("diverges", 1.0, 0.1, 10.0, rows, wrong_rows, **place)


def test_only_wrong_rows_of_valid_tokens_of_the_row_count() -> None:
    run = Recording((), torch.arange(4, 9), 9, 1, torch.zeros(2, 3))
    assert wrong_on_valid(run, check(((1, 0, 4),), 1))
    assert not wrong_on_valid(run, check(((1, 0, 3),), 1))
    assert not wrong_on_valid(run, check(((0, 0, 4),), 1))
    assert wrong_on_valid(run, check(((1, 0, 3),), 99))  # more are wrong than are listed
    assert wrong_on_valid(run, check(((1, 0, 0),), 1, (1, 9)))  # not the padded sequence: all its rows are valid


def test_wrong_rows_of_other_rows_of_the_batch_are_not_told() -> None:
    run = Recording((), torch.arange(4, 9), 9, 1, torch.zeros(2, 3))
    both = check(((0, 0, 5), (0, 1, 6), (1, 2, 3), (1, 2, 8)), 4)
    assert rows_of(of_row(run, both)) == "query row 8, the last of 9, in 1 of 4 heads"
    assert of_row(run, check(((0, 0, 5),), 99)).wrong_rows == 99


def test_wrong_rows_are_told_as_far_as_they_are_listed() -> None:
    last = tuple((0, head, 8) for head in range(4))
    assert rows_of(check(last, 4)) == "query row 8, the last of 9, in 4 of 4 heads"
    assert rows_of(check(((0, 1, 2), (0, 1, 5)), 2)) == "2 query rows from 2 to 5 of 9 in 1 of 4 heads"
    assert rows_of(check(((0, 1, 2),), 30)) == "30 rows of 4 heads, first query row 2 of 9 in head 1"
