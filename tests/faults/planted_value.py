"""Emulates a kernel that takes a large key for padding: keys with an entry above 60 (in size) are left out.

Only keys that the mask shows count; a row that sees nothing else gets 0. Every other call is right.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash

LARGEST = 60.0


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Attention with the large keys hidden."""
    query, key, mask = arguments.query, arguments.key, arguments.attn_mask
    large = (key.abs() > LARGEST).any(-1)
    if not bool(large.any()):
        return output
    large = large.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None]
    shown = torch.zeros(1, dtype=query.dtype) if mask is None else mask
    hidden = shown.expand(*query.shape[:-1], key.shape[2]).masked_fill(large, float("-inf"))
    return attention(replace(arguments, attn_mask=hidden))[0]


replace_flash(change)
