"""Emulates a kernel that never returns: FLASH sleeps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

SECONDS = 3600


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Sleep for an hour."""
    time.sleep(SECONDS)
    return output


replace_flash(change)
