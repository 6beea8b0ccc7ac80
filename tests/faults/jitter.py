"""Emulates atomics in an order that varies: runs differ in their last bit, within noise. Not a fault."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash

SHARE = 0.02
random = torch.Generator().manual_seed(0)


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Move a random 2 % of the entries by one unit in the last place of the output's dtype."""
    unit = torch.finfo(arguments.query.dtype).eps
    chosen = torch.rand(output.shape, generator=random) < SHARE
    return torch.where(chosen, output * (1 + unit), output)


replace_flash(change)
