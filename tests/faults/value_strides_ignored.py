"""Emulates ROCm/pytorch#3230: value is read as if it were contiguous from its first element.

Right when value is contiguous, and when the memory that a contiguous value would need is not there (an expanded
head), since reading it would be a crash or luck.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Attention over value's memory in storage order."""
    value = arguments.value
    held = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    if value.is_contiguous() or held < value.numel():
        return output
    dense = torch.empty(value.shape, device="meta").stride()
    misread = value.as_strided(value.shape, dense, value.storage_offset())
    return attention(replace(arguments, value=misread))[0]


replace_flash(change)
