"""What the triggers of known bugs have in common: seeded inputs, one call, and attention written from the formula."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE = 0.02
"""Largest difference from float64 that is put down to rounding; the values are such that the bugs move it by more."""


@dataclass(frozen=True)
class Finding:
    """What one trigger saw; `detail` is a few words: where and by how much."""

    affected: bool
    detail: str


class UntestableError(Exception):
    """This machine or this torch cannot run the trigger; the message says why."""


def defined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """softmax(query·key / sqrt(E) + mask)·value in float64 on the CPU; fully masked rows 0, causal is top-left."""
    q, k, v = (tensor.detach().cpu().double() for tensor in (query, key, value))
    groups = q.shape[-3] // k.shape[-3]
    k, v = (tensor.repeat_interleave(groups, -3) for tensor in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        bias = mask.detach().cpu()
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.double()
    return scores.softmax(-1).nan_to_num(0.0) @ v


def attend(backend: str | None, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """The call on one backend. UntestableError when that backend does not take it on this device."""
    member = getattr(SDPBackend, backend, None) if backend else None
    if backend and member is None:
        raise UntestableError(f"this torch has no {backend}")
    with sdpa_kernel(member) if member is not None else nullcontext():
        try:
            return F.scaled_dot_product_attention(query, key, value, **keywords)
        except RuntimeError as error:
            if any(
                text in str(error) for text in ("No available kernel", "No viable backend", "invalid dtype for bias")
            ):
                raise UntestableError(
                    f"{backend or 'scaled_dot_product_attention'} does not take this call here"
                ) from None
            raise


def compared(output: Tensor, right: Tensor) -> Finding:
    """Affected when the output is further than TOLERANCE from what is right, or not finite."""
    error = (output.detach().cpu().double() - right).abs().nan_to_num(math.inf, posinf=math.inf)
    worst = float(error.max()) if error.numel() else 0.0
    if worst <= TOLERANCE:
        return Finding(False, f"largest error {worst:.1e}")
    rows = (error.amax(-1) > TOLERANCE).flatten(0, -2).any(0).nonzero().flatten().tolist()
    what = f"query row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {output.shape[-2]} query rows"
    return Finding(True, f"{what} {'not finite' if math.isinf(worst) else f'off by {worst:.2g}'}")


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def causal(length: int, device: str, window: int | None = None) -> Tensor:
    """Bool mask (1, 1, L, L), causal; with a window, each row sees that many keys at most."""
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    return (visible if window is None else visible.triu(1 - window))[None, None].to(device)


def one_head(heads: int, keys: int, width: int, device: str, seed: int) -> Tensor:
    """(1, heads, keys, width) that repeats one head with stride 0."""
    return normal(1, 1, keys, width, device=device, seed=seed).expand(1, heads, keys, width)
