"""pytorch#191937 on the real memory-efficient kernel, without anything of this program between it and the test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sdpa_repro.attention import AttentionCall
from tests.gpu.cuda import ROUNDING, WRONG_ROWS, dense, gemma_call, needs_cuda, wrong_rows

pytestmark = needs_cuda


def run(call: AttentionCall, backend: SDPBackend) -> Tensor:
    with torch.inference_mode(), sdpa_kernel(backend):
        return scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def test_the_call_has_the_layout_of_the_report() -> None:
    call = gemma_call()
    assert call.query.shape == (1, 16, 289, 512)
    assert call.query.stride() == (2367488, 512, 8192, 1)
    assert call.key.stride()[1:] == call.value.stride()[1:] == (0, 512, 1)
    assert call.attn_mask is not None
    assert call.attn_mask.shape == (1, 1, 289, 289)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_efficient_attention_is_wrong_in_the_last_row(dtype: torch.dtype) -> None:
    call = gemma_call(dtype=dtype)
    assert wrong_rows(call, run(call, SDPBackend.EFFICIENT_ATTENTION)) == WRONG_ROWS


@pytest.mark.parametrize("length", [288, 290])
def test_neighbouring_lengths_are_clean(length: int) -> None:
    call = gemma_call(length)
    assert wrong_rows(call, run(call, SDPBackend.EFFICIENT_ATTENTION)) == []


def test_dense_key_and_value_are_clean() -> None:
    call = dense(gemma_call())
    assert wrong_rows(call, run(call, SDPBackend.EFFICIENT_ATTENTION)) == []


@pytest.mark.parametrize(("length", "wrong"), [(321, [320]), (289, []), (257, [256])])
def test_narrow_heads_fail_at_one_beyond_a_multiple_of_64(length: int, wrong: list[int]) -> None:
    call = gemma_call(length, width=128)
    assert wrong_rows(call, run(call, SDPBackend.EFFICIENT_ATTENTION)) == (wrong if WRONG_ROWS else [])


def test_math_is_right() -> None:
    call = gemma_call()
    assert wrong_rows(call, run(call, SDPBackend.MATH)) == []
