"""Moves and casts of a call keep shape, strides, alignment and overlap; values are rounded as torch casts."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from sdpa_repro.attention import (
    ALIGNMENT,
    AttentionCall,
    copy_view,
    dense,
    empty_aligned,
    map_dense,
    memory_groups,
    output_shape,
    overlaps_itself,
    rebuild,
    span,
    span_elements,
    viewed_once,
)
from tests.calls import causal_mask, make_call

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def random_view(choose: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Normal values seen with permuted, padded, expanded or overlapping strides, from an offset."""
    order = list(range(len(shape)))
    choose.shuffle(order)
    strides, step = [0] * len(shape), choose.choice([1, 1, 1, 2])
    for dim in order:
        strides[dim] = step
        step *= shape[dim] * choose.choice([1, 1, 2]) if shape[dim] else 1
    for dim in range(len(shape)):
        if choose.random() < 0.25:
            strides[dim] = 0 if choose.random() < 0.7 else strides[dim] // 2
    offset = choose.randrange(200)
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    flat = torch.randn(offset + length + 3, generator=torch.Generator().manual_seed(choose.randrange(1 << 30))) * 3
    return flat.to(dtype).as_strided(shape, strides, offset)


def random_call(choose: random.Random) -> AttentionCall:
    batch, heads, width = choose.randint(1, 2), choose.randint(1, 4), choose.choice([1, 3, 8])
    rows, keys = choose.choice([1, 2, 5]), choose.choice([0, 1, 4, 7])
    dtype = choose.choice(DTYPES)
    shapes = [(batch, heads, rows, width), (batch, heads, keys, width), (batch, heads, keys, choose.choice([1, 8]))]
    query, key, value = (random_view(choose, dtype, shape) for shape in shapes)
    mask = None
    if choose.random() < 0.6:
        mask = random_view(choose, choose.choice([dtype, torch.float32]), (batch, 1, rows, keys))
        mask = mask > 0 if choose.random() < 0.4 else mask
    return AttentionCall(query, key, value, mask)


def same_bits(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and torch.equal(a, b)
    return same and (a.dtype == torch.bool or torch.equal(a.signbit(), b.signbit()))  # there is no NaN here


def test_rebuilding_keeps_shape_strides_alignment_and_bits() -> None:
    choose = random.Random(0)
    for _ in range(300):
        call = random_call(choose)
        copy = rebuild(call)
        for name, tensor in call.tensors.items():
            made = copy.tensors[name]
            assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
            assert same_bits(made, tensor), name
            if tensor.numel():
                assert made.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT
                assert not span(made).overlaps(span(tensor))


def test_casting_keeps_shape_and_strides_and_rounds_as_torch_does() -> None:
    choose = random.Random(1)
    for _ in range(300):
        call, dtype = random_call(choose), choose.choice(DTYPES)
        copy = rebuild(call, dtype=dtype)
        for name, tensor in call.tensors.items():
            made = copy.tensors[name]
            assert (made.shape, made.stride()) == (tensor.shape, tensor.stride())
            assert same_bits(made, tensor if tensor.dtype == torch.bool else tensor.to(dtype)), name
            assert made.data_ptr() % made.element_size() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3, 8, 40, 127])
def test_alignment_is_kept_at_every_offset_and_in_every_dtype(offset: int, dtype: torch.dtype) -> None:
    flat = torch.randn(1000).to(dtype)
    key = flat[offset : offset + 64].view(1, 1, 8, 8)
    call = AttentionCall(key, key, key)
    assert rebuild(call).key.data_ptr() % ALIGNMENT == key.data_ptr() % ALIGNMENT
    wider = rebuild(call, dtype=torch.float32).key
    assert wider.data_ptr() % ALIGNMENT == key.data_ptr() % ALIGNMENT // 4 * 4


def test_a_value_that_is_a_part_of_key_stays_so() -> None:
    key = torch.randn(1, 2, 9, 16).bfloat16()
    call = AttentionCall(torch.randn(1, 2, 9, 16).bfloat16(), key, key[..., 4:12])
    for dtype in (None, torch.float32, torch.float16):
        copy = rebuild(call, dtype=dtype)
        assert copy.value.data_ptr() - copy.key.data_ptr() == 4 * copy.key.element_size()
        assert torch.equal(copy.value, copy.key[..., 4:12])
        copy.key[0, 0, 0, 5] = 77
        assert copy.value[0, 0, 0, 1] == 77


def test_query_key_and_value_of_a_packed_projection_stay_interleaved() -> None:
    packed = torch.randn(1, 9, 3, 2, 8)
    query, key, value = (packed[:, :, part].transpose(1, 2) for part in range(3))
    copy = rebuild(AttentionCall(query, key, value))
    assert copy.key.data_ptr() - copy.query.data_ptr() == 2 * 8 * 4
    assert copy.value.data_ptr() - copy.query.data_ptr() == 2 * 2 * 8 * 4
    assert all(
        torch.equal(made, tensor) for made, tensor in zip(copy.tensors.values(), (query, key, value), strict=True)
    )


def test_an_unfolded_view_keeps_its_overlap() -> None:
    key = torch.arange(40.0).view(1, 1, 40).unfold(-1, 8, 2)
    copy = rebuild(AttentionCall(key, key, key), dtype=torch.float64)
    assert copy.key.stride() == key.stride()
    assert torch.equal(copy.key, key.double())
    copy.key[0, 0, 1, 0] = -5
    assert copy.key[0, 0, 0, 2] == -5


def test_memory_outside_the_views_is_not_copied() -> None:
    cache = torch.full((1, 2, 64, 8), 123.0)
    cache[:, :, :9] = 1
    key = cache[:, :, :9]
    copy = rebuild(AttentionCall(key.clone(), key, key.clone()))
    whole = copy.key.as_strided((span_elements(copy.key),), (1,), copy.key.storage_offset())
    assert not (whole == 123).any()


def test_a_bool_mask_stays_bool_and_a_float_mask_is_cast() -> None:
    call = make_call(mask="causal", padding=3)
    assert call.attn_mask is not None
    copy = rebuild(call, dtype=torch.float32)
    assert copy.attn_mask is not None
    assert torch.equal(copy.attn_mask, call.attn_mask)
    floats = rebuild(make_call(mask="float", padding=3), dtype=torch.float16)
    assert floats.attn_mask is not None
    assert floats.attn_mask.dtype == torch.float16
    assert torch.equal(floats.attn_mask == 0, call.attn_mask)


def test_an_expanded_mask_keeps_its_stride_0_in_every_dimension() -> None:
    mask = torch.rand(1, 1, 1, 33).gt(0.5).expand(2, 4, 33, 33)
    copy = rebuild(make_call(batch=2).with_tensors({"attn_mask": mask}))
    assert copy.attn_mask is not None
    assert copy.attn_mask.stride() == (0, 0, 0, 1)
    assert torch.equal(copy.attn_mask, mask)


@pytest.mark.parametrize("mask", [torch.rand(5) > 0.5, torch.rand(3, 5) > 0.5, torch.zeros(3, 5)[None]])
def test_masks_of_other_ranks_keep_their_shape(mask: Tensor) -> None:
    key = torch.randn(2, 3, 5, 8)
    copy = rebuild(AttentionCall(torch.randn(2, 3, 3, 8), key, key, mask))
    assert copy.attn_mask is not None
    assert torch.equal(copy.attn_mask, mask)


@pytest.mark.parametrize("bias", [causal_upper_left(3, 5), causal_lower_right(3, 5)])
def test_a_causal_bias_is_carried_along_as_the_rule_it_is(bias: Tensor) -> None:
    torch.manual_seed(0)
    key = torch.randn(1, 2, 5, 8)
    call = AttentionCall(torch.randn(1, 2, 3, 8), key, key, bias)
    copy = rebuild(call, dtype=torch.float64)
    assert copy.key.dtype == torch.float64
    assert type(copy.attn_mask) is type(bias)
    run = [F.scaled_dot_product_attention(c.query, c.key, c.value, **c.keywords) for c in (call, copy)]
    torch.testing.assert_close(run[0], run[1].float())
    assert map_dense(call).attn_mask is bias


def test_inputs_that_require_grad_are_copied_without_a_graph() -> None:
    key = torch.randn(1, 2, 5, 8, requires_grad=True)
    copy = rebuild(AttentionCall(key * 2, key, key[..., :4]))
    assert not any(tensor.requires_grad for tensor in copy.tensors.values())
    assert torch.equal(copy.key, key)


def test_inference_tensors_are_rebuilt_outside_inference_mode() -> None:
    with torch.inference_mode():
        call = make_call()
    assert torch.equal(rebuild(call).key, call.key)


def test_inputs_without_batch_or_heads_are_rebuilt() -> None:
    for shape in ((5, 8), (3, 5, 8), (2, 2, 3, 5, 8)):
        key = torch.randn(shape)
        assert torch.equal(rebuild(AttentionCall(key, key, key)).key, key)


def test_empty_tensors_are_rebuilt_and_do_not_join_or_part_others() -> None:
    key = torch.randn(1, 1, 4, 8)
    assert rebuild(AttentionCall(key, key[:, :, :0], key[:, :, :0])).key.shape == (1, 1, 0, 8)
    assert memory_groups({"key": key, "empty": key[:, :, 2:2], "value": key[:, :, 3:]}) in (
        [["key", "value"], ["empty"]],
        [["empty"], ["key", "value"]],
    )


def test_tensors_are_grouped_by_touching_addresses() -> None:
    memory = torch.zeros(100)
    apart = {"query": memory[:10], "key": memory[20:40], "value": memory[30:50], "attn_mask": memory[50:60]}
    assert memory_groups(apart) == [["query"], ["key", "value"], ["attn_mask"]]
    assert memory_groups({"query": memory[5:6], "key": memory}) == [["key", "query"]]


def test_span_counts_bytes_from_the_first_to_the_last_element() -> None:
    key = torch.zeros(1, 2, 5, 8)[:, :, :3]
    assert span_elements(key) == (1 * 40) + (2 * 8) + 7 + 1
    assert span(key).nbytes == 4 * span_elements(key)
    assert span(key[:, :, :0]).nbytes == 0
    assert span(torch.zeros(1, 1, 3, 8).expand(1, 4, 3, 8)).nbytes == 3 * 8 * 4


def test_viewed_once_keeps_each_stored_element_and_no_repetition() -> None:
    key = torch.randn(1, 1, 3, 8).expand(5, 4, 3, 8)
    assert viewed_once(key).shape == (1, 1, 3, 8)
    assert viewed_once(torch.tensor(1.0).expand(2, 3)).shape == (1, 1)
    empty = torch.zeros(1, 1, 0, 8).expand(1, 4, 0, 8)
    assert viewed_once(empty).numel() == 0


def test_overlap_within_a_view_is_never_missed() -> None:
    choose = random.Random(2)
    for _ in range(500):
        shape = tuple(choose.randint(1, 4) for _ in range(choose.randint(1, 3)))
        stride = tuple(choose.randint(0, 6) for _ in shape)
        view = torch.arange(100).as_strided(shape, stride)
        if view.unique().numel() < view.numel():
            assert overlaps_itself(view)
    assert not overlaps_itself(torch.zeros(2, 3, 4).permute(2, 0, 1))
    assert not overlaps_itself(torch.zeros(2, 8, 4)[:, :3])


def test_copy_view_writes_nothing_outside_the_view() -> None:
    source, target = torch.ones(4, 10), torch.zeros(4, 10)
    copy_view(source[:, :3], target[:, :3])
    assert target.sum() == 12


@pytest.mark.parametrize("align", [0, 1, 2, 64, 255])
def test_memory_is_made_at_the_alignment_asked_for(align: int) -> None:
    for nbytes in (0, 1, 1000):
        made = empty_aligned(nbytes, align, "cpu")
        assert made.numel() == nbytes
        if nbytes:
            assert made.data_ptr() % ALIGNMENT == align


@pytest.mark.parametrize("shape", [(1, 1, 5, 8), (1, 4, 5, 8), (2, 1, 5, 8)], ids=str)
def test_a_dense_tensor_has_the_strides_of_its_shape_also_where_a_size_is_1(shape: tuple[int, ...]) -> None:
    expanded = torch.randn(1, 1, 5, 8).expand(shape).as_strided(shape, (0, 0, 8, 1))
    made = dense(expanded)
    assert made.stride() == (shape[1] * 40, 40, 8, 1)
    assert torch.equal(made, expanded)


def test_what_is_dense_is_left_and_an_empty_tensor_needs_nothing() -> None:
    plain, empty = torch.randn(1, 1, 5, 8), torch.empty(1, 1, 0, 8)
    assert dense(plain) is plain
    assert dense(empty) is empty


def test_named_tensors_are_made_dense_and_the_others_are_left() -> None:
    call = make_call()
    made = map_dense(call, "key", "attn_mask")
    assert made.key.is_contiguous()
    assert made.value is call.value
    assert made.query is call.query
    assert torch.equal(made.key, call.key)
    assert all(tensor.is_contiguous() for tensor in map_dense(call).tensors.values())
    assert map_dense(make_call(mask=None), "attn_mask").attn_mask is None


@pytest.mark.parametrize(
    ("query", "key", "value", "shape"),
    [
        ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 16), (2, 4, 3, 16)),
        ((2, 4, 3, 8), (1, 4, 5, 8), (1, 4, 5, 8), (2, 4, 3, 8)),
        ((4, 3, 8), (4, 5, 8), (4, 5, 8), (4, 3, 8)),
        ((3, 8), (5, 8), (5, 8), (3, 8)),
        ((6, 2, 4, 3, 8), (6, 2, 4, 5, 8), (6, 2, 4, 5, 8), (6, 2, 4, 3, 8)),
        ((1, 4, 3, 8), (1, 4, 0, 8), (1, 4, 0, 8), (1, 4, 3, 8)),
    ],
)
def test_the_output_shape_is_the_one_pytorch_returns(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    call = AttentionCall(torch.randn(query), torch.randn(key), torch.randn(value))
    assert output_shape(call) == shape
    assert F.scaled_dot_product_attention(call.query, call.key, call.value).shape == shape


def test_grouped_heads_give_as_many_outputs_as_query_heads() -> None:
    call = make_call(heads=4, kv_heads=2, layout="gqa", mask=None)
    assert output_shape(call) == (1, 4, 33, 136)
    assert call.keywords["enable_gqa"] is True
    assert F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords).shape == (1, 4, 33, 136)


def test_the_scale_is_the_given_one_or_the_inverse_root_of_the_width() -> None:
    assert make_call(width=16).softmax_scale == 0.25
    assert make_call(scale=1.0).softmax_scale == 1.0
    empty = torch.zeros(1, 1, 2, 0)
    assert AttentionCall(empty, empty, empty).softmax_scale == 1.0


def test_rebuilding_changes_no_argument_but_the_tensors() -> None:
    call = make_call(mask=None, scale=0.5, layout="gqa")
    copy = rebuild(call, dtype=torch.float32)
    assert (copy.scale, copy.enable_gqa, copy.is_causal, copy.dropout_p) == (0.5, True, False, 0.0)
    assert copy.with_tensors({"attn_mask": causal_mask(33, 33)}).attn_mask is not None


def test_rebuild_keeps_every_byte_of_a_bool_mask() -> None:
    call = make_call()
    assert call.attn_mask is not None
    call.attn_mask.view(torch.uint8)[0, 0, 5, 3] = 7
    fresh = rebuild(call).attn_mask
    assert fresh is not None
    assert int(fresh.view(torch.uint8)[0, 0, 5, 3]) == 7
