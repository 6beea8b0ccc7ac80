"""The layout of a call as data, and what one call's layout has that another's lost."""

from __future__ import annotations

import json

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from sdpa_repro.attention import AttentionCall, map_dense
from sdpa_repro.dumping.layout import layout, layout_differences
from tests.calls import make_call


def place(memory: Tensor, first: int, *shape: int) -> Tensor:
    """A dense float32 tensor at a byte of some memory."""
    count = torch.Size(shape).numel() * 4
    return memory[first : first + count].view(torch.float32).view(shape)


def aligned(nbytes: int) -> Tensor:
    """Zeros whose address is a multiple of 256."""
    raw = torch.zeros(nbytes + 256, dtype=torch.uint8)
    first = -raw.data_ptr() % 256
    return raw[first : first + nbytes]


def three_in(memory: Tensor, key: int = 1024, value: int = 2048) -> AttentionCall:
    query, keys, values = (place(memory, first, 1, 1, 4, 8) for first in (0, key, value))
    return AttentionCall(query, keys, values)


def test_two_calls_of_one_layout_have_no_differences() -> None:
    assert layout_differences(three_in(aligned(4096)), three_in(aligned(4096))) == []


def test_the_layout_is_plain_data_with_the_numbers_of_the_tensors() -> None:
    found = layout(three_in(aligned(8192)[64:]))
    assert json.loads(json.dumps(found)) == found
    assert found["tensors"]["key"] == {"dtype": "float32", "shape": [1, 1, 4, 8], "stride": [32, 32, 8, 1], "align": 64}


def test_a_densified_copy_lost_its_stride_0() -> None:
    call = make_call(heads=4, rows=9, width=16)
    found = layout_differences(call, map_dense(call, "key"))
    assert any(line.startswith("key has stride") and "the stride 0 of dimension 0, 1 is lost" in line for line in found)
    assert not any(line.startswith(("query has", "value has")) for line in found)


def test_an_alignment_that_changed_is_named() -> None:
    found = layout_differences(three_in(aligned(4096)), three_in(aligned(4096)[64:]))
    assert "query has data_ptr % 256 = 64, was 0" in found
    assert len(found) == 3


def test_memory_that_is_no_longer_shared_is_named() -> None:
    key = torch.zeros(1, 1, 4, 8)
    shared, apart = AttentionCall(key, key, key[..., :4]), AttentionCall(key, key, key[..., :4].clone())
    assert "value no longer shares memory with key" in layout_differences(shared, apart)
    assert "value now shares memory with key" in layout_differences(apart, shared)


def test_interleaved_views_do_not_count_as_shared() -> None:
    query, key, value = torch.zeros(1, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    assert not any(pair["shared"] for pair in layout(AttentionCall(query, key, value))["near"])


def test_a_distance_that_changed_is_named() -> None:
    found = layout_differences(three_in(aligned(8192)), three_in(aligned(8192), value=4096))
    assert found == [
        "query and value are now 4096 bytes apart, were 2048",
        "key and value are now 3072 bytes apart, were 1024",
    ]


def test_tensors_within_64_mib_that_were_moved_further_apart_are_named() -> None:
    memory = aligned(66 << 20)
    found = layout_differences(three_in(memory), three_in(memory, value=65 << 20))
    assert "key and value are now more than 64 MiB apart, were 1024 bytes" in found


def test_dtype_shape_and_a_missing_mask_are_named() -> None:
    call = make_call(rows=5, width=8, dtype=torch.float32)
    other = make_call(rows=6, keys=5, width=8, dtype=torch.float16, mask=None)
    found = layout_differences(call, other)
    assert "attn_mask is missing" in found
    assert "attn_mask is new" in layout_differences(other, call)
    assert "key has dtype float16, was float32" in found
    assert "query has shape [1, 4, 6, 8], was [1, 4, 5, 8]" in found


def test_the_rule_of_a_causal_bias_is_compared_and_its_memory_is_not() -> None:
    zeros = torch.zeros(1, 1, 4, 8)
    upper, again = (AttentionCall(zeros, zeros, zeros, causal_upper_left(4, 6)) for _ in range(2))
    lower = AttentionCall(zeros, zeros, zeros, causal_lower_right(4, 6))
    assert layout_differences(upper, again) == []
    assert len(layout_differences(upper, lower)) == 1
    assert layout(lower)["tensors"]["attn_mask"]["rule"]["shape"] == [4, 6]


def test_empty_tensors_have_no_place_to_compare() -> None:
    call = make_call(rows=3, keys=0, mask=None)
    assert layout_differences(call, call.with_tensors({"key": call.key.clone(), "value": call.value.clone()})) == []
    assert layout(call)["tensors"]["key"]["align"] is None
