"""Emulates a race beyond noise: in every second call of a process one row is half too large, the rest is right."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

calls = itertools.count()


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Scale the last row of the last head by 1.5 in calls 1, 3, 5, ... of this process."""
    if next(calls) % 2:
        output[:, -1, -1] *= 1.5
    return output


replace_flash(change)
