"""Emulates no known bug: query rows 16 to 31 are 7 % too large. No hypothesis covers it."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

ROWS = slice(16, 32)
FACTOR = 1.07


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Scale the rows of one tile in every head."""
    output[:, :, ROWS] *= FACTOR
    return output


replace_flash(change)
