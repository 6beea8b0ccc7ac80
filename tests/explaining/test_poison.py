"""Reads outside the inputs and unwritten output are found where they are planted, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import save, snapshot
from sdpa_repro.explaining.placing import Filling, placed
from sdpa_repro.explaining.poison import LEAST_GUARD, MOST_GUARD, _guards, poison, poison_isolated
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import Result, Trial, in_process
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.definition import attention

FAULTS = Path(__file__).resolve().parents[1] / "faults"
Kernel = Callable[[AttentionCall], Tensor]


@pytest.fixture(autouse=True)
def one_thread(torch_as_it_was: None) -> None:
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    torch.set_num_threads(1)


def trial_of(kernel: Kernel) -> Trial:
    return lambda call: Result(Status.AGREES, output=kernel(call).to(call.query.dtype))


def small(**words: object) -> AttentionCall:
    return make_call(**{"rows": 20, "width": 16, "heads": 2, "layout": "dense", **words})  # type: ignore[arg-type]


def cache_slice(tensor: Tensor, room: int = 64) -> Tensor:
    """The tensor as the first positions of a longer, uninitialised cache."""
    batch, heads, keys, width = tensor.shape
    cache = torch.full((batch, heads, room, width), torch.nan, dtype=tensor.dtype)
    cache[:, :, :keys] = tensor
    return cache[:, :, :keys]


def rounded_up(call: AttentionCall, tensor: Tensor) -> Tensor:
    """A view of 16, 32, ... positions over the same memory, as a kernel that loads whole tiles reads it."""
    keys = -(-tensor.shape[2] // 16) * 16
    return tensor.as_strided((*tensor.shape[:2], keys, tensor.shape[3]), tensor.stride(), tensor.storage_offset())


def reads_past_the_last_key(call: AttentionCall) -> Tensor:
    key, value = rounded_up(call, call.key), rounded_up(call, call.value)
    mask = torch.ones(call.query.shape[2], key.shape[2], dtype=torch.bool)
    if call.attn_mask is not None:
        mask[:, : call.attn_mask.shape[-1]] = call.attn_mask[0, 0]
    return attention(replace(call, key=key, value=value, attn_mask=mask))


def takes_value_for_contiguous(call: AttentionCall) -> Tensor:
    dense = torch.empty(call.value.shape, device="meta").stride()
    return attention(replace(call, value=call.value.as_strided(call.value.shape, dense, call.value.storage_offset())))


def reads_mask_rows_past_the_last(call: AttentionCall) -> Tensor:
    assert call.attn_mask is not None
    mask = call.attn_mask.as_strided(call.attn_mask.shape, call.attn_mask.stride(), call.attn_mask.storage_offset() + 1)
    return attention(replace(call, attn_mask=mask))


def leaves_the_last_row(call: AttentionCall) -> Tensor:
    output = torch.empty(*call.query.shape[:-1], call.value.shape[-1], dtype=call.query.dtype)
    output[:, :, :-1] = attention(call)[:, :, :-1].to(call.query.dtype)
    return output


def test_a_read_past_the_last_key_is_found_with_its_tensors() -> None:
    found = poison(small(), trial_of(reads_past_the_last_key))
    assert found.reads_outside is True
    assert "value" in found.tensors
    assert "attn_mask" not in found.tensors
    assert "query" not in found.tensors
    assert "outside key and value" in found.words or "outside value" in found.words


def test_a_read_into_the_gaps_of_a_cache_is_found() -> None:
    call = small()
    call = replace(call, key=cache_slice(call.key), value=cache_slice(call.value))
    assert poison(call, trial_of(reads_past_the_last_key)).reads_outside is True


def test_ignored_strides_are_found_when_they_lead_outside() -> None:
    call = small(layout="expanded", kv_heads=1)
    found = poison(call, trial_of(takes_value_for_contiguous))
    assert found.reads_outside is True
    assert found.tensors == ("value",)


def test_a_read_past_a_bool_mask_is_found() -> None:
    found = poison(small(mask="causal"), trial_of(reads_mask_rows_past_the_last))
    assert found.reads_outside is True
    assert found.tensors == ("attn_mask",)


@pytest.mark.parametrize("layout", ["dense", "expanded", "gqa"])
@pytest.mark.parametrize("mask", [None, "causal", "float", "flag"])
def test_the_real_kernel_reads_nothing_outside(layout: str, mask: str | None) -> None:
    call = small(layout=layout, mask=mask)
    found = poison(call, in_process(Backend.FLASH_ATTENTION))
    assert found.reads_outside is False
    assert found.tensors == ()
    assert found.unwritten is not True
    assert found.words == "nothing outside the inputs moves the output"


def test_slices_of_a_cache_full_of_nan_are_no_finding() -> None:
    call = small(padding=9)
    call = replace(call, key=cache_slice(call.key), value=cache_slice(call.value))
    assert poison(call, in_process(Backend.FLASH_ATTENTION)).reads_outside is False


def test_value_as_a_view_of_key_is_no_finding() -> None:
    call = small()
    assert poison(replace(call, value=call.key[..., :8]), trial_of(attention)).reads_outside is False


def test_runs_that_differ_by_noise_are_no_finding() -> None:
    random = torch.Generator().manual_seed(0)

    def jitter(call: AttentionCall) -> Tensor:
        right = attention(call)
        return right + 1e-3 * torch.rand(right.shape, generator=random, dtype=right.dtype)

    assert poison(small(dtype=torch.float32), trial_of(jitter)).reads_outside is False


def test_noise_does_not_hide_a_read_outside() -> None:
    random = torch.Generator().manual_seed(0)

    def both(call: AttentionCall) -> Tensor:
        wrong = reads_past_the_last_key(call)
        return wrong + 1e-3 * torch.rand(wrong.shape, generator=random, dtype=wrong.dtype)

    assert poison(small(dtype=torch.float32), trial_of(both)).reads_outside is True


def test_what_happens_in_fully_masked_rows_is_no_finding() -> None:
    def changed_there(call: AttentionCall) -> Tensor:
        output = attention(call)
        output[:, :, :3] = reads_past_the_last_key(call)[:, :, :3]
        return output

    assert poison(small(padding=3), trial_of(changed_there)).reads_outside is False


@pytest.mark.parametrize("rows", [20, 200])
def test_an_unwritten_row_is_shown(rows: int) -> None:
    found = poison(small(rows=rows), trial_of(leaves_the_last_row))
    assert found.unwritten is True
    assert found.words.endswith(f"it leaves output unwritten: query row {rows - 1}")


def test_nan_that_the_kernel_wrote_is_not_called_unwritten() -> None:
    def writes_nan(call: AttentionCall) -> Tensor:
        return torch.full((*call.query.shape[:-1], call.value.shape[-1]), torch.nan)

    assert poison(small(), trial_of(writes_nan)).unwritten is not True


def test_a_backend_without_output_is_not_tested() -> None:
    found = poison(small(), lambda call: Result(Status.DECLINED, reason="no"))
    assert found.reads_outside is None
    assert "not tested" in found.words


def test_a_deadline_that_has_passed_leaves_the_question_open() -> None:
    assert poison(small(), trial_of(attention), deadline=0.0).reads_outside is None


def test_the_document_is_plain() -> None:
    document = poison(small(), trial_of(attention)).document()
    assert document["reads_outside"] is False
    assert document["tensors"] == []


@pytest.mark.parametrize("align", [None, 0, 16])
def test_placed_keeps_values_strides_and_overlap(align: int | None) -> None:
    call = small()
    call = replace(call, value=call.key[..., :8])
    moved = placed(call, guard=256, filling=Filling(0xFF, 0x01), align=align)
    for name, tensor in call.tensors.items():
        assert torch.equal(moved.tensors[name], tensor)
        assert moved.tensors[name].stride() == tensor.stride()
        assert moved.tensors[name].data_ptr() % 256 == (tensor.data_ptr() % 256 if align is None else align)
    assert moved.value.data_ptr() == moved.key.data_ptr()
    before = moved.key.as_strided((8,), (1,), moved.key.storage_offset() - 8)
    assert before.isnan().all()


def test_placed_fills_the_gaps_between_views() -> None:
    call = small()
    call = replace(call, key=cache_slice(torch.ones_like(call.key)))
    key = placed(call, filling=Filling(0x7B, 0)).key
    gap = key.as_strided((16,), (1,), key.storage_offset() + 20 * 16)
    assert (gap > 1e36).all()


def test_placed_refuses_a_guard_that_moves_the_alignment() -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        placed(small(), guard=100)


@pytest.mark.slow
def test_a_crashing_backend_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "call.pt"
    save(snapshot(small(), context={"grad": False}), path)
    found = poison_isolated(path, Backend.FLASH_ATTENTION, preload=[FAULTS / "segfault.py"])
    assert found.reads_outside is None
    assert "SIGSEGV" in found.words
    healthy = poison_isolated(path, Backend.FLASH_ATTENTION)
    assert healthy.reads_outside is False
    missing = poison_isolated(tmp_path / "none.pt", Backend.FLASH_ATTENTION)
    assert missing.reads_outside is None


def test_each_tensor_has_a_guard_of_its_own_size() -> None:
    call = make_call(rows=600, heads=8, width=8, mask="causal")
    found = _guards(call)
    assert found["query"] == found["key"] == 600 * 8 * 8 * 2
    assert found["attn_mask"] == 8 * 600 * 600
    assert _guards(small())["attn_mask"] == LEAST_GUARD
    assert max(_guards(make_call(rows=3000, heads=16, width=8)).values()) == MOST_GUARD
