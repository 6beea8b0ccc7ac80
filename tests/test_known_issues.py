"""Which upstream bug a call matches: one matching call for each, and near misses that differ in one condition.

The conditions are those of the upstream reports (numbers in the names); no kernel runs here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from sdpa_repro.attention import AttentionCall
from sdpa_repro.known_issues import KNOWN_ISSUES, Match, backend_name, matches, sentence, versions
from sdpa_repro.situation import Answer, affected, release
from tests.calls import make_call


def shell(
    query: tuple[int, ...], key: tuple[int, ...], *, value: tuple[int, ...] | None = None, **arguments: Any
) -> AttentionCall:
    """A call whose tensors have these shapes and take no memory."""
    dtype = arguments.pop("dtype", torch.bfloat16)

    def empty(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return AttentionCall(empty(query), empty(key), empty(value or key), **arguments)


def how(issue: str, call: AttentionCall, backend: str, device: str, version: str, **more: Any) -> str | None:
    """The kind of match of one issue, None when it does not match."""
    found = matches(call, backend, device, version, more.pop("grad", False), **more)
    return next((match.match for match in found if match.issue == issue), None)


def efficient(issue: str, call: AttentionCall, version: str = "2.13.0+cu128", **more: Any) -> str | None:
    return how(issue, call, "EFFICIENT_ATTENTION", "cuda", version, **more)


def gemma(rows: int = 289, **changes: Any) -> AttentionCall:
    """One global layer of Gemma 4: one KV head repeated with stride 0, left padding."""
    return make_call(heads=4, rows=rows, **{"width": 136, "padding": 7, **changes})


# pytorch#191937 and #192138


def test_the_gemma_layout_is_exactly_191937() -> None:
    assert efficient("pytorch#191937", gemma()) == "exact"


@pytest.mark.parametrize(
    "call",
    [
        gemma(288),
        gemma(290),
        gemma(1),
        gemma(layout="dense"),
        gemma(mask=None),
        gemma(mask="flag"),
        gemma(289, width=128),
        gemma(33, width=64),
        gemma(53),
    ],
    ids=["L=288", "L=290", "L=1", "dense", "no mask", "is_causal", "128 at 289", "64 at 33", "L%48==5"],
)
def test_a_call_that_lacks_one_condition_is_not_191937(call: AttentionCall) -> None:
    assert efficient("pytorch#191937", call, capability=(9, 0)) is None


@pytest.mark.parametrize(("rows", "width"), [(33, 136), (321, 256), (65, 128), (65, 64), (321, 128)])
def test_191937_follows_the_tile_of_the_head_dim(rows: int, width: int) -> None:
    assert efficient("pytorch#191937", gemma(rows, width=width), capability=(9, 0)) == "exact"


def test_191937_with_grad_on_does_not_match() -> None:
    assert efficient("pytorch#191937", gemma(), grad=True) is None


def test_191937_needs_mask_rows_that_differ() -> None:
    one_row = replace(gemma(), attn_mask=torch.ones(1, 1, 1, 289, dtype=torch.bool))
    assert efficient("pytorch#191937", one_row) is None
    assert efficient("pytorch#191937", replace(one_row, attn_mask=one_row.attn_mask.expand(1, 1, 289, 289))) is None  # type: ignore[union-attr]


def test_191937_does_not_take_a_causal_bias_for_a_mask() -> None:
    assert efficient("pytorch#191937", replace(gemma(), attn_mask=causal_lower_right(289, 289))) is None


def test_191937_between_64_and_128_depends_on_the_gpu() -> None:
    call = gemma(33, width=128)
    assert efficient("pytorch#191937", call, capability=(7, 5)) == "exact"
    assert efficient("pytorch#191937", call, capability=(8, 0)) is None
    assert efficient("pytorch#191937", call) == "possible"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.1.2", None),
        ("2.2.0+cu121", "exact"),
        ("2.12.0a0+git1a2b3c", "exact"),
        ("2.13.1", "exact"),
        ("2.14.0.dev20260601+cu130", "possible"),
        ("2.14.0rc1", "possible"),
        ("2.14.0", None),
        ("2.14.1+cu130", None),
        ("2.16.0.dev20261101", None),
    ],
)
def test_191937_matches_the_releases_that_have_it(version: str, expected: str | None) -> None:
    assert efficient("pytorch#191937", gemma(), version) == expected


@pytest.mark.parametrize(
    ("backend", "device", "version"),
    [
        ("FLASH_ATTENTION", "cuda", "2.13.0"),
        ("MATH", "cuda", "2.13.0"),
        ("eager", "cuda", "2.13.0"),
        ("EFFICIENT_ATTENTION", "cpu", "2.13.0+cpu"),
        ("EFFICIENT_ATTENTION", "cuda", "2.13.0+rocm7.0"),
    ],
)
def test_191937_on_another_backend_or_device_does_not_match(backend: str, device: str, version: str) -> None:
    assert how("pytorch#191937", gemma(), backend, device, version) is None


def test_an_unknown_kernel_makes_a_match_possible() -> None:
    assert how("pytorch#191937", gemma(), "default", "cuda", "2.13.0") == "possible"


def test_wrong_rows_and_status_that_the_bug_does_not_explain_rule_it_out() -> None:
    assert efficient("pytorch#191937", gemma(), wrong_rows=[288], status="diverges") == "exact"
    assert efficient("pytorch#191937", gemma(), wrong_rows=[3]) is None
    assert efficient("pytorch#191937", gemma(), wrong_rows=range(289)) is None
    assert efficient("pytorch#191937", gemma(), status="crashed") is None


def test_192138_needs_more_heads_than_a_block_has_rows() -> None:
    wide = make_call(heads=33, rows=33, width=136, mask=None)
    assert efficient("pytorch#192138", wide) == "exact"
    assert efficient("pytorch#192138", wide, status="crashed") == "exact"
    assert efficient("pytorch#192138", make_call(heads=32, rows=33, width=136, mask=None)) is None
    assert efficient("pytorch#192138", make_call(heads=33, rows=34, width=136, mask=None)) is None
    assert efficient("pytorch#192138", make_call(heads=33, rows=33, width=136, mask=None, layout="dense")) is None
    assert efficient("pytorch#192138", wide, grad=True) is None
    assert efficient("pytorch#192138", wide, "2.14.0") is None


def test_192138_lets_a_causal_tail_row_past_the_diagonal_when_there_are_more_keys() -> None:
    assert efficient("pytorch#192138", gemma(33, keys=40, mask="flag")) == "exact"
    assert efficient("pytorch#192138", gemma(1, keys=40, mask="flag")) == "exact"
    assert efficient("pytorch#192138", gemma(33, keys=33, mask="flag")) is None
    assert efficient("pytorch#192138", gemma(33, keys=40, mask=None)) is None
    assert efficient("pytorch#192138", gemma(34, keys=40, mask="flag")) is None
    assert efficient("pytorch#192138", gemma(33, keys=40, mask="flag"), wrong_rows=[5]) is None


# emulated


def test_a_fault_planted_on_a_cpu_is_named_as_emulated() -> None:
    found = matches(gemma(), "FLASH_ATTENTION", "cpu", "2.13.0+cpu", False, emulated=True, wrong_rows=[288])
    assert [match.issue for match in found] == ["pytorch#191937"]
    assert sentence(found[0], "FLASH_ATTENTION", "cpu") == (
        "pytorch#191937 (as emulated here on FLASH_ATTENTION, CPU), fixed in 2.14.0"
    )


def test_the_planted_fault_comes_first_when_the_wrong_rows_are_not_known() -> None:
    found = matches(gemma(), "FLASH_ATTENTION", "cpu", "2.13.0+cpu", False, emulated=True)
    assert (found[0].issue, found[0].match, found[0].fixed_in) == ("pytorch#191937", "emulated", "2.14.0")


def test_a_fault_planted_on_a_fixed_torch_is_still_named() -> None:
    assert how("pytorch#191937", gemma(), "FLASH_ATTENTION", "cpu", "2.14.1+cpu", emulated=True) == "emulated"


def test_an_emulation_with_other_constants_is_not_191937() -> None:
    call = gemma(53)  # 53 % 48 == 5
    assert how("pytorch#191937", call, "FLASH_ATTENTION", "cpu", "2.13.0", emulated=True, wrong_rows=[3]) is None
    same_length = gemma(289)
    assert how("pytorch#191937", same_length, "FLASH_ATTENTION", "cpu", "2.13.0", emulated=True, wrong_rows=[3]) is None


@pytest.mark.parametrize("change", [{"rows": 288}, {"layout": "dense"}, {"mask": None}, {"rows": 33, "width": 128}])
def test_an_emulation_must_hold_every_condition_on_the_call(change: dict[str, Any]) -> None:
    assert how("pytorch#191937", gemma(**change), "FLASH_ATTENTION", "cpu", "2.13.0", emulated=True) is None


def test_an_emulation_with_grad_on_is_not_191937() -> None:
    assert how("pytorch#191937", gemma(), "FLASH_ATTENTION", "cpu", "2.13.0", emulated=True, grad=True) is None


def test_nothing_older_than_the_oldest_torch_and_nothing_outside_sdpa_is_proposed_for_an_emulation() -> None:
    masked = gemma(mask="float")
    found = {match.issue for match in matches(masked, "FLASH_ATTENTION", "cpu", "2.13.0", False, emulated=True)}
    assert not found & {"pytorch#103963", "pytorch#112577", "pytorch#124877", "pytorch#118628"}


def test_an_emulation_is_never_taken_for_a_bug_that_is_told_by_the_gpu() -> None:
    grouped = make_call(heads=8, kv_heads=2, layout="gqa", mask=None)
    assert how("pytorch#193893", grouped, "FLASH_ATTENTION", "cpu", "2.13.0", emulated=True) is None


def test_eager_is_not_a_kernel_that_a_bug_was_planted_in() -> None:
    assert matches(gemma(), "eager", "cpu", "2.13.0", False, emulated=True) == []


# other bugs of the memory-efficient CUDA kernel


def huge(rows: int, keys: int, **mask: Any) -> AttentionCall:
    shape = mask.get("shape", (1, 1, rows, keys))
    return shell((1, 1, rows, 64), (1, 1, keys, 64), attn_mask=torch.empty(shape, dtype=torch.bool, device="meta"))


def test_187227_needs_a_mask_of_more_than_32_bits() -> None:
    assert efficient("pytorch#187227", huge(65537, 65536), "2.12.0") == "exact"
    assert efficient("pytorch#187227", huge(65536, 65536), "2.12.0") is None
    assert efficient("pytorch#187227", huge(65537, 65536, shape=(1, 1, 1, 65536)), "2.12.0") is None
    assert efficient("pytorch#187227", shell((1, 1, 65537, 64), (1, 1, 65536, 64)), "2.12.0") is None
    assert efficient("pytorch#187227", huge(65537, 65536), "2.13.0") is None


def test_187227_spoils_rows_from_the_wrap_on() -> None:
    call = huge(73728, 73728)
    assert efficient("pytorch#187227", call, "2.12.0", wrong_rows=range(58254, 73728)) == "exact"
    assert efficient("pytorch#187227", call, "2.12.0", wrong_rows=[17]) is None


def test_a_development_build_near_the_fix_is_only_possibly_affected() -> None:
    assert efficient("pytorch#187227", huge(65537, 65536), "2.14.0.dev20260612+cu130") == "possible"


def test_112577_is_exact_for_one_kv_head_and_a_lone_row_and_possible_for_other_expanded_inputs() -> None:
    assert efficient("pytorch#112577", gemma(1, keys=16), "2.1.0") == "exact"
    assert efficient("pytorch#112577", gemma(40), "2.1.0") == "possible"
    assert efficient("pytorch#112577", gemma(1, keys=16, layout="dense"), "2.1.0") is None
    assert efficient("pytorch#112577", gemma(1, keys=16, mask=None), "2.1.0") is None
    assert efficient("pytorch#112577", gemma(1, keys=16), "2.2.0") is None
    assert efficient("pytorch#112577", gemma(1, keys=16), "2.0.1") is None


def test_108503_needs_bfloat16_and_a_bool_mask() -> None:
    call = make_call(rows=600, width=8, heads=1)
    assert efficient("pytorch#108503", call, "2.0.1") == "exact"
    assert efficient("pytorch#108503", make_call(rows=601, width=8, heads=1), "2.0.1") == "possible"
    assert efficient("pytorch#108503", make_call(rows=600, width=8, heads=1, dtype=torch.float16), "2.0.1") is None
    assert efficient("pytorch#108503", make_call(rows=600, width=8, heads=1, mask="float"), "2.0.1") is None
    assert efficient("pytorch#108503", call, "2.1.0") is None


def test_124877_needs_a_mask_and_unequal_lengths_and_shows_as_nan() -> None:
    call = make_call(rows=8, keys=16, width=128, layout="dense")
    assert efficient("pytorch#124877", call, "2.4.1", status="nonfinite") == "exact"
    assert efficient("pytorch#124877", call, "2.4.1", status="diverges") is None
    assert efficient("pytorch#124877", make_call(rows=16, keys=16, width=128, layout="dense"), "2.4.1") is None
    assert efficient("pytorch#124877", make_call(rows=8, keys=16, mask=None, layout="dense"), "2.4.1") is None
    assert efficient("pytorch#124877", call, "2.5.0") is None


# cuDNN


def cudnn(issue: str, call: AttentionCall, version: str = "2.13.0", **more: Any) -> str | None:
    return how(issue, call, "CUDNN_ATTENTION", "cuda", version, **{"capability": (9, 0), **more})


def test_196678_is_possible_at_most_and_never_explains_a_wrong_output() -> None:
    call = make_call(rows=704, width=64, layout="dense", heads=1)
    assert cudnn("pytorch#196678", call, grad=True) == "possible"
    assert cudnn("pytorch#196678", call, grad=True, status="nonfinite") is None
    assert cudnn("pytorch#196678", call, grad=False) is None
    assert cudnn("pytorch#196678", call, grad=True, capability=(10, 0)) is None
    assert cudnn("pytorch#196678", call, "2.10.0", grad=True) is None
    assert cudnn("pytorch#196678", make_call(rows=768, width=64, layout="dense", heads=1), grad=True) is None
    assert cudnn("pytorch#196678", make_call(rows=704, width=64, heads=1, mask=None), grad=True) is None


def wide_mask(mask: torch.dtype = torch.float32, dtype: torch.dtype = torch.float16) -> AttentionCall:
    call = make_call(rows=32, width=64, dtype=dtype, layout="dense")
    return replace(call, attn_mask=torch.zeros(1, 1, 32, 32, dtype=mask))


def test_191612_needs_a_float32_mask_beside_a_16_bit_query() -> None:
    assert cudnn("pytorch#191612", wide_mask()) == "exact"
    assert cudnn("pytorch#191612", wide_mask(), capability=(10, 0)) == "exact"
    assert cudnn("pytorch#191612", wide_mask(), capability=None) == "possible"
    assert cudnn("pytorch#191612", wide_mask(torch.float16)) is None
    assert cudnn("pytorch#191612", wide_mask(torch.bool)) is None
    assert cudnn("pytorch#191612", wide_mask(dtype=torch.float32)) is None
    assert cudnn("pytorch#191612", wide_mask(), "2.14.0") is None
    assert efficient("pytorch#191612", wide_mask()) is None


def test_193893_needs_fewer_than_8_kv_heads_on_a_b200() -> None:
    grouped = make_call(heads=28, kv_heads=4, layout="gqa", mask=None)
    assert cudnn("pytorch#193893", grouped, capability=(10, 0)) == "exact"
    assert cudnn("pytorch#193893", grouped, capability=None) == "possible"
    assert cudnn("pytorch#193893", grouped, capability=(12, 0)) is None
    eight = make_call(heads=32, kv_heads=8, layout="gqa", mask=None)
    assert cudnn("pytorch#193893", eight, capability=(10, 0)) is None
    assert cudnn("pytorch#193893", grouped, "2.10.0", capability=(10, 0)) is None


def test_193893_sees_repeated_heads_that_were_copied() -> None:
    copied = make_call(heads=28, kv_heads=4, layout="dense", mask=None)
    assert cudnn("pytorch#193893", copied, capability=(10, 0)) == "possible"
    separate = make_call(heads=8, kv_heads=8, layout="dense", mask=None)
    assert cudnn("pytorch#193893", separate, capability=(10, 0)) is None


# CPU


def flash(issue: str, call: AttentionCall, version: str = "2.13.0+cpu", **more: Any) -> str | None:
    return how(issue, call, "FLASH_ATTENTION", "cpu", version, **more)


def test_193728_needs_key_and_value_of_different_length() -> None:
    assert flash("pytorch#193728", shell((1, 1, 3, 8), (1, 1, 5, 8), value=(1, 1, 6, 8))) == "exact"
    assert flash("pytorch#193728", shell((1, 1, 3, 8), (1, 1, 5, 8), value=(1, 1, 4, 8))) == "exact"
    assert flash("pytorch#193728", shell((1, 1, 3, 8), (1, 1, 5, 8))) is None
    longer = shell((1, 1, 3, 8), (1, 1, 5, 8), value=(1, 1, 6, 8))
    assert flash("pytorch#193728", longer, "2.0.1") is None
    assert flash("pytorch#193728", longer, "2.14.1") == "exact"
    assert flash("pytorch#193728", longer, "2.16.0") == "possible"
    assert how("pytorch#193728", longer, "MATH", "cpu", "2.13.0") is None


def test_187801_needs_a_mask_and_the_flag() -> None:
    both = replace(make_call(rows=4, width=8), is_causal=True)
    assert flash("pytorch#187801", both) == "exact"
    assert flash("pytorch#187801", replace(both, is_causal=False)) is None
    assert flash("pytorch#187801", replace(both, attn_mask=None)) is None
    assert flash("pytorch#187801", both, "2.14.0") is None


def test_187506_needs_an_inner_stride_other_than_one() -> None:
    call = make_call(rows=4, width=8, layout="dense")
    strided = replace(call, key=call.key.mT.contiguous().mT)
    assert flash("pytorch#187506", strided) == "exact"
    assert flash("pytorch#187506", call) is None
    assert flash("pytorch#187506", strided, "2.14.0") is None


def test_141219_needs_a_query_of_length_zero_and_is_a_crash() -> None:
    assert flash("pytorch#141219", shell((1, 2, 0, 8), (1, 2, 4, 8)), status="crashed") == "exact"
    assert flash("pytorch#141219", shell((1, 2, 0, 8), (1, 2, 4, 8)), status="diverges") is None
    assert flash("pytorch#141219", shell((1, 2, 1, 8), (1, 2, 4, 8))) is None


def test_141218_needs_gqa_without_kv_heads() -> None:
    empty = shell((1, 2, 3, 8), (1, 0, 4, 8), enable_gqa=True)
    assert how("pytorch#141218", empty, "MATH", "cpu", "2.9.1") == "exact"
    assert how("pytorch#141218", replace(empty, enable_gqa=False), "MATH", "cpu", "2.9.1") is None
    assert how("pytorch#141218", shell((1, 2, 3, 8), (1, 1, 4, 8), enable_gqa=True), "MATH", "cpu", "2.9.1") is None
    assert how("pytorch#141218", empty, "MATH", "cpu", "2.10.0") is None
    assert how("pytorch#141218", empty, "MATH", "cpu", "2.4.0") is None


def band(length: int, width: int, dtype: torch.dtype = torch.bool) -> AttentionCall:
    """A sliding window: each row sees the last `width` keys."""
    visible = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - width)
    mask = visible if dtype == torch.bool else torch.zeros(length, length).masked_fill(~visible, float("-inf"))
    return AttentionCall(*(torch.zeros(1, 1, length, 4),) * 3, attn_mask=mask)


def test_127055_needs_a_row_that_sees_none_of_the_first_512_keys() -> None:
    assert flash("pytorch#127055", band(600, 10), "2.3.1", status="nonfinite") == "exact"
    assert flash("pytorch#127055", band(600, 10, torch.float32), "2.3.1") == "exact"
    assert flash("pytorch#127055", band(600, 600), "2.3.1") is None
    assert flash("pytorch#127055", band(512, 10), "2.3.1") is None
    assert flash("pytorch#127055", band(600, 10), "2.4.0") is None


def test_103963_needs_a_fully_masked_row() -> None:
    padded, whole = make_call(rows=9, width=8, padding=2), make_call(rows=9, width=8)
    for backend, device in (("MATH", "cpu"), ("EFFICIENT_ATTENTION", "cuda")):
        assert how("pytorch#103963", padded, backend, device, "2.4.1") == "exact"
        assert how("pytorch#103963", whole, backend, device, "2.4.1") is None
        assert how("pytorch#103963", padded, backend, device, "2.5.0") is None
    assert how("pytorch#103963", make_call(rows=9, width=8, padding=2, mask="float"), "MATH", "cpu", "2.4.1") == "exact"


def test_a_mask_too_large_to_look_through_leaves_the_answer_open() -> None:
    assert how("pytorch#103963", huge(8192, 8192), "MATH", "cpu", "2.4.1") == "possible"


def test_118628_belongs_to_the_fast_path_and_reads_float_masks_as_bool() -> None:
    call = make_call(rows=5, width=8, layout="dense")

    def fast_path(mask: Tensor | None, backend: str = "nn.TransformerEncoderLayer") -> str | None:
        return how("pytorch#118628", replace(call, attn_mask=mask), backend, "cpu", "2.13.0", status="nonfinite")

    visible = torch.ones(5, 5, dtype=torch.bool)
    additive = torch.full((5, 5), -0.5)
    assert fast_path(additive) == "exact"
    assert fast_path(visible.tril(-1)) == "exact"
    assert fast_path(visible) is None
    assert fast_path(torch.zeros(5, 5).masked_fill(~visible.tril(), float("-inf"))) is None
    assert fast_path(None) is None
    assert fast_path(additive, "FLASH_ATTENTION") is None


def test_195320_belongs_to_inductor_and_a_permuted_key() -> None:
    call = make_call(rows=4, width=8, layout="dense")
    permuted = replace(call, key=call.key.mT.contiguous().mT)
    assert how("pytorch#195320", permuted, "inductor", "cpu", "2.14.0") == "exact"
    assert how("pytorch#195320", call, "inductor", "cpu", "2.14.0") is None
    assert how("pytorch#195320", permuted, "FLASH_ATTENTION", "cpu", "2.14.0") is None


# MPS and ROCm


def mps(issue: str, call: AttentionCall, version: str) -> str | None:
    return how(issue, call, "MATH", "mps", version)


def vector(**changes: Any) -> AttentionCall:
    """A call for the MPS vector kernel: query and key transposed views, few rows."""
    return make_call(**{"rows": 3, "keys": 32, "width": 64, "layout": "dense", "mask": None, **changes})


def dense(call: AttentionCall) -> AttentionCall:
    return call.with_tensors({name: tensor.contiguous() for name, tensor in call.tensors.items()})


def test_163597_needs_a_transposed_query_of_at_most_8_rows() -> None:
    assert mps("pytorch#163597", vector(), "2.8.0") == "exact"
    assert mps("pytorch#163597", vector(rows=8), "2.8.0") == "exact"
    assert mps("pytorch#163597", vector(rows=9), "2.8.0") is None
    assert mps("pytorch#163597", vector(keys=2), "2.8.0") is None
    assert mps("pytorch#163597", vector(width=80), "2.8.0") is None
    assert mps("pytorch#163597", vector(mask="flag"), "2.8.0") is None
    assert mps("pytorch#163597", dense(vector()), "2.8.0") is None
    assert mps("pytorch#163597", vector(), "2.9.0") is None
    assert mps("pytorch#163597", vector(), "2.7.1") is None


def test_181133_needs_more_than_one_batch_row() -> None:
    assert mps("pytorch#181133", vector(batch=2), "2.11.0") == "exact"
    assert mps("pytorch#181133", vector(batch=1), "2.11.0") is None
    assert mps("pytorch#181133", dense(vector(batch=2)), "2.11.0") is None
    assert mps("pytorch#181133", vector(batch=2, rows=9), "2.11.0") is None
    assert mps("pytorch#181133", vector(batch=2), "2.12.0") is None


def test_169222_needs_a_number_of_keys_that_is_no_multiple_of_32() -> None:
    assert mps("pytorch#169222", dense(vector(keys=38)), "2.9.1") == "exact"
    assert mps("pytorch#169222", dense(vector(keys=64)), "2.9.1") is None
    assert mps("pytorch#169222", dense(vector(keys=38, rows=9)), "2.9.1") is None
    assert mps("pytorch#169222", dense(vector(keys=38)), "2.10.0") is None


def test_rocm_3230_needs_a_non_contiguous_value_on_rocm() -> None:
    strided = make_call(rows=62, width=128, mask=None)
    assert how("ROCm/pytorch#3230", strided, "FLASH_ATTENTION", "cuda", "2.9.0+rocm7.0") == "exact"
    assert how("ROCm/pytorch#3230", dense(strided), "FLASH_ATTENTION", "cuda", "2.9.0+rocm7.0") is None
    assert how("ROCm/pytorch#3230", strided, "FLASH_ATTENTION", "cuda", "2.9.0+cu128") is None
    assert how("ROCm/pytorch#3230", strided, "MATH", "cuda", "2.9.0+rocm7.0") is None


# the table and the versions


def test_every_entry_can_be_printed_and_is_listed_once() -> None:
    assert len({known.issue for known in KNOWN_ISSUES}) == len(KNOWN_ISSUES)
    for known in KNOWN_ISSUES:
        assert "\n" not in known.title + known.effect + known.workaround
        assert versions(known)
        assert known.fixed_in is None or affected(known.fixed_in, known.first, known.last, known.fixed_in) is Answer.NO
        for release_name in filter(None, (known.first, known.last)):
            assert affected(release_name, known.first, known.last, known.fixed_in) is Answer.YES, known.issue


def test_a_healthy_everyday_call_on_the_newest_torch_matches_nothing() -> None:
    call = make_call(rows=40, width=64, layout="dense")
    for backend, device in (("FLASH_ATTENTION", "cpu"), ("EFFICIENT_ATTENTION", "cuda"), ("CUDNN_ATTENTION", "cuda")):
        assert [m for m in matches(call, backend, device, "2.14.1", False) if m.match == "exact"] == []


def test_a_call_of_a_shape_no_kernel_takes_matches_nothing_and_raises_nothing() -> None:
    flat = AttentionCall(*(torch.zeros(3, 4),) * 3, attn_mask=torch.zeros(3))
    for emulated in (False, True):
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            matches(flat, backend, "cuda", "2.13.0", False, emulated=emulated)


@pytest.mark.parametrize(
    ("text", "number", "early"),
    [
        ("2.13.0+cpu", (2, 13, 0), False),
        ("2.14.0.dev20260612+cu130", (2, 14, 0), True),
        ("2.12.0a0+git1a2b3c", (2, 12, 0), True),
        ("2.9.0a0+50eac811a6.nv25.09", (2, 9, 0), True),
        ("2.14.0rc2", (2, 14, 0), True),
        ("2.13", (2, 13, 0), False),
        ("2.9.1.post1+rocm6.4", (2, 9, 1), False),
    ],
)
def test_versions_are_read_as_torch_writes_them(text: str, number: tuple[int, int, int], early: bool) -> None:
    assert release(text) == (number, early)


def test_a_version_that_cannot_be_read_leaves_the_answer_open() -> None:
    assert affected("unknown", "2.2", "2.13", "2.14.0") is Answer.MAYBE


def test_backends_are_named_alike_however_they_are_given() -> None:
    assert backend_name(SDPBackend.EFFICIENT_ATTENTION) == "EFFICIENT_ATTENTION"
    assert backend_name("EFFICIENT_ATTENTION") == "EFFICIENT_ATTENTION"
    assert backend_name("nn.TransformerEncoderLayer") == "nn.TransformerEncoderLayer"


def test_a_sentence_says_when_no_fix_is_known() -> None:
    match = Match("pytorch#193728", "exact", "", None, "")
    assert sentence(match, "FLASH_ATTENTION", "cpu") == "pytorch#193728, no release with a fix known"
