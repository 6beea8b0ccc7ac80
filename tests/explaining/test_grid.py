"""A grid around a dumped call: failing lengths of each form, crashes that cost a cell, an end before the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.errors import InputError
from sdpa_repro.explaining import grid
from sdpa_repro.explaining.grid import sweep
from sdpa_repro.explaining.grid_result import Cell, Grid, Row
from sdpa_repro.explaining.kinds import Kind
from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.replaying.backends import Backend
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump

KIND = Kind(Backend.DEFAULT, "bfloat16", 8, "as-dumped")


def dump(folder: Path, **shape: Any) -> Path:
    """A dump without gradients, as a model's prefill leaves one."""
    with torch.inference_mode():
        return write_dump(make_call(**{"heads": 2, "rows": 33, "padding": 3, **shape}), folder / "call.pt")


@pytest.mark.slow
def test_each_form_fails_at_exactly_the_lengths_of_the_planted_rule(tmp_path: Path) -> None:
    found = sweep(
        dump(tmp_path),
        lengths=range(1, 67),
        head_dims=(128, 136),
        layouts=("as-dumped", "dense"),
        preload=fault("pytorch_191937"),
        apart=False,
    )
    failing = {(row.kind.head_dim, row.kind.layout): row.fails for row in found.rows}
    assert failing == {
        (128, "as-dumped"): (65,),
        (128, "dense"): (),
        (136, "as-dumped"): (33, 65),
        (136, "dense"): (),
    }
    assert all(len(row.passes) == 66 - len(row.fails) - 1 for row in found.rows)
    assert all(list(row.untested.values()) == [1] for row in found.rows)
    assert found.exit_status == 1
    assert found.complete
    assert found.sentence.endswith("2 of 4 forms of the call fail (preloaded: pytorch_191937.py)")
    document = json.loads(json.dumps(found.document()))
    assert document["rows"][2]["failing"] == [[33, 33], [65, 65]]
    assert document["lengths"] == [[1, 66]]
    assert document["preloaded"][0]["name"] == "pytorch_191937.py"


@pytest.mark.slow
def test_a_crash_costs_one_cell(tmp_path: Path) -> None:
    found = sweep(
        dump(tmp_path, rows=3, width=8, padding=0),
        lengths=(1, 2, 3),
        vary="L",
        preload=fault("crash_single_query"),
        timeout=120,
    )
    assert [cell.status for cell in found.rows[0].cells] == ["crashed", "agrees", "agrees"]
    assert found.exit_status == 1


def test_a_healthy_call_passes_around_its_own_length(tmp_path: Path) -> None:
    found = sweep(dump(tmp_path, rows=4, width=8, padding=0), lengths=(2, 3, 4), apart=False, backends=("MATH",))
    assert (found.exit_status, found.tested, found.rows[0].passes) == (0, 3, (2, 3, 4))
    assert found.sentence == "no failure in 3 calls (1 form of the call) on cpu"


def test_backends_that_are_not_here_are_told_apart_from_healthy_ones(tmp_path: Path) -> None:
    found = sweep(dump(tmp_path, rows=4, width=8), lengths=(3, 4), apart=False, backends=("CUDNN_ATTENTION",))
    assert (found.exit_status, found.tested) == (2, 0)
    assert "nothing could be tested: declined: does not exist on cpu" in found.sentence


def test_out_of_budget_nothing_is_lost_and_nothing_claimed(tmp_path: Path) -> None:
    found = sweep(dump(tmp_path, rows=4, width=8), apart=False, budget=1e-9)
    assert (found.complete, found.tested, found.exit_status) == (False, 0, 130)
    assert "stopped before the end" in found.sentence


def test_ctrl_c_keeps_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = grid.attempt, []

    def interrupted(*arguments: Any) -> Any:
        made.append(arguments)
        if len(made) == 6:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(grid, "attempt", interrupted)
    found = sweep(dump(tmp_path, rows=9, width=8, padding=0), lengths=range(2, 9), apart=False, backends=("MATH",))
    assert found.complete is False
    assert found.rows[0].passes == (2, 3, 4)  # two of the five trials were of the dumped call itself
    assert found.exit_status == 0


def test_lengths_are_those_around_the_dumped_one_by_default() -> None:
    assert grid._numbers((), Axis("L and S", 289, 289)) == list(range(224, 354))
    assert grid._numbers((), Axis("L and S", 9, 9)) == list(range(1, 74))
    assert grid._numbers((1, 5, 6, 5), Axis("L and S", 9, 4)) == [6]
    with pytest.raises(InputError, match="no length"):
        grid._numbers((1, 2), Axis("L and S", 9, 4))


def test_unknown_words_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="vary"):
        sweep(dump(tmp_path), vary="E")


def row(fails: tuple[int, ...], passes: tuple[int, ...], status: str = "diverges") -> Row:
    cells = [Cell(KIND, number, status, float(number)) for number in fails]
    cells += [Cell(KIND, number, "agrees") for number in passes]
    return Row(KIND, Axis("L and S", 33, 33), tuple(sorted(cells, key=lambda cell: cell.number)))


def test_three_failing_lengths_make_a_rule_and_fewer_are_listed() -> None:
    others = tuple(number for number in range(2, 100) if number % 32 != 1)
    assert row((33, 65, 97), others).where == "L % 32 == 1"
    assert row((33, 65), others).where == "L in 33, 65"
    assert row((33, 34, 35), ()).where == "every length tried"
    assert row((), others).where == ""
    worst = row((33, 65, 97), others).worst
    assert worst is not None
    assert worst.number == 97


def test_statuses_of_a_grid_count_failures_only() -> None:
    def of(*rows: Row, complete: bool = True) -> Grid:
        return Grid(Path("x.pt"), "cpu", Axis("L and S", 33, 33), (33,), rows, complete)

    assert of(row((33,), ()), row((), (33,))).exit_status == 1
    assert of(row((), (33,))).exit_status == 0
    assert of(row((), ())).exit_status == 2
    assert of(row((), ()), complete=False).exit_status == 130
