"""A cell of the table from an output that was saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

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
