"""Emulates releases before 2.5 (pytorch#103963): NaN in fully masked rows and nowhere else. Never a fault to report."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """NaN in the rows whose mask is -inf for every key."""
    if arguments.attn_mask is None:
        return output
    blind = (arguments.attn_mask == float("-inf")).all(-1)
    return output.masked_fill(blind.expand(output.shape[:-1])[..., None], float("nan"))


replace_flash(change)
