"""Every path against attention written out in float64, and PyTorch's own reasons where one cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.environment import capture_context
from sdpa_repro.mask import describe
from sdpa_repro.replaying import eager as eager_module
from sdpa_repro.replaying.backends import (
    Backend,
    Declined,
    NoMemory,
    chosen,
    needed_bytes,
    reason_in,
    run,
    run_in_blocks,
)
from sdpa_repro.replaying.eager import eager, is_emulated
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.variants import explicit_mask, rows_of
from tests.calls import make_call
from tests.definition import attention

RUN_ON_CPU = (Backend.DEFAULT, Backend.EAGER, Backend.MATH, Backend.FLASH_ATTENTION)


def definition(call: AttentionCall) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v in float64; fully masked rows are 0."""
    groups = call.query.shape[-3] // call.key.shape[-3]
    key, value = (tensor.double().repeat_interleave(groups, -3) for tensor in (call.key, call.value))
    scores = call.query.double() @ key.transpose(-1, -2) * call.softmax_scale
    mask = call.attn_mask
    if call.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


@pytest.mark.parametrize("backend", RUN_ON_CPU)
@pytest.mark.parametrize("mask", [None, "causal", "float", "flag"])
@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
def test_every_path_computes_attention(backend: Backend, mask: str | None, layout: str) -> None:
    call = make_call(rows=17, width=16, kv_heads=2, dtype=torch.float32, mask=mask, layout=layout)
    torch.testing.assert_close(run(call, backend).double(), definition(call), atol=2e-6, rtol=1e-5)


def test_eager_gives_the_mean_of_value_in_fully_masked_rows() -> None:
    call = make_call(rows=9, width=16, padding=3, dtype=torch.float32)
    found = run(call, Backend.EAGER)[:, :, 0]
    torch.testing.assert_close(found, call.value.mean(-2), atol=1e-6, rtol=1e-5)


def test_eager_overflows_in_float16_as_transformers_does() -> None:
    full = torch.full((1, 1, 4, 64), 200.0, dtype=torch.float16)
    call = AttentionCall(full, full, full, scale=1.0)
    assert run(call, Backend.EAGER).isnan().all()
    assert run(call, Backend.MATH).isfinite().all()


def test_emulated_eager_differs_from_eager_by_roundings_only() -> None:
    call = make_call(rows=33, width=64, dtype=torch.bfloat16)
    gap = (eager(call).double() - eager(call, emulated=True).double()).abs().max()
    assert gap <= 2 * torch.finfo(torch.bfloat16).eps * definition(call).abs().max()


def test_only_large_calls_in_a_slow_dtype_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_module, "_slow_products", lambda dtype: dtype == torch.float16)
    large = torch.empty(1, 8, 4096, 64, dtype=torch.float16)
    small = large[:, :, :16]
    assert is_emulated(AttentionCall(large, large, large))
    assert not is_emulated(AttentionCall(small, small, small))
    assert not is_emulated(AttentionCall(large.float(), large.float(), large.float()))


@pytest.mark.parametrize("name", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE"])
def test_a_kernel_that_a_cpu_lacks_says_so_in_one_phrase(name: str) -> None:
    with pytest.raises(Declined) as refusal:
        run(make_call(), Backend(name))
    assert str(refusal.value) == "does not exist on cpu"


def test_a_decline_is_in_pytorchs_words_every_time() -> None:
    call = make_call(value_width=72)
    for _ in range(2):
        with pytest.raises(Declined) as refusal:
            run(call, Backend.FLASH_ATTENTION)
        assert str(refusal.value).startswith("Flash attention requires q,k,v to have the same last dimension.")
        assert "Triggered internally" not in str(refusal.value)


def test_the_reasons_of_other_kernels_are_left_out() -> None:
    said = [
        "Memory efficient kernel not used because: (Triggered internally at a.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at a.cpp:2.)",
        "Flash attention kernel not used because: (Triggered internally at a.cpp:3.)",
        "Flash attention only supports gpu architectures in the range [sm80, sm121].",
        "CuDNN attention kernel not used because: (Triggered internally at a.cpp:4.)",
        "cuDNN SDPA does not support float32.",
    ]
    assert reason_in(said, Backend.CUDNN_ATTENTION) == "cuDNN SDPA does not support float32."
    assert reason_in(said, Backend.FLASH_ATTENTION).startswith("Flash attention only supports")


def test_an_exception_of_the_kernel_is_not_a_decline() -> None:
    query = torch.zeros(1, 1, 8, 16)
    call = AttentionCall(query, query, query, attn_mask=torch.ones(8, dtype=torch.bool))
    with pytest.raises(IndexError):
        run(call, Backend.FLASH_ATTENTION)


def test_running_out_of_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", full)
    with pytest.raises(NoMemory, match="out of memory"):
        run(make_call(), Backend.MATH)


def test_the_default_kernel_has_a_name() -> None:
    assert chosen(make_call()) == "FLASH_ATTENTION"
    assert chosen(make_call(value_width=72)) == "MATH"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert chosen(make_call(value_width=72)) == "unknown"


@pytest.mark.parametrize("backend", [Backend.MATH, Backend.EAGER])
@pytest.mark.parametrize("mask", [None, "causal", "float", "flag"])
def test_blocks_of_rows_give_the_whole_output(
    backend: Backend, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdpa_repro.replaying.backends.BLOCK_BYTES", 10_000)
    call = make_call(rows=65, keys=70, width=16, dtype=torch.float32, mask=mask)
    torch.testing.assert_close(run_in_blocks(call, backend), run(call, backend), atol=2e-6, rtol=1e-5)


def test_blocks_of_some_rows_leave_the_others_undefined() -> None:
    call = make_call(rows=65, keys=70, width=16, dtype=torch.float32)
    some, whole = run_in_blocks(call, Backend.MATH, wanted=[(3, 5), (60, 65)]), run(call, Backend.MATH)
    rows = [3, 4, *range(60, 65)]
    torch.testing.assert_close(some[..., rows, :], whole[..., rows, :], atol=2e-6, rtol=1e-5)
    assert some[..., 5:60, :].isnan().all()


def test_blocks_stop_at_the_deadline() -> None:
    with pytest.raises(Declined, match="out of time"):
        run_in_blocks(make_call(), Backend.MATH, deadline=0.0)


def test_a_block_of_a_causal_call_leaves_out_later_keys() -> None:
    part = rows_of(make_call(rows=16, mask="flag"), 4, 8)
    assert part.key.shape[-2] == 8
    assert part.attn_mask is not None
    assert part.attn_mask[0].tolist() == [True] * 5 + [False] * 3


def test_a_causal_bias_is_written_out_from_the_lower_right() -> None:
    call = replace(make_call(rows=2, keys=4, mask=None), attn_mask=causal_lower_right(2, 4))
    mask = explicit_mask(call)
    assert mask is not None
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_needed_memory_grows_with_scores_for_math_and_eager_only() -> None:
    call = make_call(rows=1024, width=64, heads=4)
    scores = 4 * 1024 * 1024
    assert 8 * scores <= needed_bytes(call, Backend.MATH) <= 12 * scores
    assert 8 * scores <= needed_bytes(call, Backend.EAGER) <= 14 * scores
    assert needed_bytes(call, Backend.FLASH_ATTENTION) < scores
    assert needed_bytes(call, Backend.DEFAULT) < scores


def test_a_grouped_call_without_key_heads_is_not_asked_about() -> None:
    query, key = torch.zeros(1, 6, 8, 16), torch.zeros(1, 0, 8, 16)
    assert chosen(AttentionCall(query, key, key, enable_gqa=True)) == "unknown"  # asking would end this process


def test_a_causal_bias_is_not_asked_for_anything_but_its_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_attention(
        kind: Any, function: Any, types: Any, arguments: Any = (), words: dict[str, Any] | None = None
    ) -> Any:
        """As in torch 2.5, where the mask does not even tell its dtype."""
        if function is not F.scaled_dot_product_attention:
            raise NotImplementedError("CausalBias only supports scaled_dot_product_attention")
        return kind._dispatch(*arguments, **(words or {}))

    call = make_call(rows=5, keys=9, mask=None, layout="dense", dtype=torch.float32)
    expected = attention(replace(call, attn_mask=torch.ones(5, 9, dtype=torch.bool).tril(4)))
    call = replace(call, attn_mask=causal_lower_right(5, 9))
    monkeypatch.setattr(CausalBias, "__torch_function__", classmethod(only_attention))
    save(snapshot(call, context=capture_context(call)), tmp_path / "call.pt")
    read = prepared(load(tmp_path / "call.pt"), None)
    assert describe(read).source == "CausalBias"
    for backend in (Backend.DEFAULT, Backend.EAGER, Backend.MATH, Backend.FLASH_ATTENTION):
        assert needed_bytes(read, backend) > 0
        assert torch.allclose(run(read, backend).double(), expected, atol=1e-5)
