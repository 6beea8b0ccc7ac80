"""One question, one answer: does this call fail on this backend?"""

from __future__ import annotations

import runpy
from dataclasses import replace

import pytest
import torch

from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import in_process, isolated, same_failure
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.replaying.dumps import FAULTS


@pytest.fixture
def planted() -> None:
    """The fault of pytorch#191937 in this process, until the test ends."""
    runpy.run_path(str(FAULTS / "pytorch_191937.py"))


def test_a_healthy_call_agrees_and_does_not_fail() -> None:
    result = in_process(Backend.FLASH_ATTENTION)(make_call())
    assert (result.status, result.fails) == (Status.AGREES, False)
    assert result.output is not None


def test_the_planted_fault_fails_and_its_neighbour_does_not(planted: None) -> None:
    trial = in_process(Backend.FLASH_ATTENTION)
    wrong = trial(make_call(rows=33))
    assert wrong.fails
    assert wrong.ratio > 1
    assert wrong.checked is not None
    assert {row for _, _, row in wrong.checked.rows} == {32}
    assert not trial(make_call(rows=34)).fails


def test_the_recorded_context_is_in_force(planted: None) -> None:
    context = {"grad": True, "requires_grad": {"query": True}}
    assert not in_process(Backend.FLASH_ATTENTION, context)(make_call()).fails
    assert in_process(Backend.FLASH_ATTENTION, {"inference": True})(make_call()).fails


def test_what_pytorch_declines_is_no_failure() -> None:
    result = in_process(Backend.CUDNN_ATTENTION)(make_call())
    assert (result.status, result.fails) == (Status.DECLINED, False)
    assert "does not exist" in result.reason


def test_arguments_that_raise_are_no_failure() -> None:
    call = make_call(mask=None)
    result = in_process(Backend.MATH)(replace(call, value=call.value[:, :, :-1]))
    assert (result.status, result.fails) == (Status.ERROR, False)


def test_failures_of_different_kinds_are_not_the_same(planted: None) -> None:
    trial = in_process(Backend.FLASH_ATTENTION)
    wrong, right = trial(make_call(rows=33)), trial(make_call(rows=34))
    assert same_failure(wrong, wrong)
    assert not same_failure(right, wrong)
    assert not same_failure(replace(wrong, status=Status.NONFINITE), wrong)


@pytest.mark.slow
def test_isolated_trials_survive_crashes_and_judge_outputs() -> None:
    with isolated(Backend.FLASH_ATTENTION, preload=[FAULTS / "segfault.py"]) as trial:
        result = trial(make_call())
        assert (result.status, result.fails) == (Status.CRASHED, True)
        assert "SIGSEGV" in result.reason
    with isolated(Backend.FLASH_ATTENTION, preload=[FAULTS / "pytorch_191937.py"]) as trial:
        assert trial(make_call(rows=33)).status is Status.DIVERGES
        assert trial(make_call(rows=34)).status is Status.AGREES


def test_a_trial_leaves_gradient_mode_and_tensors_alone() -> None:
    call = make_call()
    in_process(Backend.MATH, {"grad": True, "requires_grad": {"query": True}})(call)
    assert torch.is_grad_enabled()
    assert not call.query.requires_grad


def test_a_causal_bias_keeps_its_rule_when_a_gradient_is_recorded() -> None:
    from torch.nn.attention.bias import causal_lower_right

    call = replace(make_call(rows=6, keys=9, width=8, layout="dense", mask=None), attn_mask=causal_lower_right(6, 9))
    context = {"grad": True, "requires_grad": {"query": True}}
    assert in_process(Backend.DEFAULT, context)(call).status is Status.AGREES
