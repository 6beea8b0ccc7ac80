"""Attention by its definition, in float64, as plainly as it can be written: what the tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall


def weights(call: AttentionCall) -> Tensor:
    """Softmax weights (B, H, L, S) in float64; zero rows where nothing may be attended to."""
    query, key = call.query.double(), call.key.double()
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query @ key.mT * scale
    if call.attn_mask is not None:
        mask = call.attn_mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if call.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def attention(call: AttentionCall) -> Tensor:
    """The result (B, H, L, Ev) in float64."""
    value = call.value.double()
    if value.shape[-3] != call.query.shape[-3]:
        value = value.repeat_interleave(call.query.shape[-3] // value.shape[-3], -3)
    return weights(call) @ value
