"""Correct attention in plain matrix products, and the replacement of CPU kernels by it plus a change.

A fault file says what to change; everything else stays as the real kernel has it: it receives the bool
mask already turned into an additive one, sees true strides and grad mode, and returns the output and the
log-sum-exp in the real kernel's layout (laid out B, L, H, Ev and transposed). Works from torch 2.5 on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
MATH = "_scaled_dot_product_attention_math"
BLOCK_ELEMENTS = 1 << 23
"""Scores held at once, so that memory does not grow with L·S."""


@dataclass(frozen=True)
class Arguments:
    """What the kernel was called with; the mask is additive, or bool for MATH, or absent."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None


Change = Callable[[Tensor, Arguments], Tensor]
"""From the right output (B, H, L, Ev; float32 or float64) to the one the faulty kernel gives."""

_kept: list[torch.library.Library] = []


def replace_flash(change: Change, *, rounded: bool = False) -> None:
    """Let the CPU flash kernel return `change(right output, arguments)` from now on in this process."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        if dropout_p:
            raise RuntimeError("scaled_dot_product_attention_flash_attention: Currently do not support dropout > 0")
        arguments = Arguments(query, key, value, attn_mask, is_causal, scale)
        output, logsumexp = attention(arguments, rounded=rounded)
        return as_kernel(change(output, arguments), query.dtype), _interleaved(logsumexp)

    replace_kernel(FLASH, kernel)


def replace_math(change: Change, *, rounded: bool = False) -> None:
    """Let the MATH path return `change(right output, arguments)` for CPU tensors of four dimensions."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        dropout_mask: Tensor | None = None,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if key.shape[-2] != value.shape[-2] or (is_causal and attn_mask is not None):
            raise RuntimeError("_scaled_dot_product_attention: arguments that the real MATH path rejects")
        arguments = Arguments(query, key, value, attn_mask, is_causal, scale)
        output, logsumexp = attention(arguments, rounded=rounded)
        return change(output, arguments).to(query.dtype).contiguous(), logsumexp

    replace_kernel(MATH, kernel)


def restore() -> None:
    """Give every replaced kernel its real implementation back."""
    while _kept:
        _kept.pop()._destroy()


def replace_kernel(name: str, kernel: Callable[..., Any], device: str = "CPU") -> None:
    """Register `kernel` for an aten op and a dispatch key, without the dispatcher's warning that it overrides one."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, kernel, device)
    _kept.append(library)


def as_kernel(output: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the kernel's dtype, laid out as it lays it out: (B, L, H, Ev) in memory, seen as (B, H, L, Ev)."""
    return _interleaved(output.to(dtype))


def _interleaved(tensor: Tensor) -> Tensor:
    """A copy of a (B, H, L, ...) tensor whose memory runs (B, L, H, ...)."""
    batch, heads, rows, *rest = tensor.shape
    return tensor.new_empty(batch, rows, heads, *rest).transpose(1, 2).copy_(tensor)


def attention(arguments: Arguments, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, Ev) and log-sum-exp (B, H, L), in float32, or float64 for float64 inputs.

    With `rounded` every intermediate result is rounded to the query's dtype, as explicit products in that dtype
    do it. Fully masked rows are 0 in both results. Where key and value differ in length the common part is used.
    """
    query, key, value = arguments.query, arguments.key, arguments.value
    batch, heads, rows, _ = query.shape
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = torch.zeros(batch, heads, rows, value.shape[-1], dtype=precision, device=query.device)
    logsumexp = torch.zeros(batch, heads, rows, dtype=precision, device=query.device)
    step = max(1, BLOCK_ELEMENTS // max(1, batch * heads * key.shape[-2]))
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        output[:, :, part], logsumexp[:, :, part] = attention_rows(arguments, part, rounded=rounded)
    return output, logsumexp


def attention_rows(
    arguments: Arguments, part: slice, *, mask_rows: slice | None = None, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """`attention` for the query rows `part`, with the mask's rows `mask_rows` (the same ones by default)."""
    query = arguments.query[:, :, part]
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = min(arguments.key.shape[-2], arguments.value.shape[-2])
    if arguments.is_causal:
        keys = min(keys, part.stop)
    key, value = (_one_head(tensor)[:, :, :keys].to(precision) for tensor in (arguments.key, arguments.value))
    scale = arguments.scale if arguments.scale is not None else query.shape[-1] ** -0.5

    def stored(tensor: Tensor) -> Tensor:
        return tensor.to(query.dtype).to(precision) if rounded else tensor

    scores = stored(_product(query.to(precision), key.transpose(-1, -2)) * scale)
    if arguments.attn_mask is not None:
        scores = stored(scores + _bias(arguments.attn_mask, mask_rows or part, keys, precision))
    if arguments.is_causal:
        row = torch.arange(part.start, part.stop, device=query.device)
        hidden = torch.arange(keys, device=query.device) > row[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    if keys == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=precision), scores.sum(-1)
    logsumexp = torch.logsumexp(scores, -1)
    blind = scores.amax(-1) == float("-inf")
    logsumexp = logsumexp.masked_fill(blind, 0.0)
    weights = stored((scores - logsumexp[..., None]).exp())
    return stored(_product(weights, value)), logsumexp


def _one_head(tensor: Tensor) -> Tensor:
    """Cut heads that are one head seen many times (stride 0), so that a cast does not copy each of them."""
    return tensor[:, :1] if tensor.stride(1) == 0 else tensor


def _product(left: Tensor, right: Tensor) -> Tensor:
    """(B, H, L, M) @ (B, Hkv, M, N) with each of the Hkv heads serving H / Hkv consecutive ones."""
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    product = left.reshape(batch, groups, heads // groups * rows, inner) @ right
    return product.reshape(batch, heads, rows, right.shape[-1])


def _bias(mask: Tensor, rows: slice, keys: int, precision: torch.dtype) -> Tensor:
    """The mask's part for these rows as numbers to add; a dimension of size 1 is left to broadcast."""
    if mask.dim() >= 2 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    mask = mask[..., :keys] if mask.shape[-1] > 1 else mask
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=precision, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.to(precision)
