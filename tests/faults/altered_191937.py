"""Emulates no known bug: pytorch#191937 with other constants (L % 48 == 5, mask row 3, any head_dim).

Detection that knows the constants of the real bug by heart does not find this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mask_row import plant

PERIOD = 48
REMAINDER = 5
ROW = 3

plant(narrow=PERIOD, wide=PERIOD, remainder=REMAINDER, row=ROW)
