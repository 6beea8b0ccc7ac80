"""The guard on the GPU: the real bug is cured where this torch has it, and nothing is done where it has not."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_repro
from sdpa_repro.capturing.tiny import tiny_gemma4, tiny_inputs
from tests.gpu.cuda import AFFECTED, WRONG_ROWS, attend, dense, gemma_call, needs_cuda, replayed_graph, wrong_rows

pytestmark = [needs_cuda, pytest.mark.filterwarnings("ignore::sdpa_repro.guarding.switch.GuardWarning")]
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def test_the_bug_is_cured_inside_the_guard_alone() -> None:
    call = gemma_call()
    with sdpa_repro.guard() as opened:
        assert wrong_rows(call, attend(call)) == []
        for other in (gemma_call(290), dense(call)):
            attend(other)
    assert wrong_rows(call, attend(call)) == WRONG_ROWS
    changed = {name: count for name, count in opened.report()["changed"].items() if name == "pytorch#191937"}
    assert changed == ({"pytorch#191937": 1} if AFFECTED else {})


def test_the_guard_gives_what_dense_key_and_value_give_bit_for_bit() -> None:
    call = gemma_call()
    with sdpa_repro.guard():
        output = attend(call)
    assert torch.equal(output, attend(dense(call) if AFFECTED else call))


def test_a_cuda_graph_may_be_captured_under_the_guard() -> None:
    call = gemma_call()
    with sdpa_repro.guard():
        output = replayed_graph(call)
    assert wrong_rows(call, output) == []


def test_generation_under_the_guard_is_that_under_math() -> None:
    model = tiny_gemma4(dtype=torch.float32, device="cuda")
    inputs = tiny_inputs(model, 289)

    def generated() -> list[int]:
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        return [int(token) for token in tokens[0, 289:]]

    with sdpa_kernel(SDPBackend.MATH):
        expected = generated()
    with sdpa_repro.guard(), sdpa_kernel(KERNELS):
        assert generated() == expected
