"""Planted faults come down to their true minimum, worked out by hand from what each fault file says it does.

Minima are over what reducing looks at: E and Ev multiples of 8, L = S where the call had that.
"""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.reducing.reduction import Reduction, reduce
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import in_process, isolated
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call

FAULTS = Path(__file__).resolve().parents[1] / "faults"


@dataclass(frozen=True)
class Case:
    """A call that fails under a fault, and B, H, Hkv, L, S, E of the smallest one that does.

    needed: rows of the table that say so; no others may. calls: more trials than this would be a slow search.
    """

    fault: str
    call: Callable[[], AttentionCall]
    smallest: tuple[int, int, int, int, int, int]
    needed: set[str]
    calls: int = 500


def dense(**words: object) -> AttentionCall:
    return make_call(**{"heads": 4, "width": 64, "layout": "dense", **words})  # type: ignore[arg-type]


def float_mask() -> AttentionCall:
    call = dense(rows=70, padding=5)
    assert call.attn_mask is not None
    return replace(call, attn_mask=torch.zeros(call.attn_mask.shape).masked_fill(~call.attn_mask, -math.inf))


def low_scores() -> AttentionCall:
    call = dense(rows=50, dtype=torch.float32)
    return replace(call, query=call.query + 4, key=call.key - 4)


def transposed_value() -> AttentionCall:
    call = dense(rows=50)
    return replace(call, value=call.value.transpose(1, 2).contiguous().transpose(1, 2))


def planted_value() -> AttentionCall:
    call = dense(rows=70, batch=2)
    call.key[1, 2, 31, 5] = 72.5
    return call


LAYOUT = "key and value layout"
CASES = [
    Case("last_key_tile_dropped", lambda: dense(rows=289, padding=7), (1, 1, 1, 33, 33, 8), {"L", "S"}),
    Case("half_tile_padding", lambda: dense(rows=192), (1, 1, 1, 64, 64, 8), {"L"}),
    # A transposed view of one head or one row is contiguous, so two of each.
    Case("value_strides_ignored", transposed_value, (1, 2, 2, 2, 2, 8), {"H", "L", "S", LAYOUT}),
    Case("query_transposed_short", lambda: dense(rows=7), (1, 2, 2, 2, 2, 8), {"H", "L", "S", "query layout"}),
    # One key has weight 1 whatever the scale or the finite mask.
    Case("scale_ignored", lambda: dense(rows=50, scale=1.0), (1, 1, 1, 2, 2, 8), {"L", "S", "scale"}),
    Case("float_mask_as_half", float_mask, (1, 1, 1, 2, 2, 8), {"L", "S", "mask"}),
    Case("nan_log_sum_exp", low_scores, (1, 1, 1, 1, 1, 8), {"values"}),
    Case("rows_beyond", lambda: dense(rows=289), (1, 1, 1, 129, 129, 8), {"L", "mask"}, 700),
    # h % Hkv differs from h // (H / Hkv) from two groups of two heads on.
    Case(
        "gqa_wrong_head",
        lambda: make_call(heads=8, kv_heads=4, rows=50, width=64, layout="gqa"),
        (1, 4, 2, 1, 1, 8),
        {"H", "enable_gqa"},
    ),
    Case("noise_in_column", lambda: dense(rows=50), (1, 1, 1, 1, 1, 8), set()),
    Case("value_scaled_in_tile", lambda: dense(rows=50), (1, 1, 1, 17, 17, 8), {"L"}),
    Case("planted_value", planted_value, (1, 1, 1, 1, 1, 8), {"values"}),
    Case(
        "altered_191937",
        lambda: make_call(batch=2, heads=4, rows=293, width=80),
        (1, 2, 2, 5, 5, 8),
        {"H", "L", "S", "mask", LAYOUT},
    ),
]


@pytest.fixture
def plant() -> Iterator[Callable[[str], None]]:
    """Plants a fault file in this process; the real kernel is back after the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: runpy.run_path(str(FAULTS / f"{name}.py")) and None
    sys.modules["emulation"].restore()
    torch.set_num_threads(threads)


def sizes(call: AttentionCall) -> tuple[int, int, int, int, int, int]:
    """B, H, Hkv, L, S, E."""
    batch, heads, rows, width = call.query.shape
    return batch, heads, call.key.shape[1], rows, call.key.shape[2], width


def needed(found: Reduction) -> set[str]:
    return {row.name for row in found.rows if row.needed}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.fault))
def test_a_planted_fault_reaches_its_true_minimum(case: Case, plant: Callable[[str], None]) -> None:
    plant(case.fault)
    found = reduce(case.call(), in_process(Backend.FLASH_ATTENTION))
    assert (sizes(found.call), found.closed) == (case.smallest, True)
    assert needed(found) == case.needed
    assert found.calls <= case.calls


@pytest.mark.slow
def test_a_crash_reaches_its_true_minimum() -> None:
    with isolated(Backend.FLASH_ATTENTION, preload=[FAULTS / "crash_single_query.py"]) as trial:
        found = reduce(dense(rows=1, keys=50), trial)
    assert (sizes(found.call), found.closed) == ((1, 1, 1, 1, 2, 8), True)
    assert found.result.status is Status.CRASHED
    assert found.calls <= 40


@pytest.mark.slow
def test_a_fault_of_few_rows_shows_in_exactly_those(plant: Callable[[str], None]) -> None:
    plant("pytorch_191937")
    found = reduce(make_call(heads=3, rows=97, width=256, padding=5), in_process(Backend.FLASH_ATTENTION))
    assert sizes(found.call) == (1, 2, 2, 65, 65, 8)
    assert found.result.checked is not None
    assert found.result.checked.rows == ((0, 0, 64), (0, 1, 64))
