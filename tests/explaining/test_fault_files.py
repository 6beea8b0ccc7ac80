"""The fault files made for explaining do what their docstrings say, measured against the float64 definition."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sdpa_repro.attention import AttentionCall
from tests.calls import make_call
from tests.definition import attention

FAULTS = Path(__file__).resolve().parents[1] / "faults"
ROUNDING = 2e-5
"""What float32 attention of normal values may be off by."""

Plant = Callable[[str], None]


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Plants a fault file in this process; the real kernel is back after the test."""

    def plant_file(name: str) -> None:
        runpy.run_path(str(FAULTS / f"{name}.py"))

    yield plant_file
    sys.modules["emulation"].restore()


def call_of(**words: object) -> AttentionCall:
    return make_call(**{"dtype": torch.float32, "width": 16, "layout": "dense", **words})  # type: ignore[arg-type]


def run(call: AttentionCall) -> Tensor:
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def equal(output: Tensor, expected: Tensor, rounding: float = ROUNDING) -> bool:
    return bool((output.double() - expected).abs().amax() < rounding)


def wrong_rows(output: Tensor, call: AttentionCall) -> list[int]:
    off = (output.double() - attention(call)).abs().nan_to_num(math.inf).amax(-1) > ROUNDING
    return [int(row) for row in off.any(0).any(0).nonzero().flatten()]


def last_keys_hidden(call: AttentionCall, first: int) -> AttentionCall:
    rows, keys = call.query.shape[2], call.key.shape[2]
    visible = torch.ones(rows, keys, dtype=torch.bool) if call.attn_mask is None else call.attn_mask.clone()
    visible[..., first:] = False
    return replace(call, attn_mask=visible)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("keys", [33, 65])
def test_last_key_tile_dropped_leaves_out_the_last_key(plant: Plant, mask: str | None, keys: int) -> None:
    call = call_of(rows=keys, mask=mask)
    plant("last_key_tile_dropped")
    assert equal(run(call), attention(last_keys_hidden(call, keys - 1)))
    assert not equal(run(call), attention(call))


@pytest.mark.parametrize("keys", [1, 32, 34, 48])
def test_last_key_tile_dropped_is_right_at_other_key_lengths(plant: Plant, keys: int) -> None:
    plant("last_key_tile_dropped")
    call = call_of(rows=33, keys=keys, mask=None)
    assert equal(run(call), attention(call))


@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (192, 100)])
def test_half_tile_padding_adds_keys_that_score_0(plant: Plant, rows: int, keys: int) -> None:
    call = call_of(rows=rows, keys=keys, mask=None)
    missing = -keys % 128
    padded = replace(
        call,
        key=torch.nn.functional.pad(call.key, (0, 0, 0, missing)),
        value=torch.nn.functional.pad(call.value, (0, 0, 0, missing)),
    )
    plant("half_tile_padding")
    assert equal(run(call), attention(padded))
    assert not equal(run(call), attention(call))


@pytest.mark.parametrize(("rows", "keys"), [(63, 64), (128, 100), (32, 64), (64, 128)])
def test_half_tile_padding_is_right_at_other_lengths(plant: Plant, rows: int, keys: int) -> None:
    plant("half_tile_padding")
    call = call_of(rows=rows, keys=keys, mask=None)
    assert equal(run(call), attention(call))


def test_value_strides_ignored_reads_memory_in_order(plant: Plant) -> None:
    call = call_of(rows=9)
    value = call.value.transpose(1, 2).contiguous().transpose(1, 2)
    misread = value.transpose(1, 2).reshape(-1).view(value.shape)
    plant("value_strides_ignored")
    assert equal(run(replace(call, value=value)), attention(replace(call, value=misread)))
    assert not equal(run(replace(call, value=value)), attention(call))
    assert equal(run(call), attention(call))


def test_value_strides_ignored_leaves_expanded_heads_alone(plant: Plant) -> None:
    call = call_of(rows=9, layout="expanded")
    plant("value_strides_ignored")
    assert equal(run(call), attention(call))


def test_query_transposed_short_misreads_up_to_8_rows(plant: Plant) -> None:
    plant("query_transposed_short")
    for rows in (2, 8):
        call = call_of(rows=rows, keys=9, mask=None)
        misread = call.query.transpose(1, 2).reshape(-1).view(call.query.shape)
        assert equal(run(call), attention(replace(call, query=misread)))
        assert not equal(run(call), attention(call))
        dense = replace(call, query=call.query.contiguous())
        assert equal(run(dense), attention(call))
    longer = call_of(rows=9, keys=9, mask=None)
    assert equal(run(longer), attention(longer))


def test_scale_ignored_uses_the_default_scale(plant: Plant) -> None:
    call = call_of(scale=1.0)
    plant("scale_ignored")
    assert equal(run(call), attention(replace(call, scale=None)))
    assert not equal(run(call), attention(call))
    assert equal(run(replace(call, scale=None)), attention(replace(call, scale=None)))


def test_float_mask_as_half_reads_the_lower_half_of_the_mask(plant: Plant) -> None:
    call = call_of(rows=8, dtype=torch.bfloat16, mask=None)
    mask = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    low = mask.flatten().view(torch.bfloat16)[:64].view(8, 8)
    assert low.flatten()[0::2].eq(0).all()
    plant("float_mask_as_half")
    misread = attention(replace(call, attn_mask=low))
    assert equal(run(replace(call, attn_mask=mask)), misread, 3e-2)
    assert not equal(run(replace(call, attn_mask=mask)), attention(replace(call, attn_mask=mask)), 3e-2)
    same = replace(call, attn_mask=mask.bfloat16())
    assert equal(run(same), attention(same), 3e-2)


def test_nan_log_sum_exp_hits_rows_with_small_sums(plant: Plant) -> None:
    call = call_of(rows=16, mask=None)
    mask = torch.zeros(16, 16)
    mask[3], mask[7], mask[9] = -80.0, -100.0, -math.inf
    call = replace(call, attn_mask=mask)
    plant("nan_log_sum_exp")
    assert wrong_rows(run(call), call) == [7]
    assert run(call)[:, :, 7].isnan().all()


def test_rows_beyond_uses_the_mask_of_128_rows_earlier(plant: Plant) -> None:
    call = call_of(rows=130, mask="causal")
    assert call.attn_mask is not None
    wrapped = call.attn_mask.clone()
    wrapped[..., 128:, :] = wrapped[..., :2, :]
    plant("rows_beyond")
    assert wrong_rows(run(call), call) == [128, 129]
    assert equal(run(call), attention(replace(call, attn_mask=wrapped)))
    right = call_of(rows=128, mask="causal")
    assert equal(run(right), attention(right))


def test_gqa_wrong_head_interleaves_heads(plant: Plant) -> None:
    call = call_of(layout="gqa", kv_heads=2)
    plant("gqa_wrong_head")
    heads = [0, 1, 0, 1]
    interleaved = replace(call, key=call.key[:, heads], value=call.value[:, heads], enable_gqa=False)
    assert equal(run(call), attention(interleaved))
    assert not equal(run(call), attention(call))
    dense = call_of(layout="dense", kv_heads=2)
    assert equal(run(dense), attention(dense))


@pytest.mark.parametrize(("rows", "keys", "status"), [(1, 5, -11), (1, 1, 0), (2, 5, 0)])
def test_crash_single_query_ends_the_process(rows: int, keys: int, status: int) -> None:
    code = (
        f"import runpy, torch; runpy.run_path({str(FAULTS / 'crash_single_query.py')!r})\n"
        f"q, k = torch.ones(1, 1, {rows}, 8), torch.ones(1, 1, {keys}, 8)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, k, k)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == status


def test_value_scaled_in_tile_scales_16_rows(plant: Plant) -> None:
    call = call_of(rows=40)
    expected = attention(call)
    expected[:, :, 16:32] *= 1.07
    plant("value_scaled_in_tile")
    assert equal(run(call), expected)
    assert wrong_rows(run(call), call) == list(range(16, 32))


def test_noise_in_column_replaces_column_3(plant: Plant) -> None:
    call = call_of()
    expected = attention(call)
    expected[..., 3] = expected[..., 0].cos()
    plant("noise_in_column")
    assert equal(run(call), expected)
    assert not equal(run(call), attention(call))
