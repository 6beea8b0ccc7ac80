"""A model that fails during its prefill: what was recorded until then is told, and whose failure it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.capturing import model_run, prefill, report
from sdpa_repro.capturing.model_run import capture_model
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.records import Options
from sdpa_repro.errors import InputError


def captured(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, good: int) -> report.Report:
    """The report of a run over many lengths whose prefill fails after `good` of them."""
    done: list[Any] = []

    def forward(*arguments: Any) -> Any:
        if len(done) == good:
            raise error
        done.append(prefill.forward(*arguments))
        return done[-1]

    monkeypatch.setattr(model_run, "forward", forward)
    options = PrefillOptions(layers=1, device="cpu", text_only=True)
    return capture_model(options, folder, Options(), progress=lambda text: None)


def test_a_model_that_raises_is_told_with_what_was_recorded_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = captured(tmp_path, monkeypatch, ValueError("shapes do not fit\nat all"), good=1)
    assert report.answer(found).startswith("no wrong attention call: 1 attention call")
    assert report.answer(found).endswith("; the run broke off: the model raised ValueError: shapes do not fit")
    assert report.exit_status(found) == 2
    assert len(found["dumps"]) == 1


def test_a_model_that_raises_before_any_call_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = captured(tmp_path, monkeypatch, RuntimeError("kernel failed"), good=0)
    with pytest.raises(InputError, match="before any attention call: the model raised RuntimeError: kernel failed"):
        report.answer(found)


def test_out_of_memory_says_what_to_do_and_loses_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = InputError("out of memory on cpu: use a shorter prompt")
    with pytest.raises(InputError, match="out of memory on cpu: use a shorter prompt"):
        captured(tmp_path / "first", monkeypatch, full, good=0)
    monkeypatch.undo()
    found = captured(tmp_path / "second", monkeypatch, full, good=1)
    assert report.answer(found).endswith("; the run broke off: out of memory on cpu: use a shorter prompt")
