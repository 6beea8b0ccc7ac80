"""Calls made from a call for replay: in another dtype, on a block of query rows, with the mask written out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, rebuild


def recast(call: AttentionCall, dtype: torch.dtype | None = None) -> AttentionCall:
    """A copy of the call in `dtype` (None: as it is) with the layout of the original; see `attention.rebuild`.

    A `CausalBias` has no memory of its own and is handed on.
    """
    mask = call.attn_mask
    if getattr(mask, "variant", None) is None:
        return rebuild(call, dtype=dtype)
    return replace(rebuild(replace(call, attn_mask=None), dtype=dtype), attn_mask=mask)


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor is float8, which most of PyTorch's operations do not take and few kernels compute in."""
    return tensor.dtype.is_floating_point and tensor.element_size() == 1


def explicit_mask(call: AttentionCall, first: int = 0, last: int | None = None) -> Tensor | None:
    """The mask of query rows [first, last) with `is_causal` (top-left aligned) and `CausalBias` written out."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    last = rows if last is None else last
    mask = call.attn_mask
    variant = getattr(mask, "variant", None)
    if call.is_causal or variant is not None:
        offset = keys - rows if getattr(variant, "name", "") == "LOWER_RIGHT" else 0
        row = torch.arange(first, last, device=call.query.device)[:, None]
        causal = torch.arange(keys, device=call.query.device)[None, :] <= row + offset
        if mask is None or variant is not None:
            return causal
        own = mask[..., first:last, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask
        return own & causal if own.dtype == torch.bool else own.masked_fill(~causal, float("-inf"))
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., first:last, :]


def rows_of(call: AttentionCall, first: int, last: int) -> AttentionCall:
    """The call's query rows [first, last) with their explicit mask."""
    keys = min(last, call.key.shape[-2]) if call.is_causal else call.key.shape[-2]
    mask = explicit_mask(call, first, last)
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :keys]
    return replace(
        call,
        query=call.query[..., first:last, :],
        key=call.key[..., :keys, :],
        value=call.value[..., :keys, :],
        attn_mask=mask,
        is_causal=False,
        scale=call.softmax_scale,
    )


def autocast_dtype(call: AttentionCall) -> torch.dtype | None:
    """The dtype that autocast, if it is on, gives the call's tensors; None when it leaves them alone."""
    kind = call.query.device.type
    if not torch.is_autocast_enabled(kind) or call.query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype != call.query.dtype else None


def under_autocast(call: AttentionCall) -> AttentionCall:
    """The call as its kernel sees it: in autocast's dtype when autocast is on."""
    dtype = autocast_dtype(call)
    return call if dtype is None else recast(call, dtype)
