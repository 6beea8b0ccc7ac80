"""Dumps for the tests of replay, written as capture writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import save, snapshot
from sdpa_repro.environment import capture_context, software

FAULTS = Path(__file__).resolve().parent.parent / "faults"


def write_dump(call: AttentionCall, path: Path, **recorded: Any) -> Path:
    """Run the call here and dump it with its output (none when it raises); `recorded` as in `dump.snapshot`."""
    try:
        output = F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)
    except (RuntimeError, IndexError):
        output = None
    recorded = {"context": capture_context(call), "environment": software("cpu"), **recorded}
    save(snapshot(call, output, **recorded), path)
    return path


def fault(name: str) -> list[Path]:
    """The preload that plants a fault of tests/faults."""
    return [FAULTS / f"{name}.py"]
