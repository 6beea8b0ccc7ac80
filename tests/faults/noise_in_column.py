"""Emulates no known bug: output column 3 is the cosine of column 0. No hypothesis covers it."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

SOURCE = 0
TARGET = 3


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Replace one column by a function of another, in every row of every head (Ev > 3)."""
    if output.shape[-1] > TARGET:
        output[..., TARGET] = output[..., SOURCE].cos()
    return output


replace_flash(change)
