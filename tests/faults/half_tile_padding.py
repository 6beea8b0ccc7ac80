"""Emulates padding that takes part: when L % 128 == 64 the keys missing to the next multiple of 128 score 0.

Their value is 0, so they only add to the sum that the weights are divided by. No mask reaches them. (When S is a
multiple of 128 nothing is missing, and the output is right.)
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash

TILE = 128
HALF = 64


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Multiply each row by Z / (Z + n): Z the row's sum of exponentials, n the number of padding keys."""
    missing = -arguments.key.shape[2] % TILE
    if arguments.query.shape[2] % TILE != HALF or missing == 0:
        return output
    logsumexp = attention(arguments)[1]
    return output * torch.sigmoid(logsumexp - math.log(missing))[..., None]


replace_flash(change)
