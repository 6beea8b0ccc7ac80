"""The error of every row, packed: nothing wrong is lost, and it is what replay found."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sdpa_repro.dump import load
from sdpa_repro.publishing.heat import (
    LIMIT,
    LISTED,
    MASKED,
    MOST_CELLS,
    MOST_PLANES,
    NONFINITE,
    UNDECIDED,
    Heat,
    encoded,
    heat,
    packed,
)
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.replay import replay
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump


def made(ratio: torch.Tensor, live: torch.Tensor | None = None, decides: torch.Tensor | None = None) -> Heat:
    live = torch.ones_like(ratio, dtype=torch.bool) if live is None else live
    return packed("MATH", ratio, ratio / 10, live=live, decides=live if decides is None else decides)


def test_a_code_is_above_the_limit_exactly_where_the_ratio_is_above_one() -> None:
    told = [0.0, 1e-9, 0.5, 0.999999, 1.0, 1.0 + 1e-12, 1.1, 1e9, float("inf"), float("nan")]
    codes = encoded(torch.tensor(told, dtype=torch.float64)).tolist()
    assert [code > LIMIT for code in codes] == [False] * 5 + [True] * 5
    assert codes[-2:] == [NONFINITE, NONFINITE]
    assert codes[7] < NONFINITE
    assert codes == sorted(codes)


def test_a_factor_of_ten_is_as_far_everywhere() -> None:
    codes = encoded(torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0], dtype=torch.float64)).tolist()
    assert {high - low for low, high in pairwise(codes)} == {32}


def test_rows_that_do_not_decide_have_codes_of_their_own_and_are_never_wrong() -> None:
    ratio = torch.full((1, 1, 4), 50.0, dtype=torch.float64)
    live = torch.tensor([[[False, True, True, True]]])
    found = made(ratio, live, live & torch.tensor([True, False, True, True]))
    assert found.codes is not None
    assert found.codes[0, :2].tolist() == [MASKED, UNDECIDED]
    assert (found.wrong, found.judged) == (2, 2)
    assert [(bad.first, bad.last) for bad in found.bad] == [(2, 3)]


def test_wrong_rows_are_grouped_by_neighbours_with_the_same_heads() -> None:
    ratio = torch.full((2, 4, 100), 0.1, dtype=torch.float64)
    ratio[0, :, 40:44] = 3.0
    ratio[0, 2, 42] = 7.0
    ratio[1, 1, 99] = float("inf")
    ratio[1, 3, 98] = 2.0
    found = made(ratio)
    told = [(bad.batch, bad.first, bad.last, bad.heads, bad.ratio, bad.worst) for bad in found.bad]
    assert told == [
        (0, 40, 43, (0, 1, 2, 3), 7.0, (2, 42)),
        (1, 98, 98, (3,), 2.0, (3, 98)),
        (1, 99, 99, (1,), float("inf"), (1, 99)),
    ]
    assert found.bad[0].max_abs == pytest.approx(0.7)
    assert found.wrong == 18


def test_of_too_many_groups_the_worst_are_listed_in_order() -> None:
    ratio = torch.full((1, 1, 1000), 0.1, dtype=torch.float64)
    ratio[0, 0, ::2] = torch.linspace(2, 90, 500, dtype=torch.float64)
    found = made(ratio)
    assert len(found.bad) == LISTED
    assert found.left_out == 500 - LISTED
    assert [bad.first for bad in found.bad] == list(range(1000 - 2 * LISTED, 1000, 2))


def test_of_very_many_rows_each_stretch_keeps_its_worst() -> None:
    ratio = torch.full((1, 64, 16_385), 0.1, dtype=torch.float64)
    ratio[0, 5, 16_384] = 9.0
    ratio[0, 6, 7001] = 9.0
    found = made(ratio)
    assert found.codes is not None
    assert found.step == 3
    assert found.codes.numel() <= MOST_CELLS + 64
    assert (found.codes > LIMIT).nonzero().tolist() == [[5, 16_384 // 3], [6, 7001 // 3]]


def test_of_very_many_heads_the_worst_are_kept() -> None:
    ratio = torch.full((3, 2048, 4), 0.1, dtype=torch.float64)
    ratio[2, 2047, 1] = 5.0
    found = made(ratio)
    assert found.codes is not None
    assert len(found.planes) == MOST_PLANES == len(found.codes)
    assert found.planes[-1] == 3 * 2048 - 1


def test_an_empty_output_has_no_picture() -> None:
    assert made(torch.zeros(1, 2, 0, dtype=torch.float64)).missing == "the output is empty"


@pytest.mark.slow
def test_the_rows_are_those_that_replay_finds_wrong(tmp_path: Path) -> None:
    with torch.inference_mode():
        path = write_dump(make_call(rows=33, heads=3, padding=3, batch=2), tmp_path / "x.pt")
    preload = fault("pytorch_191937")
    cell = next(
        cell
        for cell in replay(path, device="cpu", dtypes=("captured",), runs=1, preload=preload).cells
        if cell.backend == "default"
    )
    found = heat(load(path), Backend.DEFAULT, preload=preload)
    assert cell.bad is not None
    assert cell.ratio is not None
    assert (found.batches, found.heads, found.rows) == (2, 3, 33)
    assert found.wrong == cell.bad.count
    assert tuple(bad.first for bad in found.bad) == cell.bad.rows * 2
    assert found.highest == pytest.approx(cell.ratio)
    assert found.bad[cell.bad.worst[0]].max_abs == pytest.approx(cell.max_abs)
    assert found.codes is not None
    assert found.codes[:, :3].eq(MASKED).all()


@pytest.mark.slow
def test_a_kernel_that_ends_the_process_leaves_a_sentence(tmp_path: Path) -> None:
    path = write_dump(make_call(rows=8, heads=1), tmp_path / "x.pt")
    found = heat(load(path), Backend.FLASH_ATTENTION, preload=fault("segfault"))
    assert found.codes is None
    assert found.missing.startswith("FLASH_ATTENTION ends the process (")
    assert "SIGSEGV" in found.missing
    absent = heat(load(path), Backend.CUDNN_ATTENTION)
    assert absent.missing == (
        "CUDNN_ATTENTION does not take this call (does not exist on cpu): there is no output to draw"
    )
