"""Every change touches its one factor and leaves values, layout and everything else as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining import changes
from sdpa_repro.explaining.factor import Factor, NoVariant, Setting, Variant
from sdpa_repro.explaining.factors import FACTORS
from sdpa_repro.explaining.placing import blank_like
from tests.calls import causal_mask, make_call
from tests.definition import attention

SETTING = Setting({"grad": False})
Change = Callable[[AttentionCall], AttentionCall | None]


def layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 256


def variants(name: str, call: AttentionCall, setting: Setting = SETTING) -> list[Variant]:
    factor = next(factor for factor in FACTORS if factor.id == name)
    offered = factor.offer(call, setting)
    assert not isinstance(offered, NoVariant), offered
    return list(offered)


def absent(name: str, call: AttentionCall, setting: Setting = SETTING) -> bool:
    factor = next(factor for factor in FACTORS if factor.id == name)
    offered = factor.offer(call, setting)
    assert isinstance(offered, NoVariant)
    return offered.absent


def same_result(call: AttentionCall, changed: AttentionCall | None) -> bool:
    assert changed is not None
    return torch.allclose(attention(call), attention(changed), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "touched", "mask"),
    [
        (changes.without_mask, {"attn_mask"}, "causal"),
        (changes.with_open_mask, {"attn_mask"}, None),
        (changes.with_float_mask, {"attn_mask"}, "causal"),
        (changes.with_bool_mask, {"attn_mask"}, "float"),
        (changes.with_mask_per_head, {"attn_mask"}, "causal"),
        (changes.with_a_key_in_every_row, {"attn_mask"}, "causal"),
        (changes.without_left_padding, {"attn_mask"}, "causal"),
        (lambda call: changes.with_dense(call, "key", "value"), {"key", "value"}, "causal"),
        (lambda call: changes.with_dense(call, "query"), {"query"}, "causal"),
        (changes.without_scale, set(), "causal"),
    ],
)
def test_a_change_leaves_the_other_tensors_alone(change: Change, touched: set[str], mask: str | None) -> None:
    call = make_call(mask=mask, padding=3, scale=0.5)
    changed = change(call)
    assert changed is not None
    for name in {"query", "key", "value", "attn_mask"} - touched:
        assert getattr(changed, name) is getattr(call, name)


@pytest.mark.parametrize(
    "change",
    [
        changes.with_float_mask,
        changes.with_mask_per_head,
        lambda call: changes.with_dense(call, "key", "value"),
        lambda call: changes.with_dense(call, "query"),
        lambda call: changes.with_alignment(call, 16),
        changes.with_default_scale,
    ],
)
def test_a_change_of_layout_or_form_keeps_the_right_result(change: Change) -> None:
    call = make_call(padding=3, heads=2, width=16)
    assert same_result(call, change(call))


def test_the_float_mask_has_the_strides_of_the_bool_mask() -> None:
    call = make_call(rows=9)
    bias = causal_mask(9, 9).expand(1, 4, 9, 9)
    changed = changes.with_float_mask(replace(call, attn_mask=bias))
    assert changed is not None
    assert changed.attn_mask is not None
    assert changed.attn_mask.stride() == bias.stride()
    assert changed.attn_mask.dtype == call.query.dtype
    assert torch.equal(changed.attn_mask == 0, bias)
    assert changed.attn_mask[~bias].eq(-torch.inf).all()


def test_a_bool_mask_replaces_only_an_additive_mask_of_0_and_inf() -> None:
    call = make_call(mask="float", rows=9, width=16, heads=2)
    assert same_result(call, changes.with_bool_mask(call))
    assert call.attn_mask is not None
    assert changes.with_bool_mask(replace(call, attn_mask=call.attn_mask - 1)) is None


def test_the_causal_flag_replaces_only_an_equal_mask() -> None:
    call = make_call(rows=9, keys=12, width=16, heads=2)
    changed = changes.with_causal_flag(call)
    assert changed is not None
    assert changed.attn_mask is None
    assert same_result(call, changed)
    assert changes.with_causal_flag(make_call(rows=9, padding=1)) is None
    assert same_result(changed, changes.with_causal_mask(changed))


def test_padding_taken_out_of_a_causal_mask_leaves_the_causal_mask() -> None:
    changed = changes.without_left_padding(make_call(rows=9, padding=4))
    assert changed is not None
    assert changed.attn_mask is not None
    assert torch.equal(changed.attn_mask, causal_mask(9, 9))


def test_padding_taken_out_of_a_window_leaves_the_window() -> None:
    window = causal_mask(9, 9).triu(-2)
    padded = window.clone()
    padded[..., :4] = False
    changed = changes.without_left_padding(replace(make_call(rows=9), attn_mask=padded))
    assert changed is not None
    assert changed.attn_mask is not None
    assert torch.equal(changed.attn_mask, window)


def test_fully_masked_rows_get_the_first_key_and_no_other_row_changes() -> None:
    changed = changes.with_a_key_in_every_row(make_call(rows=9, padding=4))
    assert changed is not None
    assert changed.attn_mask is not None
    expected = causal_mask(9, 9, padding=4)
    expected[..., :4, 0] = True
    assert torch.equal(changed.attn_mask, expected)
    assert changes.with_a_key_in_every_row(make_call(rows=9)) is None


@pytest.mark.parametrize("layout_name", ["expanded", "dense", "gqa"])
def test_other_values_lie_where_the_old_ones_did(layout_name: str) -> None:
    call = make_call(layout=layout_name, kv_heads=1 if layout_name == "expanded" else 2)
    changed = changes.with_other_values(call, seed=1)
    for name in ("query", "key", "value"):
        assert layout(changed.tensors[name]) == layout(call.tensors[name])
        assert not torch.equal(changed.tensors[name], call.tensors[name])
    assert torch.equal(changed.attn_mask, call.attn_mask)  # type: ignore[arg-type]
    again = changes.with_other_values(call, seed=1)
    assert torch.equal(changed.query, again.query)


def test_other_values_keep_the_spread_or_give_scores_of_spread_1() -> None:
    call = make_call(scale=1.0, width=64, dtype=torch.float32)
    wide = replace(call, query=call.query * 8)
    assert changes.with_other_values(wide, 1).query.std() == pytest.approx(8.0, rel=0.1)
    changed = changes.with_other_values(wide, 1, unit_scores=True)
    assert (changed.query @ changed.key.mT).std() == pytest.approx(1.0, rel=0.2)


def test_value_stays_a_view_of_key_with_other_values() -> None:
    call = make_call()
    changed = changes.with_other_values(replace(call, value=call.key[..., :64]), seed=1)
    assert torch.equal(changed.value, changed.key[..., :64])
    assert changed.value.data_ptr() == changed.key.data_ptr()


def test_value_gets_memory_of_its_own_with_the_same_strides() -> None:
    call = make_call()
    shared = replace(call, value=call.key[..., :64])
    changed = changes.with_value_apart(shared)
    assert changed is not None
    assert changed.value.data_ptr() != changed.key.data_ptr()
    assert changed.value.stride() == shared.value.stride()
    assert same_result(shared, changed)
    assert changes.with_value_apart(call) is None


def test_a_head_dim_is_cut_in_the_same_layout() -> None:
    changed = changes.with_head_dim(make_call(heads=16, width=512), 128)
    assert changed is not None
    assert changed.query.stride() == (33 * 16 * 128, 128, 16 * 128, 1)
    assert changed.key.stride()[1:] == (0, 128, 1)
    assert changed.key.shape == (1, 16, 33, 128)


def test_a_head_dim_filled_with_zeros_gives_the_same_result_at_the_same_scale() -> None:
    call = make_call(width=16, heads=2, scale=0.25, layout="dense")
    changed = changes.with_head_dim(call, 64)
    assert changed is not None
    assert torch.allclose(attention(changed)[..., :16], attention(call), atol=1e-12)


@pytest.mark.parametrize(("head", "count", "kept"), [(3, 2, [2, 3]), (0, 2, [0, 1]), (2, 1, [2])])
def test_heads_are_kept_with_the_key_heads_they_use(head: int, count: int, kept: list[int]) -> None:
    for call in (make_call(kv_heads=2, layout="gqa"), make_call(kv_heads=4, layout="dense"), make_call()):
        changed = changes.with_heads(call, head, count)
        assert changed is not None
        assert torch.allclose(attention(changed), attention(call)[:, kept], atol=1e-12)
        assert changed.key.stride() == call.key.stride()


def test_one_batch_row_is_a_view_of_the_same_memory() -> None:
    call = make_call(batch=3)
    changed = changes.with_batch(call, 1)
    assert changed is not None
    assert torch.allclose(attention(changed), attention(call)[1:2], atol=1e-12)
    assert changed.query.data_ptr() == call.query[1].data_ptr()


def test_copied_heads_replace_grouped_queries() -> None:
    call = make_call(kv_heads=2, layout="gqa")
    changed = changes.without_gqa(call)
    assert same_result(call, changed)
    assert changed is not None
    assert not changed.enable_gqa


def test_a_cast_keeps_the_strides_and_refuses_to_overflow() -> None:
    call = make_call()
    changed = changes.cast(call, torch.float32)
    assert changed is not None
    assert changed.key.stride() == call.key.stride()
    assert changes.cast(replace(call, query=call.query * 1e30), torch.float16) is None


def test_a_cast_leaves_a_mask_alone_that_had_a_dtype_of_its_own() -> None:
    call = replace(make_call(rows=9), attn_mask=torch.zeros(9, 9))
    changed = changes.cast(call, torch.float16)
    assert changed is not None
    assert changed.attn_mask is call.attn_mask


@pytest.mark.parametrize(("rows", "keys"), [(33, 34), (34, 33), (40, 50)])
def test_rows_that_stay_keep_their_right_result_when_lengths_grow(rows: int, keys: int) -> None:
    call = make_call(padding=5, width=16)
    changed = changes.with_straight_lengths(call, rows, keys)
    assert changed is not None
    assert changed.query.shape[2] == rows
    assert changed.key.shape[2] == keys
    assert changed.key.stride(1) == 0
    assert torch.allclose(attention(changed)[:, :, :33], attention(call), atol=1e-12)


@pytest.mark.parametrize(("end", "kept"), [("tail", slice(0, 32)), ("head", slice(1, 33))])
def test_a_row_less_leaves_the_others_as_they_were(end: str, kept: slice) -> None:
    call = make_call(padding=5, width=16)
    changed = changes.with_straight_lengths(call, 32, 33, end)
    assert changed is not None
    assert torch.allclose(attention(changed), attention(call)[:, :, kept], atol=1e-12)


@pytest.mark.parametrize("align", [0, 16])
def test_the_alignment_factor_moves_every_pointer(align: int) -> None:
    moved = {variant.words: variant.call for variant in variants("alignment", changes.with_alignment(make_call(), 64))}
    for tensor in moved[f"every pointer at {align} mod 256"].tensors.values():
        assert tensor.data_ptr() % 256 == align


def test_the_grad_factors_change_the_switches_and_not_the_call() -> None:
    call = make_call()
    (with_grad,) = variants("no_grad", call)
    assert with_grad.call is call
    assert with_grad.context is not None
    assert with_grad.context["grad"] is True
    assert with_grad.context["requires_grad"] == {"query": True}
    recorded = Setting({"grad": True, "requires_grad": {"query": True}, "threads": 3})
    assert absent("no_grad", call, recorded)
    (without,) = variants("grad", call, recorded)
    assert without.context == {"grad": False, "requires_grad": {}, "threads": 3}


def test_what_a_call_does_not_have_is_absent() -> None:
    call = make_call(heads=1, mask=None, layout="dense")
    for name in ("attn_mask", "bool_mask", "float_mask", "mask_dtype", "mask_head_broadcast", "fully_masked_rows"):
        assert absent(name, call)
    for name in ("left_padding", "causal_flag", "key_value_head_stride_0", "key_value_layout", "query_layout"):
        assert absent(name, call)
    for name in ("batch", "heads", "enable_gqa", "scale", "memory_overlap", "grad"):
        assert absent(name, call)
    assert absent("no_mask", make_call())
    assert absent("default_scale", make_call(scale=1.0))


def test_a_mask_over_nan_is_not_taken_away() -> None:
    call = make_call(padding=3)
    value = call.value.clone()
    value[:, :, 0] = torch.nan
    assert absent("attn_mask", replace(call, value=value)) is False


def test_a_mask_that_adds_numbers_has_no_bool_twin_and_that_is_said() -> None:
    assert absent("float_mask", replace(make_call(), attn_mask=torch.randn(33, 33))) is False


def test_dense_variants_come_together_first_and_only_that_decides() -> None:
    found = variants("key_value_head_stride_0", make_call())
    assert [variant.decides for variant in found] == [True, False, False]
    assert found[0].line == "key, value = key.contiguous(), value.contiguous()"
    assert found[1].call.value.stride(1) == 0
    assert found[2].call.key.stride(1) == 0


@pytest.mark.parametrize("layout", ["expanded", "dense"])
def test_a_head_stride_of_0_at_one_head_is_a_factor_with_a_line_that_changes_it(layout: str) -> None:
    call = one_head(make_call(heads=4, layout=layout))
    found, *_ = variants("key_value_head_stride_0", call)
    assert call.key.is_contiguous()
    assert found.call.key.stride() == (33 * 136, 33 * 136, 136, 1)
    assert found.line == (
        "key, value = key.clone(memory_format=torch.contiguous_format), "
        "value.clone(memory_format=torch.contiguous_format)"
    )
    assert same_result(call, found.call)
    pasted: dict[str, Tensor] = {"key": call.key, "value": call.value}
    exec(found.line, {"torch": torch}, pasted)
    assert (pasted["key"].stride(), pasted["value"].stride()) == (found.call.key.stride(),) * 2


def one_head(call: AttentionCall) -> AttentionCall:
    """The first head alone; its key and value expanded from it, to one head."""
    key, value = (tensor[:, :1].as_strided((1, 1, 33, 136), (0, 0, 136, 1)) for tensor in (call.key, call.value))
    return replace(call, query=call.query[:, :1], key=key.contiguous(), value=value.contiguous())


def test_one_head_is_tried_plainly_too_where_its_head_stride_stays_0() -> None:
    two, plain, alone = variants("heads", make_call())
    assert two.call.query.shape[1] == 2
    assert (plain.decides, alone.decides) == (False, True)
    assert (plain.call.key.stride(1), alone.call.key.stride(1)) == (33 * 136, 0)
    assert plain.words == "query head 0 alone, contiguous key and value"
    assert alone.words == "query head 0 alone, key and value still with head stride 0"
    assert [each.words for each in variants("heads", make_call(layout="dense"))] == [
        "two query heads",
        "query head 0 alone",
    ]


def test_a_transposed_base_of_repeated_heads_is_made_dense_under_the_repetition() -> None:
    call = make_call()
    base = call.key[:, :1].transpose(2, 3).contiguous().transpose(2, 3)
    (found,) = variants("key_value_layout", replace(call, key=base.expand(call.key.shape)))
    assert found.call.key.stride()[1:] == call.key.stride()[1:]


@pytest.mark.parametrize(("width", "words"), [(136, [128, 64, 320]), (512, [256, 128, 64]), (64, [128]), (40, [128])])
def test_the_head_dim_factor_visits_the_classes_below_and_one_above(width: int, words: list[int]) -> None:
    found = variants("head_dim", make_call(rows=5, width=width))
    assert [variant.words for variant in found] == [f"head_dim {value}" for value in words]


@pytest.mark.parametrize("factor", FACTORS, ids=lambda factor: factor.id)
def test_no_factor_stumbles_over_odd_calls(factor: Factor) -> None:
    for call in (
        make_call(rows=1, keys=1, width=1),
        make_call(mask="flag"),
        make_call(batch=2, kv_heads=2, layout="gqa"),
        make_call(rows=5, keys=9, mask="float", layout="dense", value_width=24),
        replace(make_call(rows=5), attn_mask=torch.ones(5, dtype=torch.bool)[None]),
    ):
        offered = factor.offer(call, SETTING)
        for variant in [] if isinstance(offered, NoVariant) else offered:
            assert attention(variant.call).shape[0] == variant.call.query.shape[0]


def test_blank_memory_takes_the_alignment_and_strides_of_its_model() -> None:
    model = changes.with_alignment(make_call(), 16).query
    blank = blank_like(model, dtype=torch.float32)
    assert blank.stride() == model.stride()
    assert blank.data_ptr() % 256 == 16
    assert not blank.any()
