from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying import check as check_module
from sdpa_repro.replaying.check import check
from sdpa_repro.replaying.reference import TILE_BYTES, four_dims, reference
from sdpa_repro.replaying.screen import Cleared, screened, signs
from sdpa_repro.replaying.verdict import compare, floor, rms_share
from tests.calls import make_call

TILE = TILE_BYTES["cpu"]


def computed(call: AttentionCall) -> Tensor:
    with torch.no_grad():
        return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def screen(call: AttentionCall, output: Tensor) -> Cleared | None:
    return screened(four_dims(call), output, TILE)


def ratios(call: AttentionCall, output: Tensor) -> Tensor:
    """Error over threshold of every row, from the float64 reference."""
    expected = reference(call)
    limit = floor(expected.scale, output.dtype)
    largest, rms, _ = compare(output, expected.output)
    return torch.maximum(largest / limit, rms / (limit * rms_share(output.shape[-1]))).where(expected.decides, 0.0)


def decode(dtype: torch.dtype = torch.bfloat16, layout: str = "dense", keys: int = 100) -> AttentionCall:
    call = make_call(dtype=dtype, layout=layout, rows=keys, padding=9)
    mask = None if call.attn_mask is None else call.attn_mask[..., -1:, :]
    return replace(call, query=call.query[..., -1:, :], attn_mask=mask, is_causal=False)


def prefill(**options: object) -> AttentionCall:
    return make_call(dtype=torch.float32, rows=160, heads=8, width=64, padding=7, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
def test_a_healthy_decode_step_is_cleared_with_the_numbers_of_one_of_its_rows(dtype: torch.dtype, layout: str) -> None:
    call = decode(dtype, layout)
    output = computed(call)
    cleared = screen(call, output)
    assert cleared is not None
    assert 0 < cleared.ratio <= 1
    if dtype != torch.float32:  # there the reference's own rounding is as large as the error
        near = (ratios(call, output) / cleared.ratio - 1).abs() < 0.02
        assert bool(near.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head", [0, 3])
def test_a_decode_step_with_an_error_beyond_the_floor_in_one_entry_is_not_cleared(
    dtype: torch.dtype, head: int
) -> None:
    call = decode(dtype)
    output = computed(call).float()
    limit = floor(reference(call).scale, dtype)[0, head, 0]
    output[0, head, 0, 5] += 4 * float(limit)
    assert screen(call, output.to(dtype)) is None


def test_a_decode_step_whose_rows_see_nothing_is_cleared() -> None:
    call = decode()
    call = replace(call, attn_mask=torch.zeros(1, 1, 1, call.key.shape[-2], dtype=torch.bool))
    assert screen(call, computed(call)) == (0.0, 0.0, 0.0)


def test_a_float_mask_and_the_causal_flag_are_part_of_a_small_call() -> None:
    call = decode(torch.float32)
    keys = call.key.shape[-2]
    biased = replace(call, attn_mask=torch.linspace(-3, 3, keys)[None, None, None])
    causal = replace(call, attn_mask=None, is_causal=True)
    for changed in (biased, causal):
        assert screen(changed, computed(changed)) is not None
        assert screen(changed, computed(call)) is None


def test_nan_in_the_output_of_a_decode_step_is_not_cleared() -> None:
    call = decode()
    output = computed(call)
    output[..., 3] = float("nan")
    assert screen(call, output) is None


def test_a_nan_in_a_hidden_value_is_left_to_the_whole_check() -> None:
    call = decode(torch.float32)
    value = call.value.clone()
    value[..., 0, :] = float("nan")
    poisoned = replace(call, value=value)
    assert screen(poisoned, computed(call)) is None
    assert check(poisoned, computed(call)).status == "agrees"


@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
def test_a_healthy_float32_prefill_is_cleared(layout: str) -> None:
    call = prefill(layout=layout)
    output = computed(call)
    cleared = screen(call, output)
    assert cleared is not None
    assert 0 < cleared.ratio <= 2 * float(ratios(call, output).max())


@pytest.mark.parametrize("columns", [(11,), (0, 63), (4, 8), (2, 3, 4, 5), tuple(range(64))])
def test_an_error_of_the_floor_in_one_row_of_a_float32_prefill_is_not_cleared(columns: tuple[int, ...]) -> None:
    call = prefill()
    clean = computed(call)
    limit = float(floor(reference(call).scale, torch.float32)[0, 5, 120])
    for sign in (1.0, -1.0):
        output = clean.clone()
        output[0, 5, 120, list(columns)] += 1.1 * limit * torch.tensor([sign, 1.0] * 32)[: len(columns)]
        assert screen(call, output) is None


def test_a_float32_prefill_with_one_infinite_or_nan_entry_is_not_cleared() -> None:
    call = prefill()
    for value in (float("inf"), float("nan")):
        output = computed(call)
        output[0, 2, 50, 9] = value
        assert screen(call, output) is None


def test_half_precision_float64_and_narrow_prefills_are_left_to_the_whole_check() -> None:
    call = prefill()
    for dtype in (torch.bfloat16, torch.float64):
        cast = call.with_tensors({name: call.tensors[name].to(dtype) for name in ("query", "key", "value")})
        assert screen(cast, computed(cast)) is None
    narrow = make_call(dtype=torch.float32, rows=160, heads=8, width=16)
    assert screen(narrow, computed(narrow)) is None


@pytest.mark.parametrize("width", [64, 72, 256])
def test_every_column_is_in_two_sums_and_no_two_columns_share_both(width: int) -> None:
    used = signs(width) != 0
    assert bool((used.sum(1) == 2).all())
    shared = used.float() @ used.float().mT
    assert float(shared.fill_diagonal_(0).max()) == 1
    assert torch.equal(signs(width).abs(), used.float())
    assert torch.equal(signs(width), signs(width))


def test_the_whole_check_decides_what_the_screen_does_not_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    call = prefill()
    output = computed(call)
    output[0, 5, 120] += 1
    quick = check(call, output)
    monkeypatch.setattr(check_module, "screened", lambda *_: None)
    assert quick == check(call, output)
    assert quick.rows == ((0, 5, 120),)


def test_a_number_where_a_nan_in_the_mask_makes_the_row_nan_is_not_cleared() -> None:
    call = decode(torch.float32)
    mask = torch.zeros(1, 1, 1, 100)
    mask[..., 50] = float("nan")
    others = torch.zeros(1, 1, 1, 100)
    others[..., 50] = -float("inf")
    assert screen(replace(call, attn_mask=mask), computed(replace(call, attn_mask=others))) is None
