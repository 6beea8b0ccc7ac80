"""A call at other lengths keeps what its code decided: layout, structure of the mask, values that existed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, empty_aligned, span
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.length_layout import restride
from sdpa_repro.explaining.lengths import resizer, with_lengths
from sdpa_repro.visibility import bias_rows
from tests.calls import make_call

NAMES = ("query", "key", "value", "attn_mask")


def visible(call: AttentionCall, head: int = 0) -> Tensor:
    return bias_rows(call, 0, head, 0, call.query.shape[-2])


def causal(rows: int, keys: int, padding: int = 0, offset: int = 0) -> Tensor:
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(offset)
    mask[:, :padding] = False
    return mask


def call_with_mask(mask: Tensor, *, heads: int = 2, width: int = 4) -> AttentionCall:
    bare = make_call(1, heads, heads, mask.shape[-2], mask.shape[-1], width, mask=None, layout="dense")
    return replace(bare, attn_mask=mask)


def live_rows_differ(mask: Tensor) -> bool:
    live = mask[mask.any(-1)]
    return len(live.unique(dim=0)) == len(live)


@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
@pytest.mark.parametrize("mask", ["causal", "float", "flag", None])
def test_at_its_own_lengths_the_call_is_the_same_call(layout: str, mask: str | None) -> None:
    call = make_call(2, 4, 2 if layout == "gqa" else 1, 33, width=16, mask=mask, padding=5, layout=layout)
    same = with_lengths(call, 33, 33)
    for name, tensor in call.tensors.items():
        assert torch.equal(same.tensors[name], tensor)
        assert same.tensors[name].stride() == tensor.stride()
        assert same.tensors[name].dtype == tensor.dtype
        assert same.tensors[name].data_ptr() % 256 == tensor.data_ptr() % 256
        assert same.tensors[name].data_ptr() != tensor.data_ptr()
    assert same.keywords.keys() == call.keywords.keys()
    assert (same.is_causal, same.scale, same.enable_gqa) == (call.is_causal, call.scale, call.enable_gqa)


def test_the_gemma_call_keeps_its_layout_family() -> None:
    call = make_call(1, 16, 1, 289, width=512, padding=7)
    longer = with_lengths(call, 353, 321)
    assert longer.query.shape == (1, 16, 353, 512)
    assert longer.query.stride() == (353 * 8192, 512, 8192, 1)
    assert longer.key.shape == longer.value.shape == (1, 16, 321, 512)
    assert longer.key.stride() == longer.value.stride() == (0, 0, 512, 1)
    assert longer.key.untyped_storage().nbytes() < 2 * 321 * 512 * 2


@pytest.mark.parametrize(
    ("shape", "stride", "new_shape", "expected"),
    [
        ((2, 4, 33, 8), (1056, 264, 8, 1), (2, 4, 65, 8), (2080, 520, 8, 1)),  # contiguous
        ((2, 4, 33, 8), (1056, 8, 32, 1), (2, 4, 65, 8), (2080, 8, 32, 1)),  # (B, L, H, E) transposed
        ((2, 4, 33, 8), (4096, 1024, 8, 1), (2, 4, 65, 8), (4096, 1024, 8, 1)),  # static cache of 128 positions
        ((2, 4, 33, 8), (4096, 1024, 8, 1), (2, 4, 129, 8), (8192, 2048, 8, 1)),  # which no longer fits
        ((1, 4, 33, 8), (3168, 8, 96, 1), (1, 4, 17, 8), (1632, 8, 96, 1)),  # packed query, key and value
        ((1, 4, 1, 8), (32, 8, 8, 1), (1, 4, 5, 8), (160, 40, 8, 1)),  # one position, contiguous
        ((1, 4, 1, 8), (32, 8, 32, 1), (1, 4, 5, 8), (160, 8, 32, 1)),  # one position, transposed
        ((1, 1, 33, 33), (1320, 1320, 40, 1), (1, 1, 50, 50), (2800, 2800, 56, 1)),  # rows padded to 8
        ((1, 16, 33, 8), (0, 0, 8, 1), (1, 16, 3, 8), (0, 0, 8, 1)),  # one head, repeated
        ((1, 4, 33, 33), (0, 0, 0, 1), (1, 4, 40, 40), (0, 0, 0, 1)),  # one mask row for all
    ],
)
def test_strides_follow_the_family(
    shape: tuple[int, ...], stride: tuple[int, ...], new_shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert restride(shape, stride, new_shape)[0] == expected


def test_a_cache_slice_keeps_the_stride_of_the_cache() -> None:
    cache = torch.randn(1, 2, 128, 8)
    call = AttentionCall(torch.randn(1, 2, 5, 8), cache[:, :, :40], cache[:, :, :40] + 0)
    assert with_lengths(call, 5, 90).key.stride() == (2048, 1024, 8, 1)
    assert with_lengths(call, 5, 90).value.stride() == (1440, 720, 8, 1)


def test_a_value_inside_the_key_stays_inside_it() -> None:
    key = torch.randn(1, 1, 20, 24)
    call = AttentionCall(torch.randn(1, 1, 20, 24), key, key[..., :16])
    longer = with_lengths(call, 9, 31)
    assert longer.value.data_ptr() == longer.key.data_ptr()
    assert longer.value.stride() == longer.key.stride() == (744, 744, 24, 1)
    assert torch.equal(longer.value, longer.key[..., :16])
    assert torch.equal(longer.key[:, :, :20], key)


def test_packed_query_key_and_value_stay_packed_when_they_change_together() -> None:
    packed = torch.randn(1, 20, 3, 2, 8)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    together = with_lengths(AttentionCall(query, key, value), 50, 50)
    assert together.key.data_ptr() - together.query.data_ptr() == 16 * 4
    assert together.query.stride() == (2400, 8, 48, 1)
    assert torch.equal(together.value[:, :, :20], value)
    apart = with_lengths(AttentionCall(query, key, value), 50, 20)
    assert torch.equal(apart.query[:, :, :20], query)
    assert torch.equal(apart.key, key)
    assert not span(apart.query).overlaps(span(apart.key))


def test_pointer_alignment_is_kept() -> None:
    query = empty_aligned(1 * 1 * 9 * 8 * 4, 48, "cpu").view(torch.float32).view(1, 1, 9, 8).normal_()
    call = AttentionCall(query, torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8))
    assert with_lengths(call, 33, 33).query.data_ptr() % 256 == 48


@pytest.mark.parametrize("end", ["tail", "head"])
def test_values_are_kept_where_they_were_and_drawn_beyond(end: str) -> None:
    call = make_call(1, 2, 2, 40, width=64, mask=None, layout="dense", dtype=torch.float32)
    call = replace(call, key=call.key * 3 + 5)
    longer, shorter = with_lengths(call, 300, 300, end=end), with_lengths(call, 7, 7, end=end)
    old = slice(0, 40) if end == "tail" else slice(260, 300)
    new = slice(40, 300) if end == "tail" else slice(0, 260)
    assert torch.equal(longer.key[:, :, old], call.key)
    assert torch.equal(shorter.key, call.key[:, :, :7] if end == "tail" else call.key[:, :, 33:])
    assert float(longer.key[:, :, new].mean()) == pytest.approx(5, abs=0.3)
    assert float(longer.key[:, :, new].std()) == pytest.approx(3, rel=0.15)
    for tensor in (longer.query, longer.key, longer.value):
        assert len(tensor[0, 0].unique(dim=0)) == 300


def test_constant_and_unfinished_values_are_extended_by_usable_ones() -> None:
    call = make_call(1, 1, 1, 12, width=4, mask=None, dtype=torch.float32)
    holes = call.key.clone()
    holes[:, :, 3:5] = float("nan")
    longer = with_lengths(replace(call, query=torch.zeros_like(call.query), key=holes), 30, 30)
    assert longer.key[:, :, 12:].isfinite().all()
    assert len(longer.query[0, 0, 12:].unique(dim=0)) == 18


def test_keys_that_all_have_the_same_value_get_new_ones_when_no_other_is_left() -> None:
    call = make_call(rows=33, padding=7)
    value = call.value.clone()
    value[:, :, :7] = 0.0
    call = replace(call, value=value)
    assert bool(with_lengths(call, 33, 5).value.std(-2).gt(0).all())
    assert torch.equal(with_lengths(call, 33, 8).value, value[:, :, :8])
    alike = replace(call, value=torch.ones_like(value))
    assert torch.equal(with_lengths(alike, 40, 33).value, alike.value)


def test_the_same_seed_gives_the_same_bits() -> None:
    call = make_call(1, 2, 1, 20, width=8)
    one, two, other = (with_lengths(call, 50, 50, seed=seed) for seed in (4, 4, 5))
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in NAMES)
    assert not torch.equal(one.query, other.query)


@pytest.mark.parametrize("size", [8, 15, 33, 64, 100])
@pytest.mark.parametrize("mask", ["causal", "float"])
def test_a_causal_mask_keeps_its_padding(mask: str, size: int) -> None:
    call = make_call(1, 2, 1, 33, width=8, mask=mask, padding=5, dtype=torch.float32)
    resized = with_lengths(call, size, size)
    assert resized.attn_mask is not None
    assert resized.attn_mask.dtype == call.attn_mask.dtype  # type: ignore[union-attr]
    assert torch.equal(visible(resized), causal(size, size, 5 if size >= 10 else size // 2))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_padding_never_hides_every_row(size: int) -> None:
    call = make_call(1, 2, 1, 33, width=8, padding=31)
    assert bool(visible(with_lengths(call, size, size)).any(1)[-1])


def test_a_causal_mask_of_fewer_keys_than_rows_keeps_every_row_live_and_tells_them_apart() -> None:
    call = make_call(1, 2, 1, 33, width=8)
    kept, distinct = visible(with_lengths(call, 40, 10, mask="kept")), visible(with_lengths(call, 40, 10))
    assert kept.sum(1).tolist() == [number for number in range(1, 11) for _ in range(4)]
    assert distinct.any(1).all()
    assert not bool((distinct & ~kept).any())
    assert len(distinct.unique(dim=0)) >= 30  # rows that see one key or two have little to lose


def test_a_single_key_is_seen_by_the_later_rows() -> None:
    call = make_call(1, 2, 1, 33, width=8, padding=5)
    assert visible(with_lengths(call, 7, 1)).flatten().tolist() == [False] * 3 + [True] * 4
    assert visible(with_lengths(call, 1, 1)).flatten().tolist() == [True]


def test_a_causal_mask_of_more_keys_than_rows_lets_the_last_row_see_all_and_the_first_few() -> None:
    mask = visible(with_lengths(make_call(1, 2, 1, 33, width=8), 4, 40))
    assert mask.sum(1).tolist() == [10, 20, 30, 40]


def test_a_chunk_of_a_longer_prompt_keeps_its_distance_to_the_end() -> None:
    call = call_with_mask(causal(8, 20, offset=12)[None, None])
    assert torch.equal(visible(with_lengths(call, 8, 20)), causal(8, 20, offset=12))
    assert torch.equal(visible(with_lengths(call, 5, 30)), causal(5, 30, offset=25))


def test_a_sliding_window_keeps_its_width() -> None:
    call = call_with_mask((causal(30, 30) & ~causal(30, 30, offset=-6))[None, None])
    assert torch.equal(visible(with_lengths(call, 50, 50)), causal(50, 50) & ~causal(50, 50, offset=-6))
    assert torch.equal(visible(with_lengths(call, 20, 35)), causal(20, 35, offset=15) & ~causal(20, 35, offset=9))


def test_a_bidirectional_block_keeps_its_place_and_its_rows_are_told_apart() -> None:
    mask = causal(30, 30)
    mask[4:12, 4:12] = True
    call = call_with_mask(mask[None, None])
    kept, distinct = with_lengths(call, 40, 40, mask="kept"), with_lengths(call, 40, 40)
    expected = causal(40, 40)
    expected[4:12, 4:12] = True
    assert torch.equal(visible(kept), expected)
    assert live_rows_differ(visible(distinct))
    assert not bool((visible(distinct) & ~expected).any())
    assert torch.equal(visible(distinct)[12:], expected[12:])


@pytest.mark.parametrize("size", [3, 20, 50])
def test_rows_of_a_padding_mask_are_told_apart_and_stay_padded(size: int) -> None:
    mask = torch.ones(2, 1, 30, 30, dtype=torch.bool)
    mask[1, :, :, :2] = False
    call = replace(call_with_mask(mask[:1]), query=torch.randn(2, 2, 30, 4), attn_mask=mask)
    call = replace(call, key=torch.randn(2, 2, 30, 4), value=torch.randn(2, 2, 30, 4))
    resized = with_lengths(call, size, size).attn_mask
    assert resized is not None
    assert bool(resized[0, 0, 0].all())
    assert not bool(resized[1, 0, :, : min(2, size // 2)].any())
    assert resized.any(-1).all()
    if size > 3:
        assert live_rows_differ(resized[0, 0])
        assert live_rows_differ(resized[1, 0])


def test_two_documents_stay_apart_and_the_last_one_grows() -> None:
    mask = torch.zeros(30, 30, dtype=torch.bool)
    mask[:10, :10] = mask[10:, 10:] = True
    expected = torch.zeros(40, 40, dtype=torch.bool)
    expected[:10, :10] = expected[10:, 10:] = True
    assert torch.equal(visible(with_lengths(call_with_mask(mask[None, None]), 40, 40, mask="kept")), expected)


@pytest.mark.parametrize("end", ["tail", "head"])
def test_an_arbitrary_mask_is_cropped_or_extended_at_its_density(end: str) -> None:
    random = torch.Generator().manual_seed(1)
    mask = torch.rand(1, 2, 30, 30, generator=random) < 0.5
    longer = with_lengths(call_with_mask(mask), 90, 90, end=end).attn_mask
    shorter = with_lengths(call_with_mask(mask), 20, 20, end=end).attn_mask
    assert longer is not None
    assert shorter is not None
    old = (slice(0, 30), slice(0, 30)) if end == "tail" else (slice(60, 90), slice(60, 90))
    assert torch.equal(longer[..., old[0], old[1]], mask)
    assert torch.equal(shorter, mask[..., :20, :20] if end == "tail" else mask[..., 10:, 10:])
    assert float(longer.float().mean()) == pytest.approx(0.5, abs=0.03)
    assert not torch.equal(longer[0, 0], longer[0, 1])
    for head in range(2):
        assert live_rows_differ(longer[0, head])
        assert longer[0, head].any(-1).all()


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min])
def test_an_additive_mask_hides_with_its_own_value(hidden: float) -> None:
    bias = torch.zeros(20, 20).masked_fill(~causal(20, 20, 3), hidden)[None, None]
    resized = with_lengths(call_with_mask(bias), 35, 35).attn_mask
    assert resized is not None
    assert torch.equal(resized[0, 0], torch.zeros(35, 35).masked_fill(~causal(35, 35, 3), hidden))


def test_a_constant_additive_mask_stays_constant_where_it_hides_nothing() -> None:
    bias = torch.full((1, 1, 20, 20), -100.0)
    resized = with_lengths(call_with_mask(bias), 35, 35).attn_mask
    assert resized is not None
    assert set(resized[0, 0].unique().tolist()) == {-math.inf, -100.0}
    assert live_rows_differ(resized[0, 0] > -math.inf)
    kept = with_lengths(call_with_mask(bias), 35, 35, mask="kept").attn_mask
    assert kept is not None
    assert bool((kept == -100.0).all())


def test_additive_values_are_kept_and_redrawn_from_the_original_ones() -> None:
    bias = torch.randint(1, 9, (1, 1, 20, 20), generator=torch.Generator().manual_seed(0)).float()
    resized = with_lengths(call_with_mask(bias), 35, 35).attn_mask
    assert resized is not None
    assert torch.equal(resized[..., :20, :20], bias)
    assert set(resized.unique().tolist()) == set(range(1, 9))


@pytest.mark.parametrize(
    ("shape", "new_shape"),
    [((1, 1, 1, 20), (1, 1, 1, 35)), ((20,), (35,)), ((20, 20), (30, 35)), ((1, 1, 20, 1), (1, 1, 30, 1))],
)
def test_broadcast_dimensions_of_a_mask_stay_broadcast(shape: tuple[int, ...], new_shape: tuple[int, ...]) -> None:
    bare = make_call(1, 2, 2, 20, 20, 4, mask=None, layout="dense")
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., :2] = shape[-1] == 1
    resized = with_lengths(replace(bare, attn_mask=mask), 30, 35).attn_mask
    assert resized is not None
    assert resized.shape == new_shape


def test_a_mask_expanded_over_heads_and_rows_is_stored_once() -> None:
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool).expand(1, 2, 20, 20)
    call = replace(call_with_mask(causal(20, 20)[None, None]), attn_mask=mask)
    resized = with_lengths(call, 30, 35).attn_mask
    assert resized is not None
    assert resized.shape == (1, 2, 30, 35)
    assert resized.stride()[1:] == (0, 0, 1)


def test_random_rows_all_differ_and_see_a_key() -> None:
    resized = with_lengths(make_call(1, 2, 1, 33, width=8, padding=5), 40, 40, mask="random")
    assert live_rows_differ(visible(resized))
    assert visible(resized).any(1).all()


def test_a_causal_flag_needs_no_mask() -> None:
    resized = with_lengths(make_call(1, 2, 1, 33, width=8, mask="flag"), 5, 9)
    assert resized.attn_mask is None
    assert resized.is_causal


def test_a_causal_bias_keeps_its_rule() -> None:
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(8, 12)
    call = replace(make_call(1, 2, 2, 8, 12, 4, mask=None, layout="dense"), attn_mask=bias)
    resized = with_lengths(call, 5, 20).attn_mask
    assert type(resized) is type(bias)
    assert (resized.variant, resized.seq_len_q, resized.seq_len_kv) == (bias.variant, 5, 20)


def test_calls_without_batch_dimensions_are_resized_too() -> None:
    call = AttentionCall(torch.randn(2, 9, 4), torch.randn(2, 9, 4), torch.randn(2, 9, 6), causal(9, 9))
    resized = with_lengths(call, 12, 14)
    assert (resized.query.shape, resized.key.shape, resized.value.shape) == ((2, 12, 4), (2, 14, 4), (2, 14, 6))
    assert resized.attn_mask is not None
    assert resized.attn_mask.shape == (12, 14)


def test_a_value_longer_than_the_key_stays_so() -> None:
    call = AttentionCall(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 7, 4))
    assert with_lengths(call, 4, 11).value.shape[-2] == 13


def test_one_resizer_serves_many_lengths() -> None:
    call = make_call(1, 2, 1, 33, width=8, padding=5)
    resize = resizer(call)
    for rows, keys in ((1, 1), (5, 40), (40, 5), (33, 33)):
        at_once = with_lengths(call, rows, keys)
        assert all(torch.equal(resize(rows, keys).tensors[name], at_once.tensors[name]) for name in NAMES)


def test_wrong_arguments_are_named() -> None:
    call = make_call(1, 1, 1, 4, width=4)
    with pytest.raises(InputError, match="at least 1"):
        with_lengths(call, 0, 4)
    with pytest.raises(InputError, match="tail"):
        with_lengths(call, 4, 4, end="middle")
    with pytest.raises(InputError, match="distinct"):
        with_lengths(call, 4, 4, mask="wild")
