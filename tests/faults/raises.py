"""Emulates a kernel that fails to launch: FLASH raises a RuntimeError for every call."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

MESSAGE = "emulated failure: no kernel image is available for execution on the device"


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Raise."""
    raise RuntimeError(MESSAGE)


replace_flash(change)
