"""Planted faults get their true conditions; the logic is tried with trials written in plain Python."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.answers import Answer, Conditions
from sdpa_repro.explaining.conditions import _upgrades, backend_line, conditions
from sdpa_repro.explaining.factors import FACTORS
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.check import LiveCheck
from sdpa_repro.replaying.trial import Result, Trial, in_process
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call

FAULTS = Path(__file__).resolve().parents[1] / "faults"
CONTEXT = {"grad": False}
SMALL: dict[str, Any] = {"dtype": torch.float32, "width": 16, "layout": "dense"}

Plant = Callable[[str], None]


@pytest.fixture(autouse=True)
def one_thread(torch_as_it_was: None) -> None:
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Plants a fault file in this process; the real kernel is back after the test."""

    def plant_file(name: str) -> None:
        runpy.run_path(str(FAULTS / f"{name}.py"))

    yield plant_file
    sys.modules["emulation"].restore()


def explained(call: AttentionCall, **words: Any) -> Conditions:
    return conditions(call, lambda context: in_process(Backend.FLASH_ATTENTION, context), CONTEXT, **words)


def ids(found: Conditions) -> tuple[set[str], set[str], set[str]]:
    document = found.document()
    return set(document["needed"]), set(document["not_needed"]), set(document["not_tested"])


def when(rule: Callable[[AttentionCall], bool], status: Status = Status.DIVERGES) -> Callable[[Any], Trial]:
    """Trials that fail for the calls the rule names, under any switches."""
    failing = Result(status, LiveCheck("diverges", max_abs=1.0, ratio=100.0, rows=((0, 0, 0),), wrong_rows=1))
    right = Result(Status.AGREES, LiveCheck("agrees", threshold=0.01))
    return lambda context: lambda call: failing if rule(call) else right


NOT_NEEDED_191937 = {
    "values",
    "dtype",
    "batch",
    "heads",
    "length_S",
    "query_layout",
    "key_value_layout",
    "scale",
    "fully_masked_rows",
    "left_padding",
    "bool_mask",
    "mask_head_broadcast",
    "alignment",
}


def test_the_fault_of_191937_gets_its_conditions(plant: Plant) -> None:
    plant("pytorch_191937")
    found = explained(make_call(padding=7), others={"MATH": in_process(Backend.MATH, CONTEXT)})
    needed, not_needed, not_tested = ids(found)
    assert needed == {"attn_mask", "key_value_head_stride_0", "no_grad", "length_L", "head_dim"}
    assert not_needed >= NOT_NEEDED_191937
    assert not_tested == set()
    assert found.alternatives == ()
    lines = {workaround.line: workaround.verified for workaround in found.workarounds}
    assert lines["key, value = key.contiguous(), value.contiguous()"] is True
    assert lines[backend_line("MATH")] is True


def test_one_head_that_fails_by_its_stride_of_0_alone_is_said_with_the_heads(plant: Plant) -> None:
    plant("pytorch_191937")
    (line,) = (line for line in explained(make_call(padding=7)).words() if line.startswith("not needed: "))
    alone = "query head 0 alone"
    said = f"{alone}, contiguous key and value: passes; {alone}, key and value still with head stride 0: fails"
    assert f"several query heads ({said})" in line


def test_a_fault_that_minds_a_head_stride_of_0_at_one_head_is_found_and_cured() -> None:
    call = make_call(heads=1, **{**SMALL, "layout": "expanded"})
    stride = (0, 0, *call.key.stride()[2:])
    call = replace(call, key=call.key.as_strided(call.key.shape, stride))
    found = conditions(call, when(lambda call: call.key.stride(1) == 0), CONTEXT)
    assert "key_value_head_stride_0" in ids(found)[0]
    lines = {workaround.line for workaround in found.workarounds}
    assert "key = key.clone(memory_format=torch.contiguous_format)" in lines


@pytest.mark.slow
def test_the_fault_of_191937_gets_its_conditions_at_the_size_it_was_found(plant: Plant) -> None:
    plant("pytorch_191937")
    found = explained(make_call(heads=16, rows=289, width=512, padding=9, scale=1.0))
    needed, not_needed, not_tested = ids(found)
    assert needed == {"attn_mask", "key_value_head_stride_0", "no_grad", "length_L", "head_dim"}
    assert not_needed >= NOT_NEEDED_191937
    assert not_tested == set()


def test_a_mask_equal_to_causal_offers_the_flag_as_a_workaround(plant: Plant) -> None:
    plant("pytorch_191937")
    found = explained(make_call())
    assert "attn_mask, is_causal = None, True" in {workaround.line for workaround in found.workarounds}


def transposed_value() -> AttentionCall:
    call = make_call(rows=9, **SMALL)
    return replace(call, value=call.value.transpose(1, 2).contiguous().transpose(1, 2))


def float32_mask() -> AttentionCall:
    hidden = ~torch.ones(8, 8, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 8, 8).masked_fill(hidden, -torch.inf)
    return replace(make_call(rows=8, width=16, layout="dense"), attn_mask=mask)


def low_row() -> AttentionCall:
    mask = torch.zeros(16, 16)
    mask[12] = -100.0
    return replace(make_call(rows=16, mask=None, **SMALL), attn_mask=mask)


@pytest.mark.parametrize(
    ("fault", "call", "expected", "lines"),
    [
        ("scale_ignored", make_call(scale=1.0, **SMALL), {"scale"}, ()),
        (
            "query_transposed_short",
            make_call(rows=8, mask=None, **SMALL),
            {"query_layout", "length_L"},
            ("query = query.contiguous()",),
        ),
        ("query_transposed_short", make_call(rows=3, mask=None, **SMALL), {"query_layout", "length_L"}, ()),
        (
            "float_mask_as_half",
            float32_mask(),
            {"attn_mask", "float_mask", "mask_dtype", "dtype"},
            ("attn_mask = attn_mask.to(query.dtype)", "attn_mask = attn_mask == 0"),
        ),
        ("last_key_tile_dropped", make_call(rows=33, **SMALL), {"length_S"}, ()),
        ("half_tile_padding", make_call(rows=64, keys=70, **SMALL), {"length_L"}, ()),
        ("value_strides_ignored", transposed_value(), {"key_value_layout"}, ("value = value.contiguous()",)),
        ("nan_log_sum_exp", low_row(), {"attn_mask"}, ()),
        ("rows_beyond", make_call(rows=130, **SMALL), {"attn_mask", "length_L"}, ()),
        ("gqa_wrong_head", make_call(kv_heads=2, **{**SMALL, "layout": "gqa"}), {"enable_gqa", "heads"}, ()),
        ("value_scaled_in_tile", make_call(rows=40, **SMALL), set(), ()),
        ("noise_in_column", make_call(**SMALL), set(), ()),
    ],
)
def test_planted_faults_get_their_true_conditions(
    plant: Plant, fault: str, call: AttentionCall, expected: set[str], lines: tuple[str, ...]
) -> None:
    plant(fault)
    found = explained(call)
    assert found.fails
    assert ids(found)[0] == expected
    assert {workaround.line for workaround in found.workarounds} >= set(lines)
    assert found.complete


@pytest.mark.parametrize("mask", [None, "causal", "float", "flag"])
def test_a_healthy_call_has_no_conditions(mask: str | None) -> None:
    found = explained(make_call(mask=mask, padding=3))
    assert not found.fails
    assert ids(found) == (set(), set(), set())
    assert found.workarounds == ()
    assert found.words() == ["the call does not fail here: there are no conditions to find"]


def test_every_factor_is_answered_once() -> None:
    found = conditions(make_call(), when(lambda call: True), CONTEXT)
    needed, not_needed, not_tested = ids(found)
    assert needed | not_needed | not_tested == {factor.id for factor in FACTORS}
    assert not needed & not_needed
    assert needed == set()


def test_two_factors_of_which_one_is_enough_are_named_together() -> None:
    call = make_call(padding=3)
    found = conditions(call, when(lambda call: call.key.stride(1) == 0 or not call.query.is_contiguous()), CONTEXT)
    assert found.alternatives == (("key_value_head_stride_0", "query_layout"),)
    assert not {"key_value_head_stride_0", "query_layout"} & ids(found)[1]
    assert "needed: one of key_value_head_stride_0 and query_layout" in found.words()


def test_a_change_that_is_declined_or_invalid_is_not_tested() -> None:
    def trial_for(context: Mapping[str, Any]) -> Trial:
        def trial(call: AttentionCall) -> Result:
            if call.query.is_contiguous():
                return Result(Status.DECLINED, reason="needs a strided query")
            if call.attn_mask is None:
                return Result(Status.ERROR, reason="needs a mask")
            return Result(Status.NONFINITE, LiveCheck("nonfinite", rows=((0, 1, 2),)))

        return trial

    found = conditions(make_call(), trial_for, CONTEXT)
    reasons = {answer.id: answer.text() for answer in found.not_tested}
    assert "needs a strided query" in reasons["query_layout"]
    assert "needs a mask" in reasons["attn_mask"]


def test_failing_in_another_way_is_no_cure() -> None:
    def trial_for(context: Mapping[str, Any]) -> Trial:
        return lambda call: Result(Status.NONFINITE if call.attn_mask is None else Status.DIVERGES, LiveCheck("x"))

    found = conditions(make_call(), trial_for, CONTEXT)
    assert "attn_mask" in ids(found)[1]


def test_a_pass_in_a_coarser_dtype_counts_only_when_the_error_would_show() -> None:
    def trial_for(error: float) -> Callable[[Any], Trial]:
        failing = Result(Status.DIVERGES, LiveCheck("diverges", max_abs=error, rows=((0, 0, 0),)))
        right = Result(Status.AGREES, LiveCheck("agrees", threshold=0.05))
        return lambda context: lambda call: failing if call.query.dtype == torch.float32 else right

    call = make_call(dtype=torch.float32)
    assert "dtype" in ids(conditions(call, trial_for(0.01), CONTEXT))[2]
    assert "dtype" in ids(conditions(call, trial_for(1.0), CONTEXT))[0]


def test_a_crash_has_conditions_too() -> None:
    found = conditions(
        make_call(rows=1, keys=5, mask=None),
        when(lambda call: call.query.shape[2] == 1 and call.key.shape[2] > 1, Status.CRASHED),
        CONTEXT,
    )
    assert ids(found)[0] == {"length_L", "length_S"}


def test_one_key_is_tried_for_a_crash_and_not_for_wrong_numbers() -> None:
    call = make_call(rows=4, keys=5, mask=None)
    many_keys = when(lambda tried: tried.key.shape[2] > 1)
    assert "length_S" in ids(conditions(call, many_keys, CONTEXT))[1]
    assert "length_S" in ids(conditions(call, when(lambda tried: tried.key.shape[2] > 1, Status.CRASHED), CONTEXT))[0]


def test_a_failure_that_comes_and_goes_is_tried_three_times() -> None:
    count = iter(range(10_000))

    def trial_for(context: Mapping[str, Any]) -> Trial:
        def trial(call: AttentionCall) -> Result:
            fails = call.attn_mask is not None and next(count) % 2 == 1
            return Result(Status.DIVERGES if fails else Status.AGREES, LiveCheck("x", rows=((0, 0, 0),)))

        return trial

    found = conditions(make_call(), trial_for, CONTEXT)
    assert found.fails
    assert found.flaky
    assert ids(found)[0] == {"attn_mask"}
    assert "does not fail every time" in found.words()[0]


def test_the_grad_factor_is_tried_under_other_switches() -> None:
    def trial_for(context: Mapping[str, Any]) -> Trial:
        return when(lambda call: context.get("grad") is not True)(context)

    assert ids(conditions(make_call(), trial_for, CONTEXT))[0] == {"no_grad"}


def test_a_batch_and_the_wrong_row_in_it_are_taken_apart() -> None:
    call = make_call(batch=3)
    place = LiveCheck("diverges", max_abs=1.0, rows=((2, 1, 4),))

    def trial_for(context: Mapping[str, Any]) -> Trial:
        def trial(tried: AttentionCall) -> Result:
            alone = tried.query.shape[0] == 1
            wrong = not alone or tried.query.data_ptr() == call.query[2].data_ptr()
            return Result(Status.DIVERGES if wrong else Status.AGREES, place)

        return trial

    assert "batch" in ids(conditions(call, trial_for, CONTEXT))[1]
    assert ids(conditions(call, when(lambda tried: tried.query.shape[0] > 1), CONTEXT))[0] == {"batch"}


def test_a_deadline_leaves_the_rest_untried_and_says_so() -> None:
    late = conditions(make_call(), when(lambda call: True), CONTEXT, deadline=time.monotonic() - 1)
    assert not late.complete
    assert len(late.not_tested) == len(FACTORS)


def test_ctrl_c_keeps_what_was_found() -> None:
    def trial_for(context: Mapping[str, Any]) -> Trial:
        def trial(call: AttentionCall) -> Result:
            if call.query.shape[2] != 33:
                raise KeyboardInterrupt
            return when(lambda call: call.attn_mask is not None)(context)(call)

        return trial

    found = conditions(make_call(), trial_for, CONTEXT)
    assert not found.complete
    assert ids(found)[0] == {"attn_mask"}
    assert "length_L" in ids(found)[2]
    assert "stopped before the end" in found.words()[-1]


def test_the_release_that_fixes_a_known_bug_is_named_and_marked_as_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    match = Match("pytorch#191937", "exact", "title", "2.14.0", "")
    (upgrade,) = conditions(make_call(), when(lambda call: True), CONTEXT, known=[match]).workarounds
    assert "2.14.0" in upgrade.line
    assert not upgrade.verified


def test_another_backend_that_fails_is_no_workaround() -> None:
    wrong = when(lambda call: True)(CONTEXT)
    assert conditions(make_call(), when(lambda call: True), CONTEXT, others={"MATH": wrong}).workarounds == ()


def test_the_document_is_plain_json_and_the_same_each_time() -> None:
    first, again = (conditions(make_call(), when(lambda call: call.key.stride(1) == 0), CONTEXT) for _ in range(2))
    assert json.dumps(first.document()) == json.dumps(again.document())
    assert first.document()["needed"] == ["key_value_head_stride_0"]


def test_progress_names_each_condition() -> None:
    said: list[str] = []
    conditions(make_call(), when(lambda call: True), CONTEXT, progress=said.append)
    assert "condition: a mask" in said


@pytest.mark.parametrize(("version", "offered"), [("2.13.0+cpu", True), ("2.14.0", False), ("2.14.1+cu130", False)])
def test_an_upgrade_comes_before_the_fix_only(monkeypatch: pytest.MonkeyPatch, version: str, offered: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    match = Match("pytorch#191937", "emulated", "", "2.14.0", "")
    assert [workaround.line for workaround in _upgrades([match])] == ["pip install 'torch>=2.14.0'"] * offered


def test_conditions_that_were_not_tried_for_one_reason_share_a_line() -> None:
    answers = (*(Answer(id, id, why="stopped") for id in ("a", "b", "c")), Answer("d", "d", why="no memory"))
    lines = Conditions(True, not_tested=answers).words()
    assert lines == ["not tested: a, b, c (stopped)", "not tested: d (no memory)"]


def test_a_search_that_was_stopped_at_once_does_not_say_that_the_call_is_right() -> None:
    late = conditions(make_call(), when(lambda call: True), CONTEXT, deadline=time.monotonic() - 1)
    assert late.words() == ["stopped before the call was tried"]


def test_a_trial_that_there_is_no_time_for_ends_the_search_with_what_was_found() -> None:
    def trial_for(context: Mapping[str, Any]) -> Trial:
        def trial(call: AttentionCall) -> Result:
            if call.query.shape[2] != 33:
                raise OutOfTimeError
            return when(lambda call: call.attn_mask is not None)(context)(call)

        return trial

    found = conditions(make_call(), trial_for, CONTEXT)
    assert not found.complete
    assert ids(found)[0] == {"attn_mask"}


@pytest.mark.parametrize(
    "sizes",
    [{"kv_heads": 0, "layout": "gqa"}, {"rows": 0, "keys": 4}, {"rows": 3, "keys": 0}, {"heads": 3, "kv_heads": 3}],
    ids=str,
)
def test_a_crash_of_an_empty_call_is_gone_through_to_the_end(sizes: dict[str, Any]) -> None:
    call = make_call(**{"heads": 2, "kv_heads": 2, "width": 8, "layout": "dense", "mask": None, **sizes})
    if sizes.get("heads") == 3:  # query heads that the key heads do not divide
        call = replace(call, key=call.key[:, :2], value=call.value[:, :2])
    found = conditions(call, lambda context: lambda call: Result(Status.CRASHED), CONTEXT)
    assert found.complete
    assert found.needed == ()


def test_a_mask_without_rows_is_said_not_to_grow() -> None:
    mask = torch.rand(9, generator=torch.Generator().manual_seed(0)) > 0.3
    call = make_call(rows=9, keys=9, **{**SMALL, "mask": None})
    found = conditions(replace(call, attn_mask=mask), when(lambda call: call.attn_mask is mask), CONTEXT)
    why = {answer.id: answer.why for answer in found.not_tested}
    assert "the mask cannot be made for other lengths" in why["length_L"]
