"""A call comes back from its file bit for bit and with its layout, and the file holds what is viewed and no more."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from tests.calls import causal_mask, make_call

ROOM = 64 << 10
"""Bytes a file may have besides its tensors."""

sdpa = torch.nn.functional.scaled_dot_product_attention


def addresses(tensor: Tensor) -> Tensor:
    """The address of every element, in the shape of the tensor, from the definition of a stride."""
    found = torch.full(tuple(tensor.shape), tensor.data_ptr())
    for dim, stride in enumerate(tensor.stride()):
        shape = [1] * tensor.dim()
        shape[dim] = -1
        found = found + (torch.arange(tensor.shape[dim]) * stride * tensor.element_size()).view(shape)
    return found


def covered(*tensors: Tensor) -> set[int]:
    """The address of every byte that some tensor views."""
    found: set[int] = set()
    for tensor in tensors:
        for first in addresses(tensor).unique().tolist():
            found.update(range(first, first + tensor.element_size()))
    return found


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, expanded dimensions written out, so that NaN and all else compare bit by bit."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(whole).contiguous()


def read_back(call: AttentionCall, output: Tensor | None, path: Path, **told: Any) -> dump.Dump:
    """The call through a file, having checked values, strides, addresses and overlap against the definition."""
    dump.save(dump.snapshot(call, output, **told), path)
    read = dump.load(path)
    before, after = call.tensors, read.call.tensors
    assert before.keys() == after.keys()
    pairs = [(before[name], after[name]) for name in before]
    if output is not None:
        assert read.output is not None
        pairs.append((output, read.output))
    for old, new in pairs:
        assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
        assert not new.requires_grad
        assert torch.equal(bits(new), bits(old))
        if old.numel():
            assert new.data_ptr() % 256 == old.data_ptr() % 256
    for one, other in itertools.combinations([name for name in before if before[name].numel()], 2):
        distance = before[other].data_ptr() - before[one].data_ptr()
        if abs(distance) < 64 << 20:
            assert after[other].data_ptr() - after[one].data_ptr() == distance
    assert dump.layout_differences(call, read.call) == []
    assert dump.layout(call)["tensors"] == dump.layout(read.call)["tensors"]
    return read


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_call(mask: Tensor | None = None, rows: int = 5, keys: int = 7) -> AttentionCall:
    return AttentionCall(
        normal(2, 3, rows, 8), normal(2, 3, keys, 8, seed=1), normal(2, 3, keys, 8, seed=2), mask, is_causal=False
    )


def with_key_value(key: Tensor, value: Tensor) -> AttentionCall:
    return AttentionCall(normal(*key.shape[:-2], 4, key.shape[-1], dtype=key.dtype), key, value)


def packed_projection() -> AttentionCall:
    """Query, key and value as one projection returns them: interleaved, nothing shared."""
    query, key, value = normal(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return AttentionCall(query, key, value)


def value_inside_key() -> AttentionCall:
    """Key and value of multi-head latent attention: the value is the front of the key."""
    key = normal(1, 1, 9, 24).expand(1, 4, 9, 24)
    return with_key_value(key, key[..., :16])


def unfolded_key() -> AttentionCall:
    """Sliding windows over one sequence: a view that overlaps itself."""
    windows = normal(64).unfold(0, 8, 3)[None, None]
    return with_key_value(windows, windows)


def half_shared() -> AttentionCall:
    """Key and value that share some of their rows, neither within the other, with gaps between rows."""
    memory = normal(40, 12)
    return with_key_value(memory[None, None, 0:20, :8], memory[None, None, 10:30, 2:10])


def cache_slice(filled: int = 5, slots: int = 4096) -> AttentionCall:
    """The filled part of a static cache, expanded from one head as `repeat_kv` does."""
    keys, values = normal(2, 1, slots, 16), normal(2, 1, slots, 16, seed=1)
    shape = (2, 4, filled, 16)
    return AttentionCall(
        normal(2, 4, filled, 16), keys[:, :, :filled].expand(shape), values[:, :, :filled].expand(shape)
    )


def misaligned() -> AttentionCall:
    """Tensors at addresses that are no multiple of their itemsize, as a mapped file may give them."""
    memory = torch.arange(4096, dtype=torch.int64).to(torch.uint8).untyped_storage()
    query, key, value = (
        torch.empty(0).set_(memory[first:], 0, (1, 1, 4, 8), (32, 32, 8, 1)) for first in (3, 259, 515)
    )
    return AttentionCall(query, key, value)


def toeplitz_mask() -> AttentionCall:
    """A band mask laid over one row of flags, so that its rows overlap."""
    flags = torch.arange(11) < 6
    return plain_call(flags.as_strided((5, 7), (1, 1), 0))


CALLS: dict[str, Callable[[], AttentionCall]] = {
    "expanded key and value": lambda: make_call(heads=4, rows=33, width=24),
    "dense": lambda: make_call(layout="dense", rows=9, width=16),
    "grouped queries": lambda: make_call(layout="gqa", heads=4, kv_heads=2, rows=9, width=16),
    "value narrower": lambda: make_call(value_width=8, rows=9, width=16),
    "value wider": lambda: make_call(value_width=40, rows=9, width=16),
    "one query row": lambda: make_call(rows=1, keys=17, width=16),
    "no keys": lambda: make_call(rows=3, keys=0, width=16, mask=None),
    "no rows": lambda: make_call(rows=0, keys=4, width=16, mask=None),
    "is_causal": lambda: make_call(mask="flag", rows=9, width=16),
    "scale": lambda: make_call(scale=1.0, rows=9, width=16),
    "float16": lambda: make_call(dtype=torch.float16, mask="float", rows=9, width=16),
    "bfloat16": lambda: make_call(dtype=torch.bfloat16, mask="float", rows=9, width=16),
    "float32": lambda: make_call(dtype=torch.float32, mask="float", rows=9, width=16),
    "float64": lambda: make_call(dtype=torch.float64, mask="float", rows=9, width=16),
    "mask (S,)": lambda: plain_call(torch.arange(7) < 4),
    "mask (L, S)": lambda: plain_call(causal_mask(5, 7)[0, 0]),
    "mask 3-D": lambda: plain_call(causal_mask(5, 7)[0].expand(3, 5, 7)),
    "mask 4-D": lambda: plain_call(causal_mask(5, 7).repeat(2, 3, 1, 1)),
    "mask expanded over batch": lambda: plain_call(causal_mask(5, 7).repeat(1, 3, 1, 1).expand(2, 3, 5, 7)),
    "mask expanded over heads": lambda: plain_call(causal_mask(5, 7).repeat(2, 1, 1, 1).expand(2, 3, 5, 7)),
    "mask expanded over rows": lambda: plain_call((torch.arange(7) < 4).expand(2, 3, 5, 7)),
    "mask expanded over keys": lambda: plain_call(normal(2, 3, 5, 1).expand(2, 3, 5, 7)),
    "mask of one element": lambda: plain_call(torch.zeros(()).expand(2, 3, 5, 7)),
    "mask a slice with offset": lambda: plain_call(causal_mask(16, 24)[..., 3:8, 11:18]),
    "mask transposed": lambda: plain_call((normal(7, 5) > 0).mT),
    "mask with bytes beyond 1": lambda: plain_call(torch.arange(35, dtype=torch.uint8).view(torch.bool).view(5, 7)),
    "mask a band over one row": toeplitz_mask,
    "last stride not 1": lambda: with_key_value(normal(1, 2, 16, 9).mT, normal(1, 2, 9, 32)[..., ::2]),
    "offsets": lambda: with_key_value(normal(1, 2, 20, 17)[:, :, 3:, 1:], normal(1, 2, 19, 23)[:, :, 2:, 7:]),
    "packed projection": packed_projection,
    "value inside key": value_inside_key,
    "value is key": lambda: with_key_value(*[normal(1, 2, 9, 8)] * 2),
    "value half of key": half_shared,
    "unfolded key": unfolded_key,
    "slice of a static cache": cache_slice,
    "float8": lambda: with_key_value(*[normal(1, 2, 9, 8).to(torch.float8_e4m3fn)[..., ::2]] * 2),
    "float8 mask-like tensors": lambda: plain_call(normal(5, 7).to(torch.float8_e5m2).expand(2, 3, 5, 7)),
    "integers": lambda: with_key_value(torch.arange(72).view(1, 2, 9, 4), torch.arange(72).view(1, 2, 9, 4).mT),
    "no batch": lambda: AttentionCall(normal(4, 5, 8), normal(4, 7, 8), normal(4, 7, 8)),
    "two batch dimensions": lambda: with_key_value(normal(2, 3, 4, 5, 8), normal(2, 3, 4, 5, 6)),
    "no heads": lambda: AttentionCall(normal(5, 8), normal(7, 8), normal(7, 8)),
    "misaligned": misaligned,
    "a call that raises": lambda: AttentionCall(normal(1, 2, 3, 4), normal(1, 5, 7, 9), normal(3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_back_bit_for_bit_with_its_layout(name: str, tmp_path: Path) -> None:
    call = CALLS[name]()
    output = normal(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    read = read_back(call, output, tmp_path / "x.pt")
    fields = ("dropout_p", "is_causal", "scale", "enable_gqa")
    assert all(getattr(read.call, field) == getattr(call, field) for field in fields)
    assert read.path == tmp_path / "x.pt"
    viewed = len(covered(output, *call.tensors.values()))
    assert (tmp_path / "x.pt").stat().st_size <= 1.1 * viewed + ROOM


@pytest.mark.parametrize("name", CALLS)
def test_each_viewed_byte_is_stored_once(name: str) -> None:
    call = CALLS[name]()
    document = dump.snapshot(call)
    viewed = len(covered(*call.tensors.values()))
    assert dump.stored_bytes(document) <= viewed
    if call.attn_mask is None or call.attn_mask.dtype != torch.bool:
        assert dump.stored_bytes(document) == viewed


def test_a_key_expanded_from_one_head_keeps_stride_0_and_its_alignment(tmp_path: Path) -> None:
    call = make_call(heads=16, rows=33, width=512, scale=1.0)
    read = read_back(call, sdpa(call.query, call.key, call.value, **call.keywords), tmp_path / "x.pt")
    assert read.call.key.stride() == (0, 0, 512, 1)
    assert read.call.value.stride() == (0, 0, 512, 1)
    assert read.call.scale == 1.0


def test_value_cut_from_key_shares_its_memory_again(tmp_path: Path) -> None:
    read = read_back(value_inside_key(), None, tmp_path / "x.pt").call
    assert read.value.data_ptr() == read.key.data_ptr()
    read.key[0, 0, 4, 2] = 17.0
    assert read.value[0, 0, 4, 2] == 17.0


def test_value_cut_from_key_is_stored_in_key_alone() -> None:
    entries = dump.snapshot(value_inside_key())["tensors"]
    assert entries["value"]["span_of"] == "key"
    assert "data" not in entries["value"]
    assert entries["key"]["data"].shape == (1, 1, 9, 24)


def test_interleaved_views_share_a_buffer_but_no_data() -> None:
    document = dump.snapshot(packed_projection())
    assert len(document["buffers"]) == 1
    assert all("data" in entry for entry in document["tensors"].values())
    assert [document["tensors"][name]["offset"] for name in ("query", "key", "value")] == [0, 128, 256]


def test_tensors_within_64_mib_share_a_buffer_and_farther_ones_do_not() -> None:
    memory = torch.empty((65 << 20) + 4096, dtype=torch.uint8)
    near, far = 4096 + (64 << 20), (64 << 20) + 8192

    def at(first: int) -> Tensor:
        return memory[first : first + 4096].zero_().view(torch.float32).view(1, 1, 16, 64)

    apart = dump.snapshot(AttentionCall(at(0), at(0), at(near)))
    assert [entry["offset"] for entry in apart["tensors"].values()] == [0, 0, near]
    assert len(apart["buffers"]) == 1
    assert len(dump.snapshot(AttentionCall(at(0), at(0), at(far)))["buffers"]) == 2


def test_distance_within_64_mib_takes_no_room_in_the_file(tmp_path: Path) -> None:
    memory = torch.zeros(40 << 20, dtype=torch.uint8)
    query, key = (memory[at : at + 4096].view(torch.float32).view(1, 1, 16, 64) for at in (512, 36 << 20))
    read_back(AttentionCall(query, key, key), None, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size <= 2 * 4096 + ROOM


def test_bytes_outside_the_views_are_not_in_the_file(tmp_path: Path) -> None:
    secret = b"SECRET OF ANOTHER USER IN THE SAME CACHE "
    memory = torch.frombuffer(bytearray(secret * 20_000), dtype=torch.uint8)
    cache = memory[: 8 * 1024 * 64].view(torch.float32).view(1, 2, 1024, 64)
    cache[:, :, 100:140, :60] = normal(1, 2, 40, 60)
    view = cache[:, :, 100:140, :60]
    shifted = cache[:, :, 110:140, 4:56]
    mask = memory[8 * 1024 * 64 :][64:104].view(torch.bool)[::2]
    mask.fill_(True)
    call = AttentionCall(view[:, :, ::2], view, shifted, mask)
    read_back(call, view[:, :, 1::2], tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    assert not [part for part in (secret[i : i + 8] for i in range(30)) if part in content]


def test_the_slice_of_a_large_cache_takes_the_room_of_the_slice(tmp_path: Path) -> None:
    call = cache_slice(filled=300, slots=100_000)
    assert call.key.untyped_storage().nbytes() == 12_800_000
    read_back(call, None, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size <= 1.1 * (2 * 4 + 4) * 300 * 16 * 4 + ROOM


def test_tensors_that_need_gradients_are_stored_detached(tmp_path: Path) -> None:
    call = make_call(dtype=torch.float32, rows=5, width=8)
    call = call.with_tensors({name: getattr(call, name).clone().requires_grad_() for name in ("query", "key", "value")})
    output = sdpa(call.query, call.key, call.value, **call.keywords)
    assert output.requires_grad
    read_back(call, output, tmp_path / "x.pt")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_snapshot_and_load_work_under_grad_modes(mode: Callable[[], Any], tmp_path: Path) -> None:
    with mode():
        call = half_shared()
        read_back(call, sdpa(call.query, call.key, call.value), tmp_path / "x.pt")


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    call = replace(half_shared(), attn_mask=toeplitz_mask().attn_mask)
    torch.set_default_device("meta")
    try:
        dump.save(dump.snapshot(call), tmp_path / "x.pt")
        read = dump.load(tmp_path / "x.pt")
    finally:
        torch.set_default_device(None)
    assert dump.layout_differences(call, read.call) == []
    assert torch.equal(call.value, read.call.value)


@pytest.mark.parametrize(("make", "variant"), [(causal_upper_left, "UPPER_LEFT"), (causal_lower_right, "LOWER_RIGHT")])
def test_a_causal_bias_is_stored_as_its_rule(
    make: Callable[[int, int], CausalBias], variant: str, tmp_path: Path
) -> None:
    call = plain_call(make(5, 7))
    document = dump.snapshot(call)
    assert document["call"]["mask_rule"] == {"kind": "causal_bias", "variant": variant, "shape": [5, 7]}
    assert "attn_mask" not in document["tensors"]
    dump.save(document, tmp_path / "x.pt")
    read = dump.load(tmp_path / "x.pt").call
    assert isinstance(read.attn_mask, CausalBias)
    assert read.attn_mask.variant is CausalVariant[variant]
    assert (read.attn_mask.seq_len_q, read.attn_mask.seq_len_kv) == (5, 7)
    assert dump.layout_differences(call, read) == []
    expected = sdpa(call.query, call.key, call.value, attn_mask=call.attn_mask)
    assert torch.equal(sdpa(read.query, read.key, read.value, attn_mask=read.attn_mask), expected)


def test_a_causal_bias_that_was_left_out_of_the_call_is_given_as_a_rule(tmp_path: Path) -> None:
    rule = {"kind": "causal_bias", "variant": "LOWER_RIGHT", "shape": (5, 7)}
    dump.save(dump.snapshot(plain_call(), mask_rule=rule), tmp_path / "x.pt")
    assert isinstance(dump.load(tmp_path / "x.pt").call.attn_mask, CausalBias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_payloads_negative_zero_and_subnormals_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(whole)
    words = torch.tensor([1, 2, 3, info.min, info.min + 1, info.max, info.max - 5, -1, -7, 0], dtype=whole)
    infinity = torch.tensor(math.inf, dtype=dtype).view(whole)
    signalling = infinity + torch.arange(1, 6, dtype=whole)
    values = torch.cat([words, signalling]).view(dtype)
    assert int(values.isnan().sum()) == 9
    key = values.view(1, 1, 3, 5)
    read = read_back(AttentionCall(key.mT, key, key[..., ::2]), key.mT, tmp_path / "x.pt")
    assert torch.equal(read.call.key.contiguous().view(whole), key.view(whole))
    assert read.output is not None
    assert torch.equal(read.output.contiguous().view(whole), key.mT.contiguous().view(whole))


def test_later_changes_to_the_live_tensors_do_not_reach_a_snapshot() -> None:
    call = make_call(rows=5, width=8)
    document = dump.snapshot(call, call.query)
    before = {name: entry["data"].clone() for name, entry in document["tensors"].items()}
    for tensor in (call.query, call.key, call.value, call.attn_mask):
        assert tensor is not None
        tensor.zero_()
    assert all(torch.equal(document["tensors"][name]["data"], data) for name, data in before.items())


def test_what_was_recorded_with_the_call_comes_back_as_plain_data(tmp_path: Path) -> None:
    told = {
        "context": {"grad": False, "backends": ["MATH"], "dtype": torch.bfloat16, "size": torch.Size([1, 2])},
        "origin": {"module": "model.layers.5.self_attn", "call_index": 12, "rank": None, "padding": {"side": "left"}},
        "environment": {"torch": {"version": "2.13.0"}, "device": torch.device("cpu")},
        "live": {"ran": "FLASH_ATTENTION", "max_abs": 0.25, "ratio": math.inf, "rows": [(0, 1, 32)]},
        "recipe": {"query": {"kind": "zeros"}},
        "preloaded": [{"name": "fault.py", "sha256": "ab" * 32}],
    }
    read = read_back(make_call(rows=5, width=8), None, tmp_path / "x.pt", **told)
    assert read.context == {"grad": False, "backends": ["MATH"], "dtype": "torch.bfloat16", "size": [1, 2]}
    assert read.origin == told["origin"]
    assert read.environment == {"torch": {"version": "2.13.0"}, "device": "cpu"}
    assert read.live == {"ran": "FLASH_ATTENTION", "max_abs": 0.25, "ratio": math.inf, "rows": [[0, 1, 32]]}
    assert (read.recipe, read.preloaded) == (told["recipe"], told["preloaded"])
    assert read.output is None


def test_as_much_metadata_as_may_be_told_can_be_read_again(tmp_path: Path) -> None:
    many: dict[str, Any] = {"keys": {f"key {i}": [] for i in range(9990)}}
    long = {"text": "é" * 260_000}
    told: dict[str, Any] = {"context": many, "origin": long, "environment": many, "live": long, "recipe": many}
    assert read_back(make_call(rows=5, width=8), None, tmp_path / "x.pt", **told).recipe == many


def test_nothing_told_reads_as_nothing(tmp_path: Path) -> None:
    read = read_back(make_call(rows=5, width=8), None, tmp_path / "x.pt")
    assert (read.context, read.origin, read.environment, read.preloaded) == ({}, {}, {}, [])
    assert (read.live, read.recipe) == (None, None)


def test_unknown_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    call = make_call(rows=5, width=8)
    document = dump.snapshot(call)
    document["backward"] = {"grad_output": torch.zeros(3)}
    document["call"]["window"] = 5
    document["tensors"]["sinks"] = {"shape": "unknown"}
    document["tensors"]["query"]["quantised"] = [1]
    document["buffers"][0]["pool"] = "x"
    dump.save(document, tmp_path / "x.pt")
    assert torch.equal(dump.load(tmp_path / "x.pt").call.key, call.key)


def test_torch_alone_reads_a_dump(tmp_path: Path) -> None:
    call = make_call(rows=5, width=8)
    dump.save(dump.snapshot(call), tmp_path / "x.pt")
    document = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (document["format"], document["version"]) == ("sdpa-repro", 1)
    assert torch.equal(document["tensors"]["query"]["data"], call.query)
    assert document["tensors"]["key"]["stride"] == list(call.key.stride())


REFUSED: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.empty(1, 1, 5, 8, device="meta"),
    "sparse": lambda: torch.eye(8).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(normal(1, 1, 5, 8), 0.1, 0, torch.qint8),
    "complex": lambda: torch.zeros(1, 1, 5, 8, dtype=torch.complex64),
    "nested": lambda: torch.nested.nested_tensor([normal(3, 8), normal(2, 8)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_strided_memory_are_refused_in_one_line(kind: str) -> None:
    with pytest.raises(InputError, match="query") as caught:
        dump.snapshot(replace(plain_call(), query=REFUSED[kind]()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("told", [{"x": torch.zeros(1)}, {"x": object()}, {1: 2}, {"x": {"y": b"z"}}, {"x": 1 << 70}])
def test_what_is_no_plain_data_is_refused(told: dict[Any, Any]) -> None:
    with pytest.raises(InputError, match="context"):
        dump.snapshot(plain_call(), context=told)


# ---- random layouts


def random_tensor(random: random.Random, memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of the shape over some of the memory: permuted, with gaps, expanded or overlapping itself."""
    order = random.sample(range(len(shape)), len(shape))
    strides, step = [0] * len(shape), 1
    for dim in order:
        kind = random.random()
        strides[dim] = 0 if kind < 0.15 else random.randint(1, step + 2) if kind < 0.25 else step
        step = max(step, strides[dim] * shape[dim]) + random.choice([0, 0, 0, 1, 5])
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    first = random.randint(0, max(memory.numel() - reach, 0))
    return memory.as_strided(shape, strides, memory.storage_offset() + first)


def random_call(seed: int) -> tuple[AttentionCall, Tensor]:
    chosen = random.Random(seed)
    dtype = chosen.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    numbers = torch.Generator().manual_seed(seed)
    memories = [torch.randn(3000, generator=numbers).to(dtype) for _ in range(chosen.randint(1, 2))]
    flags = torch.rand(3000, generator=numbers) > 0.5
    batch, heads, rows, keys, width = (chosen.randint(1, high) for high in (2, 3, 5, 6, 6))
    query = random_tensor(chosen, chosen.choice(memories), (batch, heads, rows, width))
    key = random_tensor(chosen, chosen.choice(memories), (batch, heads, keys, width))
    value = (
        key if chosen.random() < 0.2 else random_tensor(chosen, chosen.choice(memories), (batch, heads, keys, width))
    )
    if chosen.random() < 0.2:
        value = key[..., : chosen.randint(1, width)]
    source = chosen.choice([None, flags, *memories])
    mask = None if source is None else random_tensor(chosen, source, (batch, heads, rows, keys)[chosen.randint(0, 3) :])
    return AttentionCall(query, key, value, mask), normal(batch, heads, rows, width, dtype=dtype)


@pytest.mark.parametrize("block", range(8))
def test_random_layouts_come_back_and_store_each_byte_once(block: int, tmp_path: Path) -> None:
    for seed in range(40 * block, 40 * (block + 1)):
        call, output = random_call(seed)
        read_back(call, output, tmp_path / "x.pt")
        viewed = len(covered(output, *call.tensors.values()))
        assert dump.stored_bytes(dump.snapshot(call, output)) <= viewed, seed


# ---- writing


def test_the_file_appears_whole_under_its_name_and_nothing_else_does(tmp_path: Path) -> None:
    size = dump.save(dump.snapshot(make_call(rows=5, width=8)), tmp_path / "x.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    assert size == (tmp_path / "x.pt").stat().st_size


def test_a_dump_replaces_an_older_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("old")
    read_back(make_call(rows=5, width=8), None, tmp_path / "x.pt")


class Stops:
    """A file that fails after some bytes, as a full disk or Ctrl-C does."""

    def __init__(self, file: BinaryIO, room: int, error: BaseException) -> None:
        self.file, self.room, self.error = file, room, error

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise self.error
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 3000, 12_000])
@pytest.mark.parametrize("kind", ["full", "interrupt"])
def test_a_write_that_stops_leaves_the_old_file_and_no_other(
    room: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = dump.snapshot(make_call(rows=33, width=64))
    (tmp_path / "x.pt").write_text("old")
    error: BaseException = (
        KeyboardInterrupt() if kind == "interrupt" else OSError(errno.ENOSPC, "No space left on device")
    )
    write = torch.save
    monkeypatch.setattr(torch, "save", lambda obj, file, **words: write(obj, Stops(file, room, error), **words))
    if kind == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            dump.save(document, tmp_path / "x.pt")
    else:
        with pytest.raises(InputError) as caught:
            dump.save(document, tmp_path / "x.pt")
        message = str(caught.value)
        assert str(tmp_path / "x.pt") in message
        assert "No space left on device" in message
        assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    assert (tmp_path / "x.pt").read_text() == "old"


@pytest.mark.slow
def test_a_real_limit_on_file_size_is_reported_in_one_line(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys, os; from sdpa_repro import dump; from sdpa_repro.errors import InputError\n"
        "from tests.calls import make_call\n"
        "document = dump.snapshot(make_call(rows=129, width=128))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        "try: dump.save(document, sys.argv[1])\n"
        "except InputError as error: print(error)\n"
        "print(os.listdir(os.path.dirname(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "x.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    first, second = done.stdout.splitlines()
    assert "cannot write" in first
    assert second == "[]"


@pytest.mark.parametrize("where", ["missing/x.pt", "file/x.pt", "folder"])
def test_a_place_that_cannot_be_written_is_named_with_what_to_do(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="choose a folder") as caught:
        dump.save(dump.snapshot(make_call(rows=5, width=8)), tmp_path / where)
    assert str(tmp_path / where) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_read_only_folder_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    document = dump.snapshot(make_call(rows=5, width=8))
    monkeypatch.setattr(os, "open", refuse)  # root, which tests may run as, may write anywhere
    with pytest.raises(InputError, match="Permission denied: choose a folder that is there, writable"):
        dump.save(document, tmp_path / "x.pt")


def test_a_file_of_another_kind_is_told_which_files_are_dumps(tmp_path: Path) -> None:
    text, other = tmp_path / "README.md", tmp_path / "weights.pt"
    text.write_text("# A readme\n")
    torch.save({"weight": torch.ones(2)}, other)
    for path in (text, other):
        with pytest.raises(InputError, match=r"give a \.pt file that capture wrote"):
            dump.load(path)


# ---- large masks


@pytest.mark.slow
def test_a_large_bool_mask_is_small_on_disk_and_quick(tmp_path: Path) -> None:
    mask = torch.ones(16384, 16384, dtype=torch.bool).tril()
    call = AttentionCall(normal(1, 1, 16384, 1), normal(1, 1, 16384, 1), normal(1, 1, 16384, 1), mask)
    path, plain = tmp_path / "x.pt", tmp_path / "plain.pt"

    def seconds(action: Callable[[], Any]) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    actions = (
        lambda: dump.save(dump.snapshot(call), path),
        lambda: torch.save(mask, plain),
        lambda: dump.load(path),
        lambda: torch.load(plain, weights_only=True),
    )
    rounds = [[seconds(action) for action in actions] for _ in range(5)]
    write, plain_write, read, plain_read = (min(column) for column in zip(*rounds, strict=True))
    assert path.stat().st_size <= 36 << 20
    found = dump.load(path).call.attn_mask
    assert found is not None
    assert torch.equal(found, mask)
    assert write <= 2 * plain_write
    assert read <= 2 * plain_read
