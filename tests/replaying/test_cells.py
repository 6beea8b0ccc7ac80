"""A cell of the table from an output that was saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.replaying.cells import Cell, judged
from sdpa_repro.replaying.conclusion import describe
from sdpa_repro.replaying.reference import reference
from sdpa_repro.replaying.verdict import Status, row_errors
from sdpa_repro.replaying.worker import Outcome
from tests.calls import make_call


def test_a_number_where_the_definition_has_nan_is_not_told_as_nan(tmp_path: Path) -> None:
    call = make_call(heads=2, rows=5, width=8, dtype=torch.float32)
    query = call.query.clone()
    query[0, 1, 3, 0] = torch.nan
    call = replace(call, query=query)
    expected = reference(call)
    output = expected.output.float().nan_to_num(0.0)
    torch.save({"first": output}, tmp_path / "out.pt")
    values: Any = SimpleNamespace(reference=expected, call=call, why="")
    plain = Cell("FLASH_ATTENTION", "float32", Status.AGREES)
    cell = judged(
        plain, Outcome("done", answer={"runs": 1}), tmp_path / "out.pt", row_errors(output, expected), values, {}
    )
    assert cell.status is Status.NONFINITE
    said = "FLASH_ATTENTION is finite where the definition gives NaN, in query row 3 of head 1"
    assert describe(cell, "FLASH_ATTENTION", heads=2) == said


def cell_of(runs: dict[str, Tensor], call: AttentionCall, folder: Path) -> Cell:
    """The cell of a kernel whose runs gave these outputs."""
    torch.save(runs, folder / "out.pt")
    expected = reference(call)
    values: Any = SimpleNamespace(reference=expected, call=call, why="")
    plain, outcome = Cell("FLASH_ATTENTION", "float32", Status.AGREES), Outcome("done", answer={"runs": 2})
    return judged(plain, outcome, folder / "out.pt", row_errors(runs["first"], expected), values, {})


def test_nan_in_the_same_rows_of_every_run_is_not_unstable(tmp_path: Path) -> None:
    call = make_call(rows=5, width=8, dtype=torch.float32)
    first = reference(call).output.float()
    first[0, 1, 3] = torch.nan
    other = first.clone()
    other[0, 0, 2, 0] *= 1 + 2**-22  # other bits, within noise
    cell = cell_of({"first": first, "other": other}, call, tmp_path)
    assert cell.status is Status.NONFINITE
    assert "within noise" in cell.remark
    assert "inf" not in cell.remark


def test_nan_in_one_run_only_is_unstable(tmp_path: Path) -> None:
    call = make_call(rows=5, width=8, dtype=torch.float32)
    first = reference(call).output.float()
    first[0, 1, 3] += 1
    other = first.clone()
    other[0, 0, 2] = torch.nan
    assert cell_of({"first": first, "other": other}, call, tmp_path).status is Status.UNSTABLE


def test_an_output_of_a_wrong_shape_is_an_error_of_its_kernel(tmp_path: Path) -> None:
    torch.save({"first": torch.zeros(1, 4, 5, 3)}, tmp_path / "out.pt")
    call = make_call(rows=5, width=8, dtype=torch.float32)
    values: Any = SimpleNamespace(reference=reference(call), call=call, why="")
    plain = Cell("FLASH_ATTENTION", "float32", Status.AGREES)
    cell = judged(plain, Outcome("done"), tmp_path / "out.pt", None, values, {})
    assert cell.status is Status.ERROR
    assert "(1, 4, 5, 3)" in cell.reason
