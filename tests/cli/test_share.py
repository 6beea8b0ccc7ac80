"""`sdpa-repro share`: the first line and the status say whether captured values are inside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdpa_repro import cli
from sdpa_repro.cli import main
from tests.calls import make_call
from tests.faults import emulation
from tests.publishing.calls import FAULTS
from tests.publishing.test_publish import dumped

FAULT = str(FAULTS / "pytorch_191937.py")


@pytest.fixture(autouse=True)
def verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(cli.VERBS, "share", "")
    yield
    emulation.restore()


@pytest.mark.slow
def test_seeded_values_end_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dumped(tmp_path / "x.pt", make_call(rows=33, heads=2, width=136, seed=5), origin={"model": "secret"})
    assert main(["share", str(path), "--preload", FAULT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no captured values inside")
    assert f"file    {tmp_path}/x.share.pt" in lines
    assert lines[-1].endswith(f"replay {tmp_path}/x.share.pt --preload {FAULT}")


@pytest.mark.slow
def test_real_values_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dumped(tmp_path / "x.pt", make_call(rows=3, heads=2, width=8))
    assert main(["share", str(path), "-o", str(tmp_path / "y.pt"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["real_values"] == ["query", "key", "value"]
    assert found["schema"]["name"] == "share"
    assert main(["share", str(path), "-o", str(tmp_path / "y.pt")]) == 2
