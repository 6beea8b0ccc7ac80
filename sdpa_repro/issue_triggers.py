"""What each known upstream bug needs of a call, and which query rows it spoils: one small function each.

The issue a function belongs to stands in the table of `known_issues`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from sdpa_repro.situation import (
    Answer,
    Situation,
    every,
    few_kv_heads,
    fully_masked_row,
    inner_stride_not_one,
    mask_rows_differ,
    mps_vector_kernel,
    one_kv_head,
    one_row_in_last_block,
    query_block,
    yes,
)


def only_last(situation: Situation, wrong: Collection[int]) -> bool:
    """Row L-1 and no other."""
    return set(wrong) == {situation.rows - 1}


def most(situation: Situation, wrong: Collection[int]) -> bool:
    """At least half of the rows."""
    return 2 * len(set(wrong)) >= situation.rows


def past_32_bits(situation: Situation, wrong: Collection[int]) -> bool:
    """No row before the first whose offset in the mask passes 2**32 entries, less one block."""
    padded = -(-situation.keys // 8) * 8  # the kernel's copy of the mask has rows of a multiple of 8
    return min(wrong) >= (1 << 32) // padded - 64


# Conditions on the call, one function an issue.


def tail_row_uses_first_mask_row(situation: Situation) -> Answer:
    """pytorch#191937: a mask with rows, one KV head of stride 0, no gradient, a lone last row of a longer query."""
    tail = one_row_in_last_block(situation)
    return every(mask_rows_differ(situation), one_kv_head(situation), not situation.grad, situation.rows > 1, tail)


def lone_row_is_remapped(situation: Situation) -> Answer:
    """pytorch#192138: either of the two ways below in which the shortcut for a lone row goes wrong."""
    return max(remap_reads_past_heads(situation), remap_forgets_causal(situation))


def remapped_rows(situation: Situation, wrong: Collection[int]) -> bool:
    """Row L-1, or anything when the kernel writes past the heads."""
    return only_last(situation, wrong) or remap_reads_past_heads(situation) is not Answer.NO


def remap_reads_past_heads(situation: Situation) -> Answer:
    """pytorch#192138: the shortcut, and more heads than a block has rows."""
    tail = every(one_kv_head(situation), not situation.grad, one_row_in_last_block(situation))
    block = query_block(situation)
    sure, perhaps = situation.heads > (block or 64), situation.heads > (block or 32)
    heads = Answer.YES if sure else Answer.MAYBE if perhaps else Answer.NO
    return every(tail, heads)


def remap_forgets_causal(situation: Situation) -> Answer:
    """pytorch#192138: the shortcut under `is_causal` with more keys than queries."""
    tail = every(one_kv_head(situation), not situation.grad, one_row_in_last_block(situation))
    return every(tail, situation.call.is_causal, situation.call.attn_mask is None, situation.keys > situation.rows)


def mask_offset_wraps(situation: Situation) -> Answer:
    """pytorch#187227: a mask with rows and L·S > 2**32."""
    return every(mask_rows_differ(situation), situation.rows * situation.keys > 1 << 32)


def expanded_with_mask(situation: Situation) -> Answer:
    """pytorch#112577: expanded key or value with a mask; certain for one KV head and a lone last row (PR 116234)."""
    key, value = situation.call.key, situation.call.value
    expanded = any(0 in tensor.stride() for tensor in (key, value))
    tail = every(one_kv_head(situation), one_row_in_last_block(situation), not situation.grad)
    return every(situation.call.attn_mask is not None, expanded, max(tail, Answer.MAYBE))


def block_diagonal_bfloat16(situation: Situation) -> Answer:
    """pytorch#108503: bfloat16 and a bool mask; certain at the reported length, 600."""
    mask = situation.call.attn_mask
    bool_mask = mask is not None and mask.dtype == torch.bool
    length = Answer.YES if situation.rows == situation.keys == 600 else Answer.MAYBE
    return every(bool_mask, situation.call.query.dtype == torch.bfloat16, length)


def cross_attention_with_mask(situation: Situation) -> Answer:
    """pytorch#124877: a mask and L ≠ S."""
    return every(situation.call.attn_mask is not None, situation.rows != situation.keys)


def few_kv_heads_on_b200(situation: Situation) -> Answer:
    """pytorch#193893: grouped-query attention with fewer than 8 KV heads on compute capability 10.0."""
    # Without the GPU this condition is far too wide, so an emulation elsewhere is never taken for this bug.
    return every(few_kv_heads(situation, 8), on_gpu(situation, (10, 0)))


def half_key_tile_in_backward(situation: Situation) -> Answer:
    """pytorch#196678: a mask, a gradient, S % 128 == 64 on compute capability 9.0."""
    # The third condition, a row with log-sum-exp < -88.7, needs all scores: it stays unknown.
    half_tile = every(situation.call.attn_mask is not None, situation.grad, situation.keys % 128 == 64)
    return every(half_tile, on_gpu(situation, (9, 0)), Answer.MAYBE)


def wide_mask_read_as_half(situation: Situation) -> Answer:
    """pytorch#191612: a float32 mask beside a 16-bit query; seen on compute capability 9.x and 10.x."""
    mask = situation.call.attn_mask
    wide = mask is not None and mask.dtype == torch.float32
    half = situation.call.query.dtype in (torch.float16, torch.bfloat16)
    major = None if situation.capability is None else situation.capability[0]
    return every(wide, half, Answer.YES if situation.emulated or major in (9, 10) else Answer.MAYBE)


def on_gpu(situation: Situation, wanted: tuple[int, int]) -> Answer:
    """Whether the GPU has this compute capability; MAYBE when it is unknown."""
    return Answer.MAYBE if situation.capability is None else yes(situation.capability == wanted)


def mask_and_flag(situation: Situation) -> Answer:
    """pytorch#187801: `attn_mask` together with `is_causal`."""
    return every(situation.call.attn_mask is not None, situation.call.is_causal)


def unequal_key_and_value(situation: Situation) -> Answer:
    """pytorch#193728: key and value of different length."""
    return yes(situation.call.key.shape[-2] != situation.call.value.shape[-2])


def inner_stride(situation: Situation) -> Answer:
    """pytorch#187506: an innermost stride other than 1 in query, key or value."""
    call = situation.call
    return yes(inner_stride_not_one(call.query, call.key, call.value))


def no_query_rows(situation: Situation) -> Answer:
    """pytorch#141219: L = 0."""
    return yes(situation.rows == 0)


def no_kv_heads(situation: Situation) -> Answer:
    """pytorch#141218: `enable_gqa` with Hkv = 0."""
    return every(situation.call.enable_gqa, situation.kv_heads == 0)


def mps_transposed_query(situation: Situation) -> Answer:
    """pytorch#163597: a query that is not contiguous, in the vector kernel."""
    return every(mps_vector_kernel(situation), not situation.call.query.is_contiguous())


def mps_permuted_batch(situation: Situation) -> Answer:
    """pytorch#181133: several batch rows and any input not contiguous, in the vector kernel."""
    call = situation.call
    permuted = not all(tensor.is_contiguous() for tensor in (call.query, call.key, call.value))
    return every(mps_vector_kernel(situation), permuted, call.query.dim() >= 4, call.query.shape[0] > 1)


def mps_partial_key_block(situation: Situation) -> Answer:
    """pytorch#169222: S % 32 ≠ 0 in the vector kernel."""
    return every(mps_vector_kernel(situation), situation.keys % 32 != 0)


def strided_value(situation: Situation) -> Answer:
    """ROCm/pytorch#3230: a value that is not contiguous."""
    return yes(not situation.call.value.is_contiguous())


def fast_path_mask(situation: Situation) -> Answer:
    """pytorch#118628: an additive float mask, or a fully masked row."""
    # A float mask is read as bool: every non-zero entry hides its key. Zeros and -inf come out right.
    mask = situation.call.attn_mask
    if mask is None:
        return Answer.NO
    additive = mask.dtype.is_floating_point and bool(((mask != 0) & (mask != float("-inf"))).any())
    return max(yes(additive), fully_masked_row(situation))


def permuted_key(situation: Situation) -> Answer:
    """pytorch#195320: a key whose innermost stride is not 1."""
    return yes(inner_stride_not_one(situation.call.key))
