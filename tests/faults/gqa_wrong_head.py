"""Emulates interleaved grouped queries: query head h reads key/value head h % Hkv instead of h // (H / Hkv).

Shows in calls with `enable_gqa`, where the kernel sees fewer key/value heads than query heads and more than one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Attention with the key/value heads repeated as a whole, not each by itself."""
    repeats = arguments.query.shape[1] // arguments.key.shape[1]
    key, value = (tensor.repeat(1, repeats, 1, 1) for tensor in (arguments.key, arguments.value))
    return attention(replace(arguments, key=key, value=value))[0]


replace_flash(change)
