"""`sdpa-repro report`: the answer first, the page written, the status that of replay."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.cli import main, output
from sdpa_repro.publishing import publish as chain
from sdpa_repro.publishing import report as engine
from sdpa_repro.publishing.published import Published
from tests.calls import make_call
from tests.publishing.test_publish import closed_dump
from tests.replaying.dumps import FAULTS, write_dump

FAULT = str(FAULTS / "pytorch_191937.py")


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.inference_mode():
        return write_dump(make_call(rows=33, heads=2, padding=3), tmp_path_factory.mktemp("dump") / "call.pt")


@pytest.mark.slow
def test_the_whole_page_holds_cause_and_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = closed_dump(tmp_path / "call.pt")
    monkeypatch.setattr(chain, "collect_env", lambda: "")
    monkeypatch.setattr(engine, "explain", partial(engine.explain, lengths=(1, 80)))
    published, told = engine.publish, []

    def as_captured(*words: Any, **names: Any) -> Published:
        told.append(names)
        return published(*words, reduced=False, **names)

    monkeypatch.setattr(engine, "publish", as_captured)
    target = tmp_path / "out" / "page.html"
    status = main(["report", str(dump), "-o", str(target), "--preload", FAULT, "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    text = target.read_text(encoding="utf-8")
    assert status == 1
    assert "explanation" not in told[0]  # that is of the captured call, the script about the reduced one
    assert told[0]["captured"]["needed"]
    assert lines[0].startswith(
        "FLASH_ATTENTION: the last query row (32) was computed with mask row 0, when L % 32 == 1"
    )
    assert "known: pytorch#191937 (as emulated here on FLASH_ATTENTION, CPU), fixed in 2.14.0" in lines[0]
    assert f"page     {target}" in lines
    assert "preloaded: pytorch_191937.py: what the page shows may be planted by it" in lines
    assert lines[-1] == f"next: {output.python()} -m webbrowser {target.resolve().as_uri()}"
    assert "was computed with mask row 0, when L % 32 == 1" in text
    assert "It fails here, as it should" in text
    assert 'class="copyable tall"' in text
    assert "scaled_dot_product_attention(" in text
    assert [file.name for file in target.parent.iterdir()] == ["page.html"]


@pytest.mark.slow
def test_a_fast_page_of_several_dumps_names_the_one_that_cannot_be_read(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, target = tmp_path / "broken.pt", tmp_path / "page.html"
    broken.write_bytes(b"not a dump")
    arguments = ["report", str(dump), str(broken), "-o", str(target), "--no-explain", "--preload", FAULT, "--json"]
    status = main(arguments)
    found = json.loads(capsys.readouterr().out)
    text = target.read_text(encoding="utf-8")
    assert status == 1
    assert found["schema"]["name"] == "report"
    assert found["output"] == str(target)
    assert found["dumps"] == [{"file": "call.pt", "verdict": "backend_wrong"}]
    assert found["errors"][0]["file"] == "broken.pt"
    assert found["preloaded"][0]["name"] == "pytorch_191937.py"
    assert "Not read" in text
    assert "row 32" in text


@pytest.mark.slow
def test_a_healthy_dump_ends_with_0(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main(["report", str(dump), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith("clean on this cpu")
    assert "Nothing wrong found" in target.read_text(encoding="utf-8")


def test_another_file_is_not_replaced_before_any_work(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    target.write_text("my thesis")
    assert main(["report", str(dump), "-o", str(target)]) == 2
    assert "give --force to replace it" in capsys.readouterr().err
    assert target.read_text() == "my thesis"


def test_a_picture_of_several_dumps_is_refused(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(dump), str(dump), "--png", "x.png"]) == 2
    assert "--png draws one dump" in capsys.readouterr().err


def test_a_missing_dump_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "none.pt"), "-o", str(target)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not target.exists()
