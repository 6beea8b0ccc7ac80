"""Emulates pytorch#191937 (memory-efficient CUDA kernel, torch 2.2 to 2.13) in the CPU flash kernel.

The last query row uses mask row 0 when there is a mask, key and value have head stride 0, no gradient is
needed, L > 1, and L % 64 == 1 (head_dim up to 128) or L % 32 == 1 (above). Everything else is right.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mask_row import plant

NARROW_PERIOD = 64
WIDE_PERIOD = 32
REMAINDER = 1
ROW = 0

plant(narrow=NARROW_PERIOD, wide=WIDE_PERIOD, remainder=REMAINDER, row=ROW)
