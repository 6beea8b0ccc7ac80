"""The mask as a grid: shares are those of the definition, and nothing is rounded away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdpa_repro.publishing import mask_grid as grids
from sdpa_repro.publishing.mask_grid import mask_grid
from tests.calls import make_call


def test_a_small_causal_mask_is_drawn_entry_by_entry() -> None:
    grid = mask_grid(make_call(rows=5, heads=2, padding=2))
    assert grid is not None
    expected = torch.ones(5, 5).tril()
    expected[:, :2] = 0
    assert torch.equal(grid.cells, (expected * 255).to(torch.uint8))
    assert grid.masked.tolist() == [2, 2, 0, 0, 0]
    assert grid.masked_rows == ((0, 1),)
    assert grid.alone


def test_a_cell_tells_all_and_nothing_from_almost() -> None:
    mask = torch.ones(1, 1, 400, 400, dtype=torch.bool)
    mask[0, 0, 0, 0] = False
    mask[0, 0, :, 300:] = False
    mask[0, 0, 399, 399] = True
    grid = mask_grid(replace(make_call(rows=400, heads=1, mask=None, width=8), attn_mask=mask), side=4)
    assert grid is not None
    assert (grid.tall, grid.wide) == (100, 100)
    assert grid.cells[0].tolist() == [253, 255, 255, 0]
    assert grid.cells[3].tolist() == [255, 255, 255, 1]


def test_sizes_that_do_not_divide_leave_a_narrower_last_cell() -> None:
    grid = mask_grid(make_call(rows=7, keys=11, heads=1, mask=None, width=8), side=3)
    assert grid is not None
    assert grid.cells.tolist() == [[255] * 3] * 3
    assert (grid.tall, grid.wide) == (3, 4)


def test_a_row_that_is_partly_in_a_masked_cell_is_told_apart() -> None:
    grid = mask_grid(make_call(rows=6, heads=1, padding=3, width=8), side=3)
    assert grid is not None
    assert grid.masked.tolist() == [2, 1, 0]


def test_is_causal_without_a_mask_is_drawn() -> None:
    grid = mask_grid(make_call(rows=4, heads=1, mask="flag", width=8))
    assert grid is not None
    assert torch.equal(grid.cells, (torch.ones(4, 4).tril() * 255).to(torch.uint8))


def test_of_a_huge_mask_some_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "MOST_ENTRIES", 4 * 64 * 2)
    grid = mask_grid(make_call(rows=64, heads=1, mask="flag", width=8), side=4)
    assert grid is not None
    assert grid.sampled
    assert grid.cells[0, 0] not in (0, 255)
    assert grid.cells[3, 0] == 255
    assert grid.cells[0, 3] == 0


def test_a_mask_that_does_not_fit_or_an_empty_call_has_no_grid() -> None:
    call = make_call(rows=4, heads=1, width=8)
    assert mask_grid(replace(call, attn_mask=torch.ones(3, 3, dtype=torch.bool))) is None
    assert mask_grid(replace(call, query=call.query[:, :, :0], attn_mask=None)) is None
