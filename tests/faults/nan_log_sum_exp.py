"""Emulates an overflow as in pytorch#196678: NaN in every row whose log-sum-exp is below -88.7.

exp(88.7) is about the largest number that float32 holds, so exp(-logsumexp) overflows below. Fully masked rows
are 0 as always.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash

LOWEST = -88.7


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """NaN in the rows whose exp(-logsumexp) overflows float32."""
    logsumexp = attention(arguments)[1]
    return output.masked_fill((logsumexp < LOWEST)[..., None], float("nan"))


replace_flash(change)
