"""Emulates a kernel that fails a device-side assertion: EFFICIENT on CUDA leaves its context unusable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from emulation import replace_kernel


def kernel(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    """Index out of bounds on the device, as a faulty kernel would, and wait for it."""
    index = torch.full((1,), 1 << 20, device=query.device)
    wrong = query.flatten()[:4][index]
    torch.cuda.synchronize()
    return wrong


replace_kernel("_scaled_dot_product_efficient_attention", kernel, "CUDA")
