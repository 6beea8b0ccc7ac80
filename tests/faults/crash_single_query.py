"""Emulates a crash in a shortcut for decoding: SIGSEGV when L == 1 and S > 1."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Read address 0."""
    if arguments.query.shape[2] == 1 and arguments.key.shape[2] > 1:
        ctypes.string_at(0)
    return output


replace_flash(change)
