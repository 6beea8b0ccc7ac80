from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.reference import Reference, reference
from sdpa_repro.replaying.verdict import RowErrors, Status, compare, floor, judge, rms_share, row_errors
from tests.calls import make_call
from tests.definition import attention


def judged(call: AttentionCall, output: Tensor, **noise: Tensor) -> Status:
    expected = reference(call)
    errors = {name: row_errors(tensor, expected) for name, tensor in noise.items()}
    return judge(row_errors(output, expected), expected, output.dtype, "FLASH_ATTENTION", errors).status


def rounded(call: AttentionCall) -> Tensor:
    return attention(call).to(call.query.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_rounded_definition_agrees(dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, rows=65)
    assert judged(call, rounded(call)) is Status.AGREES


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [33, 289, 1025])
def test_one_percent_in_one_row_of_one_head_diverges(dtype: torch.dtype, rows: int) -> None:
    call = make_call(dtype=dtype, rows=rows, width=64)
    output = rounded(call)
    output[0, 2, rows - 1] *= 1.01
    expected = reference(call)
    result = judge(row_errors(output, expected), expected, dtype, "FLASH_ATTENTION")
    assert result.status is Status.DIVERGES
    assert result.bad is not None
    assert (result.bad.batches, result.bad.heads, result.bad.rows) == ((0,), (2,), (rows - 1,))
    assert result.bad.worst == (0, 2, rows - 1)
    assert result.ratio == pytest.approx(result.max_abs / result.threshold, rel=1e-6) or result.ratio > 1


def test_two_rows_of_the_mask_swapped_diverges_although_the_output_moves_little() -> None:
    call = make_call(rows=289, width=64, heads=16, mask="causal")
    assert call.attn_mask is not None
    mask = call.attn_mask.clone()
    mask[..., -1, :] = mask[..., -2, :]
    assert judged(call, rounded(replace(call, attn_mask=mask))) is Status.DIVERGES


def test_nan_in_a_live_row_is_nonfinite_and_in_a_fully_masked_row_is_not() -> None:
    call = make_call(padding=7)
    output = rounded(call)
    output[..., :7, :] = float("nan")
    assert judged(call, output) is Status.AGREES
    output[0, 1, 20, 3] = float("nan")
    assert judged(call, output) is Status.NONFINITE


def test_a_finite_row_where_the_definition_is_nan_is_nonfinite() -> None:
    call = make_call(layout="dense")
    key = call.key.clone()
    key[0, 0, 5] = float("nan")
    broken = replace(call, key=key)
    assert judged(broken, rounded(call)) is Status.NONFINITE


def test_infinity_where_the_result_does_not_fit_the_dtype_agrees() -> None:
    call = make_call(dtype=torch.float16, rows=8, width=8)
    call = replace(call, value=torch.full_like(call.value, 65504.0))
    output = torch.full((1, 4, 8, 8), float("inf"), dtype=torch.float16)
    assert judged(call, output) is Status.AGREES


def test_poisoned_rows_never_decide() -> None:
    call = make_call(layout="dense")
    value = call.value.clone()
    value[:, :, 20] = float("nan")
    output = rounded(call)
    output[..., :20, :] += 1
    output[..., 20:, :] = float("nan")
    assert judged(replace(call, value=value), output) is Status.AGREES


def test_a_row_where_math_is_exact_by_luck_accuses_nobody() -> None:
    call = make_call(width=1, value_width=1, rows=64)
    exact = reference(call).output
    nudged = exact.to(torch.bfloat16) * (1 + torch.finfo(torch.bfloat16).eps)
    assert judged(call, nudged.to(torch.bfloat16), MATH=exact) is Status.AGREES


def test_noise_of_math_raises_the_threshold_five_times_and_of_eager_twice() -> None:
    call = make_call()
    expected = reference(call)
    base = floor(expected.scale, torch.bfloat16)

    def noise(share: float) -> RowErrors:
        errors = base * share
        return RowErrors(errors, errors, torch.ones_like(errors, dtype=torch.bool))

    def ratio(error: float, **paths: RowErrors) -> float:
        path = RowErrors(base * error, base * 0, torch.ones_like(base, dtype=torch.bool))
        return judge(path, expected, torch.bfloat16, "FLASH_ATTENTION", paths).ratio

    assert ratio(2.0) == pytest.approx(2.0)
    assert ratio(2.0, MATH=noise(0.8)) == pytest.approx(2.0 / (5 * 0.8))
    assert ratio(2.0, eager=noise(0.8)) == pytest.approx(2.0 / (2 * 0.8))
    assert ratio(2.0, MATH=noise(0.8), eager=noise(0.8)) == pytest.approx(2.0 / (5 * 0.8))


def test_a_path_does_not_supply_its_own_noise() -> None:
    call = make_call()
    output = rounded(call)
    output[..., -1, :] += 1
    expected = reference(call)
    errors = row_errors(output, expected)
    assert judge(errors, expected, torch.bfloat16, "MATH", {"MATH": errors}).status is Status.DIVERGES


@pytest.mark.parametrize("bad", [1.0, float("nan")])
def test_noise_that_rounding_cannot_explain_is_dropped(bad: float) -> None:
    call = make_call(dtype=torch.float32)
    output = rounded(call)
    wrong = output.clone()
    wrong[..., -1, :] += 0.5
    noise = output.clone()
    noise[..., -1, :] += bad
    assert judged(call, wrong, MATH=noise) is Status.DIVERGES


def test_errors_spread_over_all_columns_are_seen_by_their_root_mean_square() -> None:
    call = make_call(width=256, heads=1, rows=16)
    expected = reference(call)
    limit = floor(expected.scale, torch.bfloat16)[..., None]
    alternating = torch.where(torch.arange(256) % 2 == 0, 1.0, -1.0)
    output = expected.output + 0.9 * limit * alternating
    result = judge(row_errors(output, expected), expected, torch.bfloat16, "FLASH_ATTENTION")
    assert result.status is Status.DIVERGES
    assert result.ratio == pytest.approx(0.9 / rms_share(256), rel=1e-3)


def test_a_call_without_any_row_that_can_decide_agrees() -> None:
    call = make_call(padding=33)
    output = torch.full((1, 4, 33, 136), float("nan"), dtype=torch.bfloat16)
    expected = reference(call)
    result = judge(row_errors(output, expected), expected, torch.bfloat16, "MATH")
    assert (result.status, result.rows) == (Status.AGREES, 0)


def test_floor_has_the_roundoff_of_the_dtype() -> None:
    call = make_call(dtype=torch.float32, rows=8)
    scale = reference(call).scale
    coarse, fine = floor(scale, torch.bfloat16), floor(scale, torch.float32)
    assert (coarse / fine > 1000).all()
    assert (floor(scale, torch.bfloat16, "eager") > coarse).all()


def test_reference_rows_that_decide_are_live_and_not_poisoned() -> None:
    result: Reference = reference(make_call(padding=7))
    assert torch.equal(result.decides, result.live & ~result.poisoned)


def test_errors_whose_squares_are_infinite_have_their_root_mean_square() -> None:
    largest, rms, finite = compare(torch.tensor([[3e30, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 4e30], [0.0, 0.0]]))
    assert finite.all()
    assert largest.tolist() == pytest.approx([4e30, 4.0], rel=1e-6)
    assert rms.tolist() == pytest.approx([5e30 / 2**0.5, 5 / 2**0.5], rel=1e-6)
