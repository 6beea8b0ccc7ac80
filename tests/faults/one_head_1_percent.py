"""Emulates a small, local error: one row of one head is 1 % too large. Fixed tolerances and cosines miss it."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

FACTOR = 1.01


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Scale the middle row of the last head in the first batch entry."""
    output[0, -1, output.shape[2] // 2] *= FACTOR
    return output


replace_flash(change)
