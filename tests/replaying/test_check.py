from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying import check as module
from sdpa_repro.replaying.check import check
from tests.calls import make_call
from tests.definition import attention


def computed(call: AttentionCall) -> Tensor:
    with torch.no_grad():
        return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
def test_the_real_kernel_agrees(dtype: torch.dtype, layout: str) -> None:
    call = make_call(dtype=dtype, layout=layout, rows=100, padding=5)
    result = check(call, computed(call))
    assert result.status == "agrees"
    assert 0 < result.ratio < 1
    assert result.rows == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_last_row_with_the_wrong_mask_row_is_named(dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, rows=289, heads=16, width=512, scale=1.0, padding=7)
    output = computed(call)
    output[..., -1, :] = 0
    result = check(call, output)
    assert result.status == "diverges"
    assert result.wrong
    assert result.rows == tuple((0, head, 288) for head in range(16))
    assert result.wrong_rows == 16
    assert result.ratio > 3


def test_many_wrong_rows_are_counted_and_some_are_listed() -> None:
    call = make_call(rows=200)
    result = check(call, computed(call) + 1)
    assert result.wrong_rows == 4 * 200
    assert len(result.rows) == module.LISTED


def test_nan_in_a_live_row_is_nonfinite_with_an_infinite_ratio() -> None:
    call = make_call()
    output = computed(call)
    output[0, 0, 4, 0] = float("nan")
    result = check(call, output)
    assert (result.status, result.ratio, result.rows) == ("nonfinite", float("inf"), ((0, 0, 4),))


def test_suspects_that_the_noise_of_math_explains_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the floor at nothing every row is a suspect; MATH's own error in the row clears a healthy output."""
    monkeypatch.setattr(module, "floor", lambda scale, dtype: scale.size * 0)
    call = make_call(dtype=torch.float32, rows=16)
    assert check(call, computed(call)).status == "agrees"


def test_dropout_is_recorded_without_a_verdict() -> None:
    call = replace(make_call(), dropout_p=0.1)
    assert check(call, computed(make_call())).status == "unchecked"


def test_an_invalid_call_is_unchecked_with_the_reason_and_raises_nothing() -> None:
    call = make_call(mask=None)
    result = check(replace(call, value=call.value[:, :, :-1]), computed(call))
    assert result.status == "unchecked"
    assert "key has 33 positions, value has 32" in result.reason


def test_out_of_memory_shrinks_the_tiles_then_gives_up_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def full(_: AttentionCall, output: Tensor, tile_bytes: int) -> None:
        tried.append(tile_bytes)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(module, "screened", full)
    call = make_call()
    result = check(call, computed(call))
    assert tried[1] < tried[0]
    assert (result.status, result.reason) == ("unchecked", "OutOfMemoryError: no memory left")


def test_values_are_rounded_as_autocast_rounds_them() -> None:
    call = make_call(dtype=torch.float32, rows=64, scale=1.0)
    rounded = call.with_tensors({name: call.tensors[name].bfloat16() for name in ("query", "key", "value")})
    output = attention(rounded).bfloat16()
    assert check(call, output, dtype=torch.bfloat16).status == "agrees"
    assert check(call, output).status == "diverges"


def test_precision_and_random_state_are_left_as_they_were() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        state = torch.get_rng_state()
        call = make_call()
        check(call, computed(call) + 1)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_outputs_in_the_layout_of_a_transposed_projection_are_compared_in_place() -> None:
    call = make_call(batch=2, rows=50)
    output = computed(call).transpose(1, 2).contiguous().transpose(1, 2)
    assert check(call, output).status == "agrees"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_tensors_and_the_output_are_left_as_they_are(dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype)
    output = computed(call) + 1
    before = {name: tensor.clone() for name, tensor in call.tensors.items()}
    kept = output.clone()
    check(call, output)
    assert torch.equal(output, kept)
    assert all(torch.equal(before[name], tensor) for name, tensor in call.tensors.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_lies_in_hidden_positions_hides_no_wrong_row(dtype: torch.dtype, which: str) -> None:
    call = make_call(dtype=dtype, layout="dense", rows=300, width=64, padding=7)
    tensor = call.tensors[which].clone()
    tensor[:, :, :7] = 1e30  # an uninitialised cache slot: finite, but its square is infinite in float32
    call = call.with_tensors({which: tensor})
    output = attention(call).to(dtype)
    assert check(call, output).status == "agrees"
    output[0, 2, 250] *= 1.3
    result = check(call, output)
    assert (result.status, result.rows) == ("diverges", ((0, 2, 250),))


@pytest.mark.parametrize("size", [1e20, 1e30, 1e37])
def test_a_wrong_row_of_very_large_values_is_found(size: float) -> None:
    call = make_call(dtype=torch.float32, layout="dense", rows=300, width=64)
    call = replace(call, value=call.value * size)
    output = attention(call).float()
    assert check(call, output).status == "agrees"
    output[0, 2, 250] *= 1.1
    result = check(call, output)
    assert (result.status, result.rows) == ("diverges", ((0, 2, 250),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", [None, "causal", "float", "flag"])
@pytest.mark.parametrize("layout", ["expanded", "gqa"])
def test_the_math_op_is_math_and_touches_no_switch(
    dtype: torch.dtype, mask: str | None, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(dtype=dtype, mask=mask, layout=layout, rows=33, width=40, kv_heads=2)
    with sdpa_kernel(SDPBackend.MATH):
        expected = computed(call)

    def refused(*_: object) -> None:
        raise AssertionError("a switch that holds in all threads")

    for name in ("flash", "mem_efficient", "math", "cudnn"):
        monkeypatch.setattr(torch._C, f"_set_sdp_use_{name}", refused)
    with torch.no_grad():
        assert torch.equal(module.math_op(call), expected)


def test_a_suspicious_row_is_judged_without_switches_that_hold_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call()
    output = computed(call)
    output[..., -1, :] += 1

    def refused(*_: object) -> None:
        used.append(1)

    used: list[int] = []
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        monkeypatch.setattr(torch._C, f"_set_sdp_use_{name}", refused)
    assert check(call, output).status == "diverges"
    assert used == []
