"""Emulates a kernel that leaves NaN in one row that can see keys: the last row of the last head."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """NaN in the last row of the last head of every batch entry."""
    output[:, -1, -1] = float("nan")
    return output


replace_flash(change)
