"""Emulates a kernel that divides an integer by zero (pytorch#141218, #141219): FLASH ends the process with SIGFPE."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Send this process the signal that the processor's division trap ends in."""
    signal.signal(signal.SIGFPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGFPE)
    return output


replace_flash(change)
