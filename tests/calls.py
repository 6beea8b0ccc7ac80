"""Attention calls for the tests: the shapes, layouts and masks of real models, from seeded normal values."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall


def causal_mask(rows: int, keys: int, padding: int = 0) -> Tensor:
    """Bool mask (1, 1, L, S): causal from the top left, the first `padding` keys hidden (left padding)."""
    visible = torch.ones(rows, keys, dtype=torch.bool).tril()
    visible[:, :padding] = False
    return visible[None, None]


def make_call(
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 1,
    rows: int = 33,
    keys: int | None = None,
    width: int = 136,
    value_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    mask: str | None = "causal",
    padding: int = 0,
    layout: str = "expanded",
    scale: float | None = None,
    seed: int = 0,
) -> AttentionCall:
    """A call with normal values: query (batch, heads, rows, width) as a transposed projection output.

    layout: "expanded" (key/value heads repeated with stride 0 as `repeat_kv` does for one KV head),
    "dense", or "gqa" (kv_heads kept, `enable_gqa=True`). mask: None, "causal" (materialised bool),
    "float" (the same, additive), or "flag" (`is_causal`).
    """
    keys = rows if keys is None else keys
    value_width = width if value_width is None else value_width
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    query = normal(batch, rows, heads, width).transpose(1, 2)
    key = normal(batch, kv_heads, keys, width)
    value = normal(batch, kv_heads, keys, value_width)
    if layout == "expanded":
        repeats = heads // kv_heads
        key = key[:, :, None].expand(batch, kv_heads, repeats, keys, width).reshape(batch, heads, keys, width)
        value = value[:, :, None].expand(batch, kv_heads, repeats, keys, value_width)
        value = value.reshape(batch, heads, keys, value_width)
    elif layout == "dense":
        key = key.repeat_interleave(heads // kv_heads, 1)
        value = value.repeat_interleave(heads // kv_heads, 1)
    bias: Tensor | None = None
    if mask in ("causal", "float"):
        bias = causal_mask(rows, keys, padding)
    if mask == "float" and bias is not None:
        bias = torch.zeros(bias.shape, dtype=dtype).masked_fill(~bias, float("-inf"))
    return AttentionCall(query, key, value, bias, is_causal=mask == "flag", scale=scale, enable_gqa=layout == "gqa")
