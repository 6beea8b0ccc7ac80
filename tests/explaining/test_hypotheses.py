"""Hypotheses name what a planted fault computes, and nothing for faults they do not cover or healthy calls."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.hypotheses import Hypothesis, hypothesis
from sdpa_repro.explaining.mask_rows import wrapped_offsets
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import Result, Trial, in_process, judged
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.definition import attention

FAULTS = Path(__file__).resolve().parents[1] / "faults"

Explain = Callable[[str, AttentionCall], "Hypothesis | None"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The calls are small: threads would wait for each other longer than they work."""
    torch.set_num_threads(1)


@pytest.fixture
def explain() -> Iterator[Explain]:
    """Plants a fault file and asks for the hypothesis of FLASH's output; the real kernel is back after the test."""

    def plant_and_ask(name: str, call: AttentionCall) -> Hypothesis | None:
        runpy.run_path(str(FAULTS / f"{name}.py"))
        trial = in_process(Backend.FLASH_ATTENTION)
        return hypothesis(call, trial(call).output, trial)

    yield plant_and_ask
    sys.modules["emulation"].restore()


def by(formula: Callable[[AttentionCall], Tensor]) -> Trial:
    """Trials of a backend that computes `formula`, a float64 definition, and rounds."""
    return lambda call: judged(call, formula(call).to(call.query.dtype))


def asked(call: AttentionCall, trial: Trial) -> Hypothesis | None:
    return hypothesis(call, trial(call).output, trial)


def found(answer: Hypothesis | None) -> str | None:
    """The id, checked to be without rivals."""
    assert answer is not None
    assert answer.complete
    assert answer.tied == ()
    return answer.id


def transposed(tensor: Tensor) -> Tensor:
    """The same values, laid out (B, S, H, E) in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def float_mask(call: AttentionCall) -> AttentionCall:
    assert call.attn_mask is not None
    return replace(call, attn_mask=torch.zeros(call.attn_mask.shape).masked_fill(~call.attn_mask, float("-inf")))


@pytest.mark.parametrize("padding", [0, 7])
def test_mask_row_0_is_named_at_length_33(explain: Explain, padding: int) -> None:
    answer = explain("pytorch_191937", make_call(rows=33, padding=padding))
    assert found(answer) == "mask_row"
    assert answer is not None
    assert answer.sentence == "the last query row (32) was computed with mask row 0"


@pytest.mark.slow
def test_mask_row_0_is_named_for_the_layers_of_gemma_4(explain: Explain) -> None:
    answer = explain("pytorch_191937", make_call(heads=16, rows=289, width=512, scale=1.0, padding=7))
    assert found(answer) == "mask_row"
    assert answer is not None
    assert answer.sentence == "the last query row (288) was computed with mask row 0"


def test_a_left_padded_row_that_looks_zero_is_told_apart_and_shown_as_near(explain: Explain) -> None:
    answer = explain("pytorch_191937", make_call(rows=33, padding=7))
    assert answer is not None
    assert [(miss.id, miss.matched, miss.wrong_rows) for miss in answer.near] == [("rows_zero", 4, 4)]


def test_another_mask_row_is_named_as_such(explain: Explain) -> None:
    answer = explain("altered_191937", make_call(rows=53, dtype=torch.float32))
    assert found(answer) == "mask_row"
    assert answer is not None
    assert answer.sentence == "the last query row (52) was computed with mask row 3"


def low_sums() -> AttentionCall:
    """Every third row has a mask of -100 throughout, one of -80."""
    call = make_call(rows=33, width=64, mask=None, layout="dense")
    mask = torch.zeros(33, 33, dtype=call.query.dtype)
    mask[::3], mask[1] = -100.0, -80.0
    return replace(call, attn_mask=mask)


def strided_value() -> AttentionCall:
    call = make_call(rows=20, width=64, layout="dense")
    return replace(call, value=transposed(call.value))


@pytest.mark.parametrize(
    ("fault", "call", "id", "words"),
    [
        pytest.param(
            "last_key_tile_dropped",
            make_call(rows=20, keys=65, width=64, mask=None),
            "last_keys_dropped",
            "computed without the last key (64): S = 65, the last key tile of 8, 16, 32 or 64 left out",
            id="last_key_tile_dropped",
        ),
        pytest.param(
            "last_key_tile_dropped",
            make_call(rows=33, width=64, dtype=torch.float32),
            "last_keys_dropped",
            "the last query row (32) was computed without the last key (32): S = 33, the last key tile of 8, 16 or 32",
            id="last_key_tile_dropped, causal",
        ),
        pytest.param(
            "half_tile_padding",
            make_call(rows=64, keys=100, width=64, mask=None),
            "padding_counted",
            "computed with 28 keys beyond S = 100 taking part (padding to 128), scored 0 with value 0",
            id="half_tile_padding",
        ),
        pytest.param(
            "value_strides_ignored",
            strided_value(),
            "value_strides",
            "every query row was computed with value read as if contiguous, its strides ignored",
            id="value_strides_ignored",
        ),
        pytest.param(
            "query_transposed_short",
            make_call(rows=8, keys=20, width=64, mask=None),
            "query_strides",
            "every query row was computed with query read as if contiguous, its strides ignored",
            id="query_transposed_short",
        ),
        pytest.param(
            "scale_ignored",
            make_call(width=64, mask=None, scale=1.0),
            "scale_default",
            "every query row was computed with the default scale 1/sqrt(64) = 0.125 instead of the scale given, 1",
            id="scale_ignored",
        ),
        pytest.param(
            "float_mask_as_half",
            float_mask(make_call(width=64)),
            "mask_dtype",
            "were computed with the bytes of the float32 attn_mask read as bfloat16",
            id="float_mask_as_half",
        ),
        pytest.param(
            "float_mask_as_half",
            float_mask(make_call(width=64, dtype=torch.float16)),
            "mask_dtype",
            "were computed with the bytes of the float32 attn_mask read as float16",
            id="float_mask_as_half, float16",
        ),
        pytest.param(
            "nan_log_sum_exp",
            low_sums(),
            "nan_log_sum_exp",
            "query rows 0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30 are NaN: exactly the rows whose log-sum-exp is low",
            id="nan_log_sum_exp",
        ),
        pytest.param(
            "rows_beyond",
            make_call(rows=140, width=64, dtype=torch.float32),
            "offset_wrapped",
            "query rows 128–139 were computed with mask row r - 128 for query row r: the offset wraps at 128 rows",
            id="rows_beyond",
        ),
        pytest.param(
            "gqa_wrong_head",
            make_call(layout="gqa", kv_heads=2, width=64),
            "head_interleaved",
            "every query row of heads 1–2 was computed with key/value head h % 2 instead of h // 2",
            id="gqa_wrong_head",
        ),
    ],
)
def test_each_planted_fault_gets_its_own_sentence(
    explain: Explain, fault: str, call: AttentionCall, id: str, words: str
) -> None:
    answer = explain(fault, call)
    assert found(answer) == id
    assert answer is not None
    assert answer.sentence is not None
    assert words in answer.sentence


@pytest.mark.parametrize("fault", ["value_scaled_in_tile", "noise_in_column", "one_head_1_percent"])
def test_a_fault_that_no_hypothesis_covers_gets_no_sentence(explain: Explain, fault: str) -> None:
    answer = explain(fault, make_call(width=64, dtype=torch.float32))
    assert found(answer) is None
    assert answer is not None
    assert answer.sentence is None


@pytest.mark.parametrize("fault", ["pytorch_191937", "jitter", "noisy", "nan_fully_masked"])
def test_a_healthy_call_has_nothing_to_explain(explain: Explain, fault: str) -> None:
    assert explain(fault, make_call(rows=32, padding=3)) is None


def test_a_crash_has_no_output_to_explain() -> None:
    assert hypothesis(make_call(), None, lambda call: Result(Status.CRASHED)) is None


def test_key_and_value_of_different_length_define_nothing_to_explain() -> None:
    call = make_call(width=32, rows=8, keys=20, mask=None)
    assert hypothesis(replace(call, value=call.value[:, :, :19]), torch.zeros(1, 4, 8, 32), by(attention)) is None


def test_nan_in_one_row_is_named_as_what_it_is(explain: Explain) -> None:
    answer = explain("nan_live", make_call(width=64))
    assert found(answer) == "rows_nan"
    assert answer is not None
    assert answer.sentence == "the last query row (32) of head 3 is NaN"


def rows_zero(call: AttentionCall) -> Tensor:
    output = attention(call)
    output[:, :, 5:9] = 0
    return output


def causal_bottom_right(call: AttentionCall) -> Tensor:
    rows, keys = call.query.shape[2], call.key.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return attention(replace(call, is_causal=False, attn_mask=seen))


def strict(call: AttentionCall) -> Tensor:
    seen = torch.ones(call.query.shape[2], call.key.shape[2], dtype=torch.bool).tril(-1)
    return attention(replace(call, is_causal=False, attn_mask=seen))


def not_normalised(call: AttentionCall) -> Tensor:
    scores = call.query.double() @ call.key.double().mT * call.softmax_scale
    return (scores - scores.amax(-1, keepdim=True)).exp() @ call.value.double()


def shifted_mask(call: AttentionCall) -> Tensor:
    assert call.attn_mask is not None
    mask = call.attn_mask.roll(1, -1)
    mask[..., 0] = False
    return attention(replace(call, attn_mask=mask))


def previous_mask_row(call: AttentionCall) -> Tensor:
    assert call.attn_mask is not None
    mask = call.attn_mask.clone()
    mask[..., 1:, :] = call.attn_mask[..., :-1, :]
    return attention(replace(call, attn_mask=mask))


def mask_of_head_0(call: AttentionCall) -> Tensor:
    assert call.attn_mask is not None
    return attention(replace(call, attn_mask=call.attn_mask[:, :1]))


def beyond(call: AttentionCall) -> Tensor:
    """Three positions more than key and value have, from the memory behind them."""

    def longer(tensor: Tensor) -> Tensor:
        batch, heads, keys, width = tensor.shape
        return tensor.as_strided((batch, heads, keys + 3, width), tensor.stride(), tensor.storage_offset())

    return attention(call.with_tensors({"key": longer(call.key), "value": longer(call.value)}))


def first_of_everything(call: AttentionCall, *names: str) -> AttentionCall:
    return call.with_tensors({name: call.tensors[name][:1].expand_as(call.tensors[name]) for name in names})


def slice_of_a_cache() -> AttentionCall:
    call = make_call(width=32, rows=20, keys=24, layout="dense", kv_heads=4, mask=None)
    return call.with_tensors({"key": call.key[:, :, :21], "value": call.value[:, :, :21]})


def mask_per_head() -> AttentionCall:
    mask = torch.rand(1, 4, 20, 20, generator=torch.Generator().manual_seed(5)) > 0.3
    return replace(DENSE, attn_mask=mask)


DENSE = make_call(width=32, rows=20, layout="dense", kv_heads=4, mask=None)
FLAG = make_call(width=32, rows=12, keys=20, layout="dense", kv_heads=4, mask="flag")
MASKED = make_call(width=32, rows=20, layout="dense", kv_heads=4, padding=2)
BATCH = make_call(batch=3, width=32, rows=12, layout="dense", kv_heads=4, mask=None)


@pytest.mark.parametrize(
    ("formula", "call", "id"),
    [
        pytest.param(rows_zero, DENSE, "rows_zero", id="zero"),
        pytest.param(lambda call: attention(replace(call, attn_mask=None)), MASKED, "mask_ignored", id="no mask"),
        pytest.param(lambda call: attention(replace(call, is_causal=False)), FLAG, "mask_ignored", id="no flag"),
        pytest.param(shifted_mask, MASKED, "mask_shifted", id="shifted mask"),
        pytest.param(previous_mask_row, MASKED, "mask_row", id="mask row before"),
        pytest.param(causal_bottom_right, FLAG, "causal_alignment", id="bottom right"),
        pytest.param(strict, FLAG, "causal_alignment", id="strict"),
        pytest.param(lambda call: attention(replace(call, scale=1.0)), DENSE, "scale_missing", id="scale missing"),
        pytest.param(lambda call: attention(replace(call, scale=1 / 32)), DENSE, "scale_squared", id="scale squared"),
        pytest.param(
            lambda call: attention(replace(call, key=call.key[:, :1].expand_as(call.key), value=call.value[:, :1])),
            DENSE,
            "head_0",
            id="key and value head 0",
        ),
        pytest.param(lambda call: attention(first_of_everything(call, "key", "value")), BATCH, "batch_0", id="batch"),
        pytest.param(
            lambda call: attention(first_of_everything(call, "query", "key", "value")),
            BATCH,
            "all_batch_0",
            id="everything of batch 0",
        ),
        pytest.param(mask_of_head_0, mask_per_head(), "mask_head", id="mask of head 0"),
        pytest.param(beyond, slice_of_a_cache(), "keys_beyond", id="keys beyond S"),
        pytest.param(not_normalised, DENSE, "not_normalised", id="not normalised"),
    ],
)
def test_a_backend_that_computes_something_else_is_named(
    formula: Callable[[AttentionCall], Tensor], call: AttentionCall, id: str
) -> None:
    assert found(asked(call, by(formula))) == id


def top_left(call: AttentionCall) -> Tensor:
    return attention(replace(call, is_causal=True, attn_mask=None))


def test_a_causal_bias_aligned_to_the_other_corner_is_named() -> None:
    answer = asked(replace(FLAG, is_causal=False, attn_mask=causal_lower_right(12, 20)), by(top_left))
    assert found(answer) == "causal_alignment"
    assert answer is not None
    assert answer.sentence == "every query row was computed with the causal mask aligned to the top left"


@pytest.mark.parametrize("dims", [3, 5])
def test_other_numbers_of_dimensions_are_explained_alike(dims: int) -> None:
    index = 0 if dims == 3 else None
    call = DENSE.with_tensors({name: tensor[index] for name, tensor in DENSE.tensors.items()})
    assert found(asked(call, by(lambda call: attention(replace(call, scale=1.0))))) == "scale_missing"


@pytest.mark.parametrize("name", ["key", "query", "value"])
def test_each_tensor_read_as_contiguous_is_named(name: str) -> None:
    call = make_call(width=32, rows=20, layout="dense", kv_heads=4, mask=None)
    call = call.with_tensors({name: transposed(tensor.contiguous()) for name, tensor in list(call.tensors.items())})

    def misread(call: AttentionCall) -> Tensor:
        in_order = call.tensors[name].transpose(1, 2).reshape(-1).view(call.tensors[name].shape)
        return attention(call.with_tensors({name: in_order}))

    assert found(asked(call, by(misread))) == f"{name}_strides"


def duplicated_key(call: AttentionCall) -> Tensor:
    return attention(call.with_tensors({"key": torch.cat([call.key[:, :, :1], call.key[:, :, :-1]], 2)}))


def rows_swapped(call: AttentionCall) -> Tensor:
    return attention(call).flip(2)


def first_key_dropped(call: AttentionCall) -> Tensor:
    return attention(replace(call, key=call.key[:, :, 1:], value=call.value[:, :, 1:]))


def half_value(call: AttentionCall) -> Tensor:
    output = attention(call)
    output[..., ::2] = 0
    return output


@pytest.mark.parametrize("formula", [duplicated_key, rows_swapped, first_key_dropped, half_value])
def test_other_faults_outside_the_list_get_no_sentence(formula: Callable[[AttentionCall], Tensor]) -> None:
    assert found(asked(DENSE, by(formula))) is None


def blind_last_row(call: AttentionCall) -> Tensor:
    """The last row is zero where mask row 0 shows nothing: mask row 0, or a shortcut for hidden rows?"""
    output = attention(call)
    assert call.attn_mask is not None
    if not call.attn_mask[..., 0, :].any():
        output[:, :, -1] = 0
    return output


def test_what_cannot_be_told_apart_is_said_so() -> None:
    answer = asked(MASKED, by(blind_last_row))
    assert answer is not None
    assert answer.id == "rows_zero"
    assert answer.tied == ("mask_row",)
    assert answer.sentence is not None
    assert answer.sentence.startswith("the last query row (19) is zero; here that cannot be told apart from: computed")


def test_a_failure_that_does_not_recur_on_other_values_confirms_nothing() -> None:
    output = attention(replace(DENSE, scale=1.0)).to(DENSE.query.dtype)
    answer = hypothesis(DENSE, output, by(attention))
    assert found(answer) is None
    assert answer is not None
    assert [miss.id for miss in answer.near] == ["scale_missing"]
    assert "did not recur" in answer.near[0].reason


def test_a_hypothesis_that_predicts_most_wrong_rows_is_near_and_not_the_answer() -> None:
    def mostly(call: AttentionCall) -> Tensor:
        output = attention(replace(call, scale=1.0))
        output[:, :, :6] *= 1.5
        return output

    answer = asked(DENSE, by(mostly))
    assert found(answer) is None
    assert answer is not None
    assert [(miss.id, miss.matched, miss.wrong_rows) for miss in answer.near] == [("scale_missing", 56, 80)]


def test_a_deadline_that_has_passed_gives_a_partial_answer() -> None:
    trial = by(lambda call: attention(replace(call, scale=1.0)))
    answer = hypothesis(DENSE, trial(DENSE).output, trial, deadline=time.monotonic())
    assert answer == Hypothesis(None, None, complete=False)


def test_ctrl_c_gives_a_partial_answer() -> None:
    def interrupted(call: AttentionCall) -> Result:
        raise KeyboardInterrupt

    output = attention(replace(DENSE, scale=1.0)).to(DENSE.query.dtype)
    answer = hypothesis(DENSE, output, interrupted)
    assert answer == Hypothesis(None, None, complete=False)


def test_an_offset_that_wraps_in_the_middle_of_a_mask_row_reads_on_from_the_start_of_the_mask() -> None:
    call = make_call(rows=20, keys=12, width=32, dtype=torch.float64)
    assert call.attn_mask is not None
    entries = call.attn_mask.flatten()
    wrapped = torch.stack([entries[[(row * 12 + key) % 128 for key in range(12)]] for row in range(20)])
    expected = attention(replace(call, attn_mask=wrapped))
    dense, padded = wrapped_offsets(call, bits=(7,))
    assert (dense.key, padded.key) == (("offset_wrapped", "bits", 7, 12), ("offset_wrapped", "bits", 7, 16))
    believed = dense.compute(0, 1, torch.arange(20))
    assert believed is not None
    torch.testing.assert_close(believed.output, expected[0, 1])
