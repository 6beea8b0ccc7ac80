"""Attention as transformers' eager path writes it out.

Matmul, softmax in float32, matmul, each result rounded to the call's dtype.
"""

from __future__ import annotations

import math
import time
from functools import lru_cache

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, output_shape
from sdpa_repro.replaying.variants import autocast_dtype, explicit_mask, under_autocast

EMULATE_ABOVE = 2e9
"""Floating-point operations from which eager in a slow dtype is emulated; below, the wait is short."""

SLOW_RATIO = 4.0
"""A dtype is slow when its matrix products take this many times longer than float32's."""


def eager(call: AttentionCall, *, emulated: bool = False) -> Tensor:
    """Attention as transformers' `eager_attention_forward` computes it, in the call's dtype.

    A bool mask adds finfo.min where it hides a key, so a fully masked row becomes the mean of value.
    `emulated`: matrix products in float32, rounded to the dtype afterwards; close to the real thing in
    error, much faster on CPUs without instructions for the dtype, and never a ground for an accusation.
    """
    call = under_autocast(call)
    query, key, value = call.query, call.key, call.value
    if call.enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in (key, value))
    dtype = query.dtype
    with torch.autocast(query.device.type, enabled=False):
        scores = _product(query, key.transpose(-2, -1), emulated) * call.softmax_scale
        mask = explicit_mask(call)
        if mask is not None:
            scores = scores + additive(mask, dtype)
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        del scores
        return _product(weights, value, emulated)


def _product(left: Tensor, right: Tensor, emulated: bool) -> Tensor:
    if not emulated:
        return torch.matmul(left, right)
    return torch.matmul(left.float(), right.float()).to(left.dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add in `dtype`; hidden keys of a bool mask get finfo.min, as in transformers."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def is_emulated(call: AttentionCall) -> bool:
    """Whether eager for this call is computed with float32 products: a large call in a dtype slow on this CPU."""
    dtype = autocast_dtype(call) or call.query.dtype
    if call.query.device.type != "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return False
    scores = math.prod(output_shape(call)[:-1]) * call.key.shape[-2]
    operations = 2.0 * scores * (call.query.shape[-1] + call.value.shape[-1])
    return operations > EMULATE_ABOVE and _slow_products(dtype)


@lru_cache
def _slow_products(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` much more slowly than float32 ones."""

    def seconds(kind: torch.dtype) -> float:
        matrix = torch.ones(192, 192, dtype=kind)
        torch.mm(matrix, matrix)
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            best = min(best, time.perf_counter() - start)
        return best

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return seconds(dtype) > SLOW_RATIO * seconds(torch.float32)
