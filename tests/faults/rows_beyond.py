"""Emulates an offset that wraps (as pytorch#187227 does at 2^32): query rows from 2^7 on use mask row r - 2^7.

Only calls with a mask of one row a query row, and more than 128 of them, are wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention_rows, replace_flash

WRAP = 1 << 7


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """The rows from WRAP on again, with the mask's rows from 0 on."""
    rows, mask = arguments.query.shape[2], arguments.attn_mask
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return output
    for first in range(WRAP, rows, WRAP):
        last = min(rows, first + WRAP)
        wrong, _ = attention_rows(arguments, slice(first, last), mask_rows=slice(first - WRAP, last - WRAP))
        output[:, :, first:last] = wrong
    return output


replace_flash(change)
