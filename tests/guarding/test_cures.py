"""What the guard does to a call is exact: MATH bit for bit, and the other changes to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_repro.attention import AttentionCall
from sdpa_repro.guarding import cures
from sdpa_repro.guarding.cures import Cure, attend, combined
from sdpa_repro.replaying.backends import dispatched
from tests.calls import make_call
from tests.definition import attention

FUNCTION = (torch.nn.functional.scaled_dot_product_attention,)
CALLS = {
    "bool mask": make_call(padding=3),
    "float mask": make_call(padding=3, mask="float", dtype=torch.float16),
    "no mask": make_call(mask=None, dtype=torch.float32),
    "causal": make_call(mask="flag", keys=40, dtype=torch.float32),
    "grouped": make_call(heads=8, kv_heads=2, layout="gqa", scale=0.5),
}


def by_math(call: AttentionCall) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return FUNCTION[0](call.query, call.key, call.value, **call.keywords)


@pytest.mark.parametrize("name", CALLS)
def test_math_is_that_of_sdpa_kernel_bit_for_bit(name: str) -> None:
    call = CALLS[name]
    assert torch.equal(attend(FUNCTION[0], call, Cure(math=True)), by_math(call))


def test_math_under_autocast_is_that_of_sdpa_kernel_bit_for_bit() -> None:
    call = make_call(padding=3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = attend(FUNCTION[0], call, Cure(math=True)), by_math(call)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)


def test_math_gives_the_gradients_of_sdpa_kernel() -> None:
    gradients = []
    for way in ("ours", "theirs"):
        call = make_call(dtype=torch.float32)
        query = call.query.clone().requires_grad_()
        call = replace(call, query=query)
        output = attend(FUNCTION[0], call, Cure(math=True)) if way == "ours" else by_math(call)
        output.square().sum().backward()
        assert query.grad is not None
        gradients.append(query.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", CALLS)
def test_math_in_blocks_is_right_when_memory_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cures, "MOST_BYTES", 30_000)
    call = CALLS[name]
    output = attend(FUNCTION[0], call, Cure(math=True))
    seen = call.query.shape[-2] - 3
    error = (output.double() - attention(call))[:, :, -seen:].abs().max()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[output.dtype]


def test_blocks_of_query_rows_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cures, "WRAPS", 2 * 40 * 10)
    call = make_call(padding=3, dtype=torch.float32)
    asked = []

    def function(query: Tensor, *rest: Tensor, **words: object) -> Tensor:
        asked.append(query.shape[-2])
        return FUNCTION[0](query, *rest, **words)  # type: ignore[arg-type]

    output = attend(function, call, Cure(blocks=True))
    assert asked == [10, 10, 10, 3]
    assert (output.double() - attention(call))[:, :, 3:].abs().max() < 1e-5


def test_a_value_that_is_the_key_is_copied_once() -> None:
    call = make_call()
    call = replace(call, value=call.key)
    given: list[Tensor] = []

    def function(query: Tensor, key: Tensor, value: Tensor, **words: object) -> Tensor:
        given.extend((query, key, value))
        return query

    attend(function, call, Cure(dense=("key", "value")))
    assert given[0] is call.query
    assert given[1] is given[2]
    assert given[1].is_contiguous()


def test_changes_combine() -> None:
    found = combined([Cure(dense=("value",)), Cure(dense=("query",)), Cure(blocks=True)])
    assert found == Cure(dense=("query", "value"), blocks=True)
    assert combined([found, Cure(math=True)]).words == "MATH for this call"
    assert Cure(dense=("key", "value")).words == "contiguous key and value"


def test_the_kernel_is_the_one_that_the_dispatcher_takes() -> None:
    call = make_call()
    assert dispatched(call) == "FLASH_ATTENTION"
    with sdpa_kernel(SDPBackend.MATH):
        assert dispatched(call) == "MATH"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert dispatched(call) == "unknown"
