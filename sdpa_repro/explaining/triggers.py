"""Small calls that show whether this torch has a known bug, one function an issue, and the table of them.

A trigger gets the device and the backend to force (None: whatever the dispatcher takes) and returns a Finding;
UntestableError says why this machine cannot answer. `known_here` runs them in child processes, since some end the
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdpa_repro.environment import free_memory
from sdpa_repro.explaining.trigger_call import (
    Finding,
    UntestableError,
    attend,
    causal,
    compared,
    defined,
    normal,
    one_head,
)


@dataclass(frozen=True)
class Trigger:
    """How to see one bug. capability: the CUDA compute capability it was seen on, None for any.

    Where there is no short way, `run` is None and `why_not` says why.
    """

    run: Callable[[str, str | None], Finding] | None
    capability: tuple[int, int] | None = None
    why_not: str = ""


# The memory-efficient CUDA kernel. Head dim 136 so that a block takes 32 query rows on every GPU.


def last_row_uses_mask_row_0(device: str, backend: str | None) -> Finding:
    """pytorch#191937: mask row 0 shows key 0 alone, the last row all keys."""
    query = normal(1, 33, 4, 136, device=device).transpose(1, 2)
    key, value = (one_head(4, 33, 136, device, seed) for seed in (1, 2))
    mask = causal(33, device)
    with torch.no_grad():
        return compared(attend(backend, query, key, value, attn_mask=mask), defined(query, key, value, mask))


def lone_row_remapped(device: str, backend: str | None) -> Finding:
    """pytorch#192138: causal, a lone last row, more keys than queries."""
    query = normal(1, 33, 4, 136, device=device).transpose(1, 2)
    key, value = (one_head(4, 60, 136, device, seed) for seed in (1, 2))
    with torch.no_grad():
        return compared(attend(backend, query, key, value, is_causal=True), defined(query, key, value, causal=True))


def mask_offset_wraps(device: str, backend: str | None) -> Finding:
    """pytorch#187227: only the rows past the wrap have a mask."""
    if device == "cpu" or free_memory(device) < 14 << 30:
        raise UntestableError("needs a GPU with 14 GiB of free memory")
    rows, keys = 65536 + 64, 65536
    query = torch.zeros(1, 1, rows, 8, device=device, dtype=torch.float16)
    key = torch.zeros(1, 1, keys, 8, device=device, dtype=torch.float16)
    value = torch.zeros_like(key)
    value[0, 0, 0] = 1.0
    mask = torch.zeros(1, 1, rows, keys, device=device, dtype=torch.float16)
    mask[..., 65536:, 1:] = -math.inf  # the rows past 2**32 entries see key 0 alone: their output is 1
    with torch.no_grad():
        output = attend(backend, query, key, value, attn_mask=mask)
    return compared(output[:, :, 65536:], torch.ones(1, 1, 64, 8, dtype=torch.float64))


def expanded_with_mask(device: str, backend: str | None) -> Finding:
    """pytorch#112577: multi-query decode with a mask that hides nothing."""
    query = normal(1, 16, 1, 128, device=device)
    key, value = (one_head(16, 16, 128, device, seed) for seed in (1, 2))
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=device)
    with torch.no_grad():
        return compared(attend(backend, query, key, value, attn_mask=mask), defined(query, key, value, mask))


def block_diagonal(device: str, backend: str | None) -> Finding:
    """pytorch#108503: bfloat16, six blocks in 600 rows."""
    query, key, value = (normal(1, 2, 600, 64, device=device, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    blocks = torch.arange(600, device=device) // 100
    mask = (blocks[:, None] == blocks)[None, None]
    return compared(attend(backend, query, key, value, attn_mask=mask), defined(query, key, value, mask))


def cross_attention(device: str, backend: str | None) -> Finding:
    """pytorch#124877: 8 rows, 16 keys, the report's finfo.min mask."""
    query = normal(2, 4, 8, 128, device=device)
    key, value = (normal(2, 4, 16, 128, device=device, seed=seed) for seed in (1, 2))
    mask = torch.zeros(2, 1, 8, 16, device=device)
    mask[0, :, :, 7:] = torch.finfo(torch.float32).min
    mask[:, :, 7] = 0.0
    return compared(attend(backend, query, key, value, attn_mask=mask), defined(query, key, value, mask))


# cuDNN


def gradient_nan(device: str, backend: str | None) -> Finding:
    """pytorch#196678: every log-sum-exp near -115, S = 192."""
    shape = (1, 1, 192, 64)
    query, key = (0.1 * normal(*shape, device=device, seed=seed) for seed in (0, 1))
    query[..., 0], key[..., 0] = 1.0, -120.0 * math.sqrt(64)  # every score is about -120
    query = query.bfloat16().requires_grad_()
    mask = causal(192, device)
    value = normal(*shape, device=device, dtype=torch.bfloat16, seed=2)
    output = attend(backend, query, key.bfloat16(), value, attn_mask=mask)
    (gradient,) = torch.autograd.grad(output.float().sum(), query)
    bad = int((~torch.isfinite(gradient)).sum())
    return Finding(bad > 0, f"{bad} of {gradient.numel()} gradient entries not finite")


def mask_dtype(device: str, backend: str | None) -> Finding:
    """pytorch#191612: a float32 causal mask beside float16."""
    query, key, value = (normal(1, 4, 32, 64, device=device, dtype=torch.float16, seed=seed) for seed in range(3))
    mask = torch.zeros(1, 1, 32, 32, device=device).masked_fill(~causal(32, device), -math.inf)
    return compared(attend(backend, query, key, value, attn_mask=mask), defined(query, key, value, mask))


# CPU


def unequal_lengths(device: str, backend: str | None) -> Finding:
    """pytorch#193728: one value more than keys; the memory behind the key is ours."""
    query = normal(1, 1, 3, 8, device=device)
    memory, value = normal(1, 1, 6, 8, device=device, seed=1), normal(1, 1, 6, 8, device=device, seed=2)
    return _accepted(backend, query, memory[:, :, :5], value, what="6 values for 5 keys accepted")


def mask_and_flag(device: str, backend: str | None) -> Finding:
    """pytorch#187801: a mask together with is_causal."""
    query, key, value = (normal(1, 1, 4, 8, device=device, seed=seed) for seed in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)
    return _accepted(backend, query, key, value, attn_mask=mask, is_causal=True, what="both accepted")


def _accepted(backend: str | None, query: Tensor, key: Tensor, value: Tensor, *, what: str, **keywords: Any) -> Finding:
    """A call that ought to be refused: affected when it returns."""
    try:
        attend(backend, query, key, value, **keywords)
    except (RuntimeError, ValueError, UntestableError) as error:
        return Finding(False, f"refused: {error}".splitlines()[0][:120])
    return Finding(True, what)


def _flash_op() -> Callable[..., tuple[Tensor, Tensor]]:
    """The CPU flash kernel without the checks that come before it."""
    found: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
        torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
    )
    if found is None:
        raise UntestableError("this torch has no CPU flash kernel")
    return found


def inner_stride(device: str, backend: str | None) -> Finding:
    """pytorch#187506: a value with innermost stride 8, straight into the op."""
    query, key = normal(1, 2, 5, 8, device=device), normal(1, 2, 6, 8, device=device, seed=1)
    value = normal(1, 2, 8, 6, device=device, seed=2).mT
    return compared(_flash_op()(query, key, value)[0], defined(query, key, value))


def no_query_rows(device: str, backend: str | None) -> Finding:
    """pytorch#141219: no query rows, straight into the op."""
    key = normal(1, 2, 4, 8, device=device)
    output = _flash_op()(key[:, :, :0], key, key)[0]
    return Finding(False, f"returned shape {tuple(output.shape)}")


def no_kv_heads(device: str, backend: str | None) -> Finding:
    """pytorch#141218: enable_gqa with a key without heads."""
    query, key = normal(1, 2, 3, 8, device=device), normal(1, 0, 4, 8, device=device)
    try:
        output = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    except RuntimeError as error:
        return Finding(False, f"refused: {error}".splitlines()[0][:120])
    return Finding(False, f"returned shape {tuple(output.shape)}")


def first_key_block_hidden(device: str, backend: str | None) -> Finding:
    """pytorch#127055: a window of 10 keys over 600."""
    query, key, value = (normal(1, 1, 600, 8, device=device, seed=seed) for seed in range(3))
    mask = causal(600, device, window=10)
    return compared(attend(backend, query, key, value, attn_mask=mask), defined(query, key, value, mask))


def fully_masked(device: str, backend: str | None) -> Finding:
    """pytorch#103963: two rows that see nothing."""
    query, key, value = (normal(1, 2, 9, 8, device=device, seed=seed) for seed in range(3))
    mask = causal(9, device)
    mask[..., :2] = False
    return _nan(attend(backend, query, key, value, attn_mask=mask))


def fast_path(device: str, backend: str | None) -> Finding:
    """pytorch#118628: a constant additive mask in the encoder layer."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device).eval()
    bias = torch.full((5, 5), -0.5, device=device)  # one number added to every score changes nothing
    with torch.no_grad():
        return _nan(layer(normal(1, 5, 8, device=device), src_mask=bias))


def _nan(output: Tensor) -> Finding:
    """For calls whose output is finite by definition."""
    bad = int(output.isnan().sum())
    return Finding(bad > 0, f"{bad} of {output.numel()} entries NaN")


# MPS and ROCm


def transposed_query(device: str, backend: str | None) -> Finding:
    """pytorch#163597: two rows of a transposed query."""
    query = normal(1, 4, 2, 64, device=device).transpose(1, 2)
    key, value = (normal(1, 2, 32, 64, device=device, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        return compared(attend(backend, query, key, value), defined(query, key, value))


def permuted_batch(device: str, backend: str | None) -> Finding:
    """pytorch#181133: four batch rows of transposed inputs."""
    query, key, value = (normal(4, 3, 3, 64, device=device, seed=seed).transpose(1, 2) for seed in range(3))
    with torch.no_grad():
        return compared(attend(backend, query, key, value), defined(query, key, value))


def partial_key_block(device: str, backend: str | None) -> Finding:
    """pytorch#169222: 38 keys, and large values in the memory behind them."""
    query = normal(1, 2, 1, 64, device=device)
    memory, other = (normal(1, 2, 64, 64, device=device, seed=seed) for seed in (1, 2))
    memory[:, :, 38:], other[:, :, 38:] = 100.0, 100.0  # what lies behind the last key is seen when it is read
    key, value = memory[:, :, :38], other[:, :, :38]
    with torch.no_grad():
        return compared(attend(backend, query, key, value), defined(query, key, value))


def strided_value(device: str, backend: str | None) -> Finding:
    """ROCm/pytorch#3230: a transposed value."""
    query, key = (normal(1, 16, 62, 128, device=device, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    value = normal(1, 62, 16, 128, device=device, dtype=torch.bfloat16, seed=2).transpose(1, 2)
    return compared(attend(backend, query, key, value), defined(query, key, value))


TRIGGERS: dict[str, Trigger] = {
    "pytorch#191937": Trigger(last_row_uses_mask_row_0),
    "pytorch#192138": Trigger(lone_row_remapped),
    "pytorch#187227": Trigger(mask_offset_wraps),
    "pytorch#112577": Trigger(expanded_with_mask),
    "pytorch#108503": Trigger(block_diagonal),
    "pytorch#124877": Trigger(cross_attention),
    "pytorch#196678": Trigger(gradient_nan, (9, 0)),
    "pytorch#191612": Trigger(mask_dtype),
    "pytorch#193893": Trigger(None, why_not="seen in long generated text on B200 only, no short call shows it yet"),
    "pytorch#193728": Trigger(unequal_lengths),
    "pytorch#187801": Trigger(mask_and_flag),
    "pytorch#187506": Trigger(inner_stride),
    "pytorch#141219": Trigger(no_query_rows),
    "pytorch#141218": Trigger(no_kv_heads),
    "pytorch#127055": Trigger(first_key_block_hidden),
    "pytorch#103963": Trigger(fully_masked),
    "pytorch#163597": Trigger(transposed_query),
    "pytorch#181133": Trigger(permuted_batch),
    "pytorch#169222": Trigger(partial_key_block),
    "ROCm/pytorch#3230": Trigger(strided_value),
    "pytorch#118628": Trigger(fast_path),
    "pytorch#195320": Trigger(None, why_not="needs torch.compile, which takes longer than this check"),
}
"""By issue, as in `known_issues.KNOWN_ISSUES`."""
