"""Emulates a loop over whole key tiles: when S % 32 == 1 (and S > 32) the last tile, one key, is left out."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash

TILE = 32
REMAINDER = 1


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Attention over the keys before the last S % TILE."""
    keys = arguments.key.shape[2]
    rest = keys % TILE
    if keys <= TILE or rest != REMAINDER:
        return output
    mask = arguments.attn_mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :-rest]
    short = replace(arguments, key=arguments.key[:, :, :-rest], value=arguments.value[:, :, :-rest], attn_mask=mask)
    return attention(short)[0]


replace_flash(change)
