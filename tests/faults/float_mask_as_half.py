"""Emulates PR #191612: with a 16-bit query a float32 mask is read as 16-bit, element i from bytes 2i and 2i + 1.

CPU FLASH takes a float32 mask together with a 16-bit query as it is, so the real bytes are misread here.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Attention with the mask's bytes taken for numbers of the query's dtype, at the mask's own strides."""
    query, mask = arguments.query, arguments.attn_mask
    if mask is None or mask.dtype != torch.float32 or query.element_size() != 2:
        return output
    count = 1 + sum((size - 1) * stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    halves = mask.as_strided((count,), (1,), mask.storage_offset()).view(query.dtype)
    return attention(replace(arguments, attn_mask=halves.as_strided(mask.shape, mask.stride())))[0]


replace_flash(change)
