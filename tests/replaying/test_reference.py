from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying import reference as module
from sdpa_repro.replaying import tiles
from sdpa_repro.replaying.reference import blocks, four_dims, reference, rows_of
from tests.calls import causal_mask, make_call
from tests.definition import attention, weights

CALLS = {
    "expanded heads": make_call(),
    "causal flag": make_call(mask="flag", rows=70),
    "float mask": make_call(mask="float", padding=3),
    "grouped queries": make_call(layout="gqa", heads=8, kv_heads=2),
    "cross attention": make_call(mask=None, rows=5, keys=300),
    "left padding": make_call(padding=7, batch=2),
    "several tiles": make_call(rows=300, keys=700, width=16),
    "value wider than key": make_call(width=8, value_width=24, scale=1.0),
    "one column": make_call(width=1, value_width=1),
    "one query": make_call(rows=1, keys=65, mask=None),
    "float64": make_call(dtype=torch.float64),
}


@pytest.mark.parametrize("name", CALLS)
def test_reference_is_the_definition_to_float64_rounding(name: str) -> None:
    call = CALLS[name]
    assert torch.allclose(reference(call).output, attention(call), rtol=0, atol=1e-13 * 10)


@pytest.mark.parametrize("shape", [(33,), (33, 33), (1, 33, 33), (4, 33, 33), (1, 1, 33, 33), (2, 4, 33, 33)])
def test_reference_takes_masks_of_every_shape_that_broadcasts(shape: tuple[int, ...]) -> None:
    call = make_call(batch=2, mask=None)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    call = replace(call, attn_mask=mask)
    assert torch.allclose(reference(call).output, attention(call), atol=1e-12)


def test_reference_takes_calls_without_head_or_batch_dimension() -> None:
    query, key, value = (torch.randn(7, 16), torch.randn(9, 16), torch.randn(9, 4))
    assert torch.allclose(
        reference(AttentionCall(query, key, value)).output[0, 0],
        attention(AttentionCall(query[None], key[None], value[None]))[0],
    )


def test_reference_takes_two_batch_dimensions() -> None:
    query, key, value = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 6, 8), torch.randn(2, 3, 4, 6, 8)
    expected = attention(AttentionCall(query, key, value)).flatten(0, 1)
    assert torch.allclose(reference(AttentionCall(query, key, value)).output, expected)


@pytest.mark.parametrize(("variant", "diagonal"), [("upper", 0), ("lower", 4)])
def test_causal_bias_is_the_mask_it_stands_for(variant: str, diagonal: int) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    bias = (causal_upper_left if variant == "upper" else causal_lower_right)(5, 9)
    call = make_call(rows=5, keys=9, mask=None)
    explicit = replace(call, attn_mask=torch.ones(5, 9, dtype=torch.bool).tril(diagonal))
    assert torch.allclose(reference(replace(call, attn_mask=bias)).output, attention(explicit), atol=1e-12)


def test_fully_masked_rows_are_zero_and_not_live() -> None:
    result = reference(make_call(padding=7))
    assert not result.live[..., :7].any()
    assert result.live[..., 7:].all()
    assert (result.output[..., :7, :] == 0).all()


def test_rows_that_see_only_finfo_min_are_not_live() -> None:
    call = make_call(mask="float", padding=7)
    assert call.attn_mask is not None
    mask = call.attn_mask.clamp(min=torch.finfo(call.attn_mask.dtype).min)
    live = reference(replace(call, attn_mask=mask)).live
    assert not live[..., :7].any()
    assert live[..., 7:].all()


def test_nan_in_a_hidden_position_poisons_the_rows_it_is_hidden_from_and_changes_nothing_else() -> None:
    call = make_call(rows=20, width=8, layout="dense")
    clean = reference(call)
    key, value = call.key.clone(), call.value.clone()
    key[0, 1, 12], value[0, 1, 12] = float("nan"), float("inf")
    result = reference(replace(call, key=key, value=value))
    assert result.poisoned[0, 1].tolist() == [True] * 12 + [False] * 8
    assert not result.poisoned[0, [0, 2, 3]].any()
    assert torch.equal(result.output[0, 1, :12], clean.output[0, 1, :12])
    assert result.output[0, 1, 12:].isnan().all()


def test_row_scales_are_the_sums_they_are_defined_as() -> None:
    call = make_call(rows=40, padding=3)
    result, p = reference(call), weights(call)
    largest = call.value.double().abs().amax(-1)[:, :, None]
    norm = call.key.double().norm(dim=-1)[:, :, None]
    live = result.live
    assert torch.allclose(result.scale.weight[live], (p * largest).sum(-1)[live])
    assert torch.allclose(result.scale.size, attention(call).abs().amax(-1))
    exact = (p * largest).square().sum(-1).sqrt()
    assert (result.scale.spread[live] >= exact[live] * (1 - 1e-9)).all()
    assert (result.scale.spread[live] <= 4 * exact[live]).all()
    bound = call.query.double().norm(dim=-1) * 136**-0.5
    moved = bound * ((p * norm * largest).sum(-1) + result.scale.size * (p * norm).sum(-1))
    assert (result.scale.scores[live] >= moved[live] * (1 - 1e-9)).all()


@pytest.mark.parametrize("size", [1.0, 250.0, 300.0, 3000.0, -250.0])
@pytest.mark.parametrize("mask", [None, "flag", "bool"])
def test_scores_may_all_be_large_or_small(size: float, mask: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the size (277, as 2 to the 400) up to which no number is subtracted from them."""
    call = make_call(rows=40, keys=40, width=16, mask=mask, layout="dense", dtype=torch.float64)
    towards = torch.full((16,), 0.25, dtype=torch.float64)
    call = replace(call, query=call.query / 20 + towards, key=call.key / 20 + towards * size, scale=1.0)
    result = reference(call)
    assert torch.allclose(result.output, attention(call), rtol=0, atol=1e-11)
    monkeypatch.setattr(tiles, "FREE", 0.0)
    subtracted = reference(call)
    assert torch.equal(result.live, subtracted.live)
    for name in ("weight", "spread", "scores", "rounded", "size"):
        assert torch.allclose(getattr(result.scale, name), getattr(subtracted.scale, name), rtol=1e-10)


@pytest.mark.parametrize(
    ("query", "key", "value"), [(1e-170, 1e173, 1.0), (-275.6, 1.0, 1e-250), (275.6, 1.0, 1e200), (275.6, 1.0, 1e100)]
)
def test_numbers_of_float64_may_be_as_large_and_small_as_it_holds(query: float, key: float, value: float) -> None:
    """One key has all the weight: the output is its value, and nothing that bounds the rounding is infinite."""
    call = AttentionCall(
        *(torch.full((1, 1, 1, 1), size, dtype=torch.float64) for size in (query, key, value)), scale=1.0
    )
    result = reference(call)
    assert result.output.item() == pytest.approx(value, rel=1e-12)
    assert result.scale.weight.item() == pytest.approx(value, rel=1e-12)


def test_an_interrupt_leaves_the_modes_of_the_caller_as_they_were() -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    try:
        reference(make_call(rows=300), late=interrupt)
    except KeyboardInterrupt as error:
        assert torch.is_grad_enabled()
        del error
    assert torch.is_grad_enabled()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_tiles_that_the_mask_hides_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding window of 128 keys over 2048 costs its own area, looked at in tiles of 128 by 128."""
    rows = torch.arange(2048)
    window = (rows[None] <= rows[:, None]) & (rows[None] > rows[:, None] - 128)
    call = replace(make_call(rows=2048, width=4, heads=1, mask=None), attn_mask=window)
    scores = []
    original = torch.bmm

    def counting(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        scores.append(first.shape[1] * second.shape[2])
        return original(first, second, out=out)

    monkeypatch.setattr(torch, "bmm", counting)
    list(blocks(four_dims(call)))
    assert 2048 * 128 <= sum(scores) <= 2048 * (128 + 128)


def test_extra_memory_does_not_grow_with_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = torch.bmm

    def counting(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.append(out.untyped_storage().nbytes())
        return original(first, second, out=out)

    monkeypatch.setattr(torch, "bmm", counting)
    for rows in (1024, 8192):
        reference(make_call(rows=rows, width=8, heads=2, mask="flag"))
    assert max(sizes) <= module.TILE_BYTES["cpu"]


@pytest.mark.parametrize("mask", ["causal", "float", "flag", None])
def test_rows_of_one_head_give_the_same_result_as_in_the_whole_call(mask: str | None) -> None:
    call = four_dims(make_call(batch=2, heads=8, kv_heads=2, layout="gqa", rows=40, mask=mask))
    rows = torch.tensor([0, 5, 39])
    part = rows_of(call, 1, 6, rows)
    assert torch.allclose(reference(part).output[0, 0], reference(call).output[1, 6, rows], atol=1e-13)


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty_calls_have_empty_or_zero_results(rows: int, keys: int) -> None:
    result = reference(make_call(rows=rows, keys=keys, mask=None))
    assert result.output.shape == (1, 4, rows, 136)
    assert not result.output.any()
    assert not result.live.any()


def test_key_and_value_of_different_length_are_refused() -> None:
    call = make_call(mask=None)
    with pytest.raises(ValueError, match="key has 33 positions, value has 32"):
        reference(replace(call, value=call.value[:, :, :-1]))


def test_reference_calls_no_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("SDPA was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbidden)
    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", forbidden)
    reference(make_call())


def test_autocast_and_gradients_do_not_reach_into_the_reference() -> None:
    call = make_call(dtype=torch.float32, rows=20)
    plain = reference(call).output
    call.query.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = reference(call).output
    assert torch.equal(result, plain)
    assert not result.requires_grad


def test_mask_that_hides_everything_gives_zeros() -> None:
    call = replace(make_call(), attn_mask=causal_mask(33, 33, 33))
    assert not reference(call).output.any()


def test_several_threads_give_the_bits_of_one(torch_as_it_was: None) -> None:
    call = make_call(rows=1100, heads=16, width=8, layout="dense", mask="causal")
    torch.set_num_threads(1)
    one = reference(call)
    torch.set_num_threads(3)
    several = reference(call)
    assert torch.get_num_threads() == 3
    assert torch.equal(one.output, several.output)
    assert torch.equal(one.live, several.live)
    assert torch.allclose(one.scale.scores, several.scale.scores)


def test_several_threads_work_within_inference_mode(torch_as_it_was: None) -> None:
    call = make_call(rows=1100, heads=16, width=8, layout="dense", mask="causal")
    torch.set_num_threads(1)
    plain = reference(call)
    torch.set_num_threads(2)
    with torch.inference_mode():
        inside = reference(call)
    assert torch.equal(inside.output, plain.output)


def test_nan_in_an_additive_mask_makes_its_row_nan() -> None:
    call = make_call(mask="float", rows=200, dtype=torch.float32, width=16)
    assert call.attn_mask is not None
    mask = call.attn_mask.clone()
    mask[..., 150, 40] = float("nan")
    result = reference(replace(call, attn_mask=mask))
    assert result.output[:, :, 150].isnan().all()
    assert result.live[:, :, 150].all()
    assert torch.equal(result.output[:, :, 151:], reference(call).output[:, :, 151:])


def test_an_infinite_key_gets_the_weight_that_its_score_gives_it() -> None:
    query, key, value = torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 3, 4), torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    query[0, 0, 1] = -1.0
    key[0, 0, 2, 1] = float("inf")  # the score of row 0 is inf, that of row 1 is -inf
    output = reference(AttentionCall(query, key, value)).output
    assert output[0, 0, 0].isnan().all()
    assert output[0, 0, 1].tolist() == [1.5]


def test_a_large_hidden_key_poisons_only_where_its_score_may_be_infinite() -> None:
    call = make_call(rows=20, width=8, layout="dense", dtype=torch.float32)
    clean = reference(call)
    for size, poisoned in ((1e30, 0), (3e38, 12)):
        key, value = call.key.clone(), call.value.clone()
        key[0, 1, 12], value[0, 1, 12] = size, 3e38
        for precision in (torch.float64, torch.float32):
            result = reference(replace(call, key=key, value=value), precision=precision)
            assert int(result.poisoned[0, 1].sum()) == poisoned
            assert torch.allclose(result.output[0, 1, :12].double(), clean.output[0, 1, :12], atol=1e-5)
            assert torch.allclose(result.scale.scores[0, 1, :12].double(), clean.scale.scores[0, 1, :12], rtol=1e-4)


def test_a_value_without_columns_gives_an_output_without_columns() -> None:
    result = reference(make_call(value_width=0))
    assert result.output.shape == (1, 4, 33, 0)
    assert result.live.all()


def test_a_reference_for_which_there_is_no_time_is_given_up_after_a_block() -> None:
    asked: list[bool] = []

    def late() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    with pytest.raises(TimeoutError):
        reference(make_call(rows=2500, keys=64, width=8, heads=2, mask=None), late=late)
    assert asked == [False, False, True]


def test_all_threads_give_up(monkeypatch: pytest.MonkeyPatch, torch_as_it_was: None) -> None:
    monkeypatch.setattr(module, "LARGE", 1)
    torch.set_num_threads(2)
    with pytest.raises(TimeoutError):
        reference(make_call(rows=70, batch=4, layout="dense"), late=lambda: True)
    assert torch.get_num_threads() == 2


def test_a_reference_that_is_in_time_is_the_same() -> None:
    call = make_call(rows=70)
    assert torch.equal(reference(call, late=lambda: False).output, reference(call).output)
