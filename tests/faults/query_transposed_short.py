"""Emulates pytorch#163597: a query that is a transposed view is read as contiguous when L <= 8.

Key and value are read by their strides; longer and contiguous queries are right.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import Arguments, attention, replace_flash

LONGEST = 8


def change(output: Tensor, arguments: Arguments) -> Tensor:
    """Attention of the query's memory in storage order."""
    query = arguments.query
    held = query.untyped_storage().nbytes() // query.element_size() - query.storage_offset()
    if query.shape[2] > LONGEST or query.is_contiguous() or held < query.numel():
        return output
    dense = torch.empty(query.shape, device="meta").stride()
    misread = query.as_strided(query.shape, dense, query.storage_offset())
    return attention(replace(arguments, query=misread))[0]


replace_flash(change)
