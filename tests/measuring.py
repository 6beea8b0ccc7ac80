"""Rows of the benchmarks: ratios of two ways of doing the same work, taken in turns in the same minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from sdpa_repro.attention import AttentionCall

REPEATS = 3


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    ratio: float
    aim: float
    detail: str


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def paired(first: Callable[[], Any], second: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Median wall times of two actions that take turns, after one run of each."""
    first(), second()
    times = [(seconds(first), seconds(second)) for _ in range(repeats)]
    return median(one for one, _ in times), median(two for _, two in times)


def causal_call(rows: int = 4096, heads: int = 16, width: int = 128) -> AttentionCall:
    """A causal bfloat16 call of normal values, 1 x heads x rows x width."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, rows, width, generator=random).bfloat16() for _ in range(3))
    return AttentionCall(query, key, value, is_causal=True)
