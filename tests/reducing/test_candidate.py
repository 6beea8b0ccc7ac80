"""Other sizes: what is left of captured tensors is what was there, and layouts stay in their family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.recipe import Kind
from sdpa_repro.reducing.candidate import Candidate, Sizes, formed, loosened, relaid, sized, sound
from sdpa_repro.reducing.forms import Form, dense_strides
from tests.calls import causal_mask, make_call

GEMMA = make_call(heads=4, rows=12, width=24, padding=2)
GQA = make_call(heads=6, kv_heads=3, rows=12, width=24, layout="gqa", batch=2)


def cut(call: AttentionCall, heads: tuple[int, ...] = (), batch: int = 0, **changes: int) -> AttentionCall:
    return sized(Candidate(call), replace(Sizes.of(call), **changes), heads=heads, batch=batch).call


def test_heads_left_out_leave_the_others_as_they_were() -> None:
    small = cut(GEMMA, heads=(1, 2), H=2, Hkv=2)
    assert torch.equal(small.query, GEMMA.query[:, 1:3])
    assert torch.equal(small.key, GEMMA.key[:, :2])


def test_an_expanded_head_stays_expanded_and_a_transposed_query_transposed() -> None:
    small = cut(GEMMA, heads=(0, 1), H=2, Hkv=2)
    assert small.key.stride() == (12 * 24, 0, 24, 1)
    assert small.query.stride() == (12 * 2 * 24, 24, 2 * 24, 1)


def test_a_single_head_has_no_stride_0() -> None:
    assert 0 not in cut(GEMMA, heads=(0,), H=1, Hkv=1).key.stride()


def test_grouped_heads_keep_the_key_heads_they_use() -> None:
    small = cut(GQA, heads=(2, 4), H=2, Hkv=2)
    assert torch.equal(small.query, GQA.query[:, [2, 4]])
    assert torch.equal(small.key, GQA.key[:, [1, 2]])


def test_one_batch_row_is_the_one_asked_for() -> None:
    small = cut(GQA, batch=1, B=1)
    assert torch.equal(small.query, GQA.query[1:])
    assert torch.equal(small.value, GQA.value[1:])


def test_shorter_sequences_keep_their_first_positions_or_their_last() -> None:
    shorter = replace(Sizes.of(GEMMA), L=7, S=7)
    first, last = (sized(Candidate(GEMMA), shorter, end=end).call for end in ("tail", "head"))
    assert torch.equal(first.key, GEMMA.key[:, :, :7])
    assert torch.equal(last.key, GEMMA.key[:, :, 5:])


def test_a_narrower_call_keeps_the_first_columns() -> None:
    small = cut(GEMMA, E=8, Ev=16)
    assert torch.equal(small.query, GEMMA.query[..., :8])
    assert torch.equal(small.value, GEMMA.value[..., :16])


def test_closed_forms_are_built_anew_in_other_sizes() -> None:
    forms = {
        "query": Form(Kind.ZEROS),
        "key": Form(Kind.ZEROS),
        "value": Form(Kind.ARANGE),
        "attn_mask": Form(Kind.TRIL),
    }
    whole = formed(Candidate(GEMMA), forms)
    assert whole is not None
    small = sized(whole, replace(whole.sizes, H=2, Hkv=2, L=5, S=5, E=8, Ev=8)).call
    assert small.value[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert small.value.stride() == (40, 0, 8, 1)
    assert torch.equal(small.attn_mask, causal_mask(5, 5))


def test_a_constant_query_and_key_keep_their_product_as_they_get_narrower() -> None:
    full = Form(Kind.FULL, constant=8.0)
    whole = formed(Candidate(GEMMA), {"query": full, "key": replace(full, constant=-8.0)})
    assert whole is not None
    small = sized(whole, replace(whole.sizes, E=8)).call
    scores = [
        float(call.query[0, 0, 0].float() @ call.key[0, 0, 0].float()) * call.softmax_scale
        for call in (whole.call, small)
    ]
    assert scores[1] <= scores[0] < 0


def test_other_strides_hold_the_same_values() -> None:
    dense = relaid(Candidate(GEMMA), "key", dense_strides(GEMMA.key.shape))
    assert dense is not None
    assert dense.call.key.is_contiguous()
    assert torch.equal(dense.call.key, GEMMA.key)


def test_heads_that_differ_do_not_fit_one_repeated_head() -> None:
    assert relaid(Candidate(GEMMA), "query", (12 * 24, 0, 24, 1)) is None


def test_loosened_strides_are_dense_where_nothing_reads_them() -> None:
    call = replace(GEMMA, key=GEMMA.key[:, :1], value=GEMMA.value[:, :1], query=GEMMA.query[:, :1])
    assert loosened(Candidate(call)).call.key.stride() == (288, 288, 24, 1)
    assert torch.equal(loosened(Candidate(call)).call.key, call.key)


def test_two_calls_with_one_value_different_are_two_candidates() -> None:
    other = replace(GEMMA, key=GEMMA.key.clone(memory_format=torch.preserve_format))
    key = GEMMA.key[:, :1].clone()
    key[0, 0, 3, 3] += 1
    assert Candidate(GEMMA).key == Candidate(replace(GEMMA)).key
    assert Candidate(replace(other, key=key.expand(1, 4, 12, 24))).key != Candidate(GEMMA).key


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value": GEMMA.value[:, :, :5]}, "length"),
        ({"key": GEMMA.key[..., :5]}, "head_dim"),
        ({"is_causal": True}, "both"),
        ({"attn_mask": torch.zeros(1, 1, 12, 12, dtype=torch.bool)}, "fully masked"),
        ({"query": GEMMA.query[:, :, :0]}, "no elements"),
    ],
)
def test_a_failure_of_such_a_call_would_mean_nothing(changes: dict[str, object], reason: str) -> None:
    assert not sound(GEMMA)
    assert reason in sound(replace(GEMMA, **changes))  # type: ignore[arg-type]


def test_a_causal_bias_holds_no_captured_values_and_follows_the_lengths() -> None:
    from torch.nn.attention.bias import causal_lower_right

    call = replace(
        make_call(heads=2, rows=6, keys=9, width=8, layout="dense", mask=None), attn_mask=causal_lower_right(6, 9)
    )
    made = formed(Candidate(call), {name: Form(Kind.ZEROS) for name in ("query", "key", "value")})
    assert made is not None
    assert made.captured == ()
    small = sized(made, replace(made.sizes, L=3, S=5)).call
    assert small.query.shape[2:] == (3, 8)
    assert (small.attn_mask.seq_len_q, small.attn_mask.seq_len_kv) == (3, 5)  # type: ignore[union-attr]
