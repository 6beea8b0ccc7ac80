"""From a model and its inputs to the level at which a fix belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_repro import InputError, locate
from sdpa_repro.locating import judging, watching
from sdpa_repro.locating import locate as module
from sdpa_repro.locating.lengthening import lengthened
from sdpa_repro.locating.locate import locate_prefill
from sdpa_repro.locating.table import Level
from sdpa_repro.locating.verify import verify_prefill
from tests.capturing import faults
from tests.faults import emulation
from tests.locating.prefills import FAILING, LENGTH, beside_another, full, small

GUILTY = "model.language_model.layers.2.self_attn"
PAD = FAILING - LENGTH


@pytest.mark.slow
def test_the_planted_fault_is_put_at_the_backend_in_its_layer_and_row() -> None:
    prefill = small(torch.bfloat16)
    faults.plant("pytorch_191937")
    found = locate(prefill.model, prefill.inputs, pads=[PAD, PAD + 1], lengths=False, greedy=2)
    document = found.document()
    assert (document["level"], document["module"]) == ("SDPA backend", GUILTY)
    assert document["stage"] == "layer 2 SDPA"
    assert f"row {FAILING - 1}" in found.sentence
    assert "FLASH_ATTENTION" in found.sentence
    assert found.exit_status == 1
    assert not document["poisoned"]
    assert document["totals_wrong"] == [FAILING]
    assert [each["path"] for each in document["greedy"]] == ["default", "MATH"]
    assert {"level", "module", "stage", "sentence", "sweep", "length_rule", "stages"} <= set(document)


@pytest.mark.slow
def test_a_prompt_of_a_failing_length_gets_the_same_verdict_and_a_poisoned_baseline() -> None:
    prefill = lengthened(small(torch.bfloat16), FAILING)
    assert prefill is not None
    faults.plant("pytorch_191937")
    found = locate_prefill(prefill, [1, 32], lengths=False)
    assert (found.document()["level"], found.document()["module"]) == ("SDPA backend", GUILTY)
    assert found.document()["poisoned"]
    assert found.sweep.baseline.value == "MATH"
    assert found.exit_status == 1


@pytest.mark.slow
def test_a_healthy_model_has_nothing_beyond_noise() -> None:
    prefill = small(torch.bfloat16)
    found = locate(prefill.model, prefill.inputs, pads=[PAD], lengths=False)
    assert found.document()["level"] == "nothing beyond dtype noise"
    assert found.exit_status == 0
    assert found.document()["dump"] is None


@pytest.mark.slow
def test_the_rule_names_the_total_length() -> None:
    prefill = small(images=0)
    faults.plant("pytorch_191937")
    found = locate(prefill.model, prefill.inputs, pads=[1, 6, 7, 8, 23, 38, 39, 40])
    rule = found.document()["length_rule"]
    assert (rule["rule"], rule["over"]) == ("total % 32 == 1", "total length")
    assert "not the prompt length or the padding" in rule["sentence"]
    assert found.sweep.totals_wrong == (65, 97)


def wrong_in_row(row: int) -> None:
    """From now on the last query row of one row of every batch of several is wrong."""

    def change(output: Tensor, _: emulation.Arguments) -> Tensor:
        if len(output) > 1:
            output[row, :, -1] *= 2.0
        return output

    emulation.replace_flash(change)


@pytest.mark.slow
def test_of_a_batch_of_prompts_the_row_that_is_wrong_is_found() -> None:
    prefill = beside_another(small())
    wrong_in_row(1)
    found = locate_prefill(prefill, [1], lengths=False)
    assert found.verdict is not None
    assert found.verdict.level is Level.BACKEND
    assert "row 1 of a batch of 2" in found.sentence
    assert found.exit_status == 1


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1])
def test_a_kernel_that_is_wrong_in_batches_alone_is_found_in_one(row: int) -> None:
    wrong_in_row(row)
    found = locate_prefill(small(), [3], lengths=False)
    assert found.sweep.totals_wrong == ()
    assert found.verdict is not None
    assert found.verdict.level is Level.BACKEND
    assert f"total length {LENGTH + 3}" in found.sentence
    assert f"row {row} of a batch of 2" in found.sentence


@pytest.mark.slow
def test_logits_alone_are_no_finding_where_every_stage_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "limit", lambda *_: 1e-30)  # as if rounding moved nothing
    found = locate_prefill(small(torch.bfloat16), [1, 7, 20], lengths=False)
    assert found.sweep.any_flagged
    assert found.sentence.startswith("nothing beyond dtype noise")
    assert "no single stage explains it" in found.sentence
    assert found.exit_status == 0


def test_where_nothing_is_padded_a_note_says_so() -> None:
    prefill = full()
    found = locate_prefill(prefill, [], lengths=False)
    assert found.exit_status == 0
    assert any(note.startswith("nothing was padded") for note in found.notes)


def test_what_could_not_be_looked_at_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(value: object) -> None:
        raise TypeError("an output of a kind that nobody knows")

    monkeypatch.setattr(watching, "first_tensor", odd)
    found = locate_prefill(full(), [], lengths=False)
    assert "could not be looked at: TypeError: an output of a kind that nobody knows" in found.notes
    notes = verify_prefill(full(), [], caches=False).notes
    assert notes.count("could not be looked at: TypeError: an output of a kind that nobody knows") == 1


def test_padding_that_came_with_the_inputs_is_taken_off() -> None:
    prefill = small()
    from sdpa_repro.capturing.prefill import of_model, padded

    again = of_model(prefill.model, padded(prefill, LENGTH + 5))
    assert again.length == LENGTH
    assert torch.equal(again.inputs["input_ids"], prefill.inputs["input_ids"])
    assert again.pad_token == prefill.pad_token


def test_inputs_that_cannot_be_located_are_refused_in_one_line() -> None:
    prefill = small()
    with pytest.raises(InputError, match="no input_ids"):
        locate(prefill.model, {})
    with pytest.raises(InputError, match="negative"):
        locate(prefill.model, prefill.inputs, pads=[-1])
    prefill.model.train()
    try:
        with pytest.raises(InputError, match="eval"):
            locate(prefill.model, prefill.inputs)
    finally:
        prefill.model.eval()


def test_ctrl_c_after_the_sweep_keeps_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **words: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "compare_stages", stop)
    prefill = small()
    found = locate(prefill.model, prefill.inputs, pads=[1], lengths=False)
    assert found.exit_status == 130
    assert found.sentence.startswith("stopped after 2 total lengths, none of them beyond noise")
    assert found.document()["level"] is None
    assert not found.document()["complete"]


@pytest.mark.slow
def test_what_greedy_cannot_do_is_a_note() -> None:
    prefill = small()
    found = locate(prefill.model, prefill.inputs, pads=[1], padding_side="right", lengths=False, greedy=2)
    assert found.greedy == ()
    assert any("goes on after the padding" in note for note in found.notes)
