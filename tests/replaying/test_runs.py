from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdpa_repro.replaying.runs import Run, plan, visible


def looked_at(plans: list[list[Run]], rows: int, keys: int, step: int) -> tuple[Tensor, Tensor]:
    """How often each entry is looked at, and which of them are said to be visible, (L, S)."""
    count = torch.zeros(rows, keys, dtype=torch.int64)
    full = torch.zeros(rows, keys, dtype=torch.bool)
    for number, runs in enumerate(plans):
        for run in runs:
            first = number * step
            count[first + run.above : first + run.below, run.first : run.last] += 1
            full[first + run.above : first + run.below, run.first : run.last] = True
            full[first + run.start : first + run.stop, run.first : run.last] = False
    return count, full


def window(rows: int, keys: int, width: int) -> Tensor:
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    return (key <= row) & (key > row - width)


def random(rows: int, keys: int, share: float) -> Tensor:
    return torch.rand(rows, keys, generator=torch.Generator().manual_seed(0)) < share


MASKS = {
    "window": window(900, 1000, 140),
    "dense": random(300, 517, 0.5),
    "sparse": random(700, 700, 0.001),
    "block of keys hidden": torch.arange(600).expand(500, -1) % 300 > 150,
    "nothing visible": torch.zeros(300, 300, dtype=torch.bool),
    "one row": random(1, 700, 0.3),
    "one row for all": random(1, 700, 0.3).expand(600, -1),
    "odd memory": random(301, 520, 0.5)[:, 3:],
    "one column for all": random(400, 1, 0.5).expand(-1, 260),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("step", [64, 256])
@pytest.mark.parametrize("name", MASKS)
def test_every_visible_entry_is_looked_at_once_and_none_is_called_visible_that_is_not(
    name: str, step: int, is_causal: bool
) -> None:
    mask = MASKS[name]
    rows, keys = mask.shape
    seen = mask & torch.ones(rows, keys, dtype=torch.bool).tril() if is_causal else mask
    count, full = looked_at(plan(mask[None], is_causal, rows, keys, step, 256), rows, keys, step)
    assert count.max() <= 1
    assert (count[seen] == 1).all()
    assert seen[full].all()


def test_masks_of_several_heads_are_planned_for_all_of_them() -> None:
    masks = torch.stack([window(400, 400, 100), random(400, 400, 0.01)])
    count, full = looked_at(plan(masks, False, 400, 400, 256, 256), 400, 400, 256)
    assert (count[masks.any(0)] == 1).all()
    assert masks.all(0)[full].all()


def test_additive_masks_hide_at_half_of_the_smallest_number() -> None:
    hidden = ~window(300, 300, 20)
    mask = torch.zeros(300, 300, dtype=torch.float16).masked_fill(hidden, torch.finfo(torch.float16).min)
    assert plan(mask[None], False, 300, 300, 256, 256) == plan(~hidden[None], False, 300, 300, 256, 256)


def test_a_causal_call_masks_only_its_diagonal() -> None:
    runs = plan(None, True, 1024, 1024, 512, 256)[1]
    assert runs[0] == Run(0, 256, 0, 512, 0, 0)
    assert runs[2] == Run(512, 640, 0, 512, 0, 128)
    assert runs[-1] == Run(896, 1024, 384, 512, 384, 512)


def test_a_window_costs_its_own_area() -> None:
    plans = plan(window(4096, 4096, 512)[None], False, 4096, 4096, 1024, 512)
    area = sum((run.last - run.first) * (run.below - run.above) for runs in plans for run in runs)
    assert area <= 4096 * (512 + 128)


def test_without_a_mask_runs_are_chunks_of_keys() -> None:
    assert plan(None, False, 70, 300, 64, 128) == [
        [Run(0, 128, 0, 64, 0, 0), Run(128, 256, 0, 64, 0, 0), Run(256, 300, 0, 64, 0, 0)],
        [Run(0, 128, 0, 6, 0, 0), Run(128, 256, 0, 6, 0, 0), Run(256, 300, 0, 6, 0, 0)],
    ]


def test_nan_in_an_additive_mask_hides_nothing() -> None:
    mask = torch.tensor([0.0, float("nan"), -float("inf"), float("inf"), torch.finfo(torch.float32).min])
    assert visible(mask).tolist() == [True, True, False, True, False]
