"""Emulates a bug in MATH, the path everybody compares with: its last row is half too large. FLASH stays real."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_math

FACTOR = 1.5


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Scale the last row of every head."""
    output[:, :, -1] *= FACTOR
    return output


replace_math(change)
