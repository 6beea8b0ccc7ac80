"""`sdpa-repro issue`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdpa_repro import cli
from sdpa_repro.cli import main
from sdpa_repro.cli.issue import try_script
from sdpa_repro.publishing import publish as chain
from tests.faults import emulation
from tests.publishing.calls import FAULTS
from tests.publishing.test_publish import closed_dump

FAULT = str(FAULTS / "pytorch_191937.py")


@pytest.fixture(autouse=True)
def verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(cli.VERBS, "issue", "")
    monkeypatch.setattr(chain, "collect_env", lambda: "PyTorch version: here")
    yield
    emulation.restore()


@pytest.mark.slow
def test_the_answer_comes_first_and_the_next_command_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = closed_dump(tmp_path / "x.pt")
    folder = tmp_path / "out"
    status = main(
        ["issue", str(path), "-o", str(folder), "--no-reduce", "--no-explain", "--preload", FAULT, "--device", "cpu"]
    )
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert status == 1
    assert lines[0].startswith("FLASH_ATTENTION is wrong in query row 32 of 2 heads. repro.py fails here as it should")
    assert f"script  {folder}/repro.py" in lines
    assert f"issue   {folder}/issue.md" in lines
    assert any(line.startswith("title   SDPA FLASH_ATTENTION (CPU, with files preloaded) is wrong") for line in lines)
    assert "preloaded: pytorch_191937.py: if that file plants a fault, do not post this" in lines
    assert lines[-1].endswith(f" versions {folder}/repro.py --preload {FAULT}")
    assert "running repro.py in a fresh process" in printed.err
    again = main(["issue", str(path), "-o", str(folder), "--no-reduce", "--no-explain", "--preload", FAULT])
    assert again == 2
    assert "already holds" in capsys.readouterr().err


@pytest.mark.slow
def test_a_healthy_dump_ends_with_0_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["issue", str(closed_dump(tmp_path / "x.pt")), "-o", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0].startswith("nothing to report: ")
    assert lines[-1].startswith("next: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["issue", str(closed_dump(tmp_path / "x.pt")), "--no-reduce", "--no-explain", "--preload", FAULT, "--json"]
    )
    found = json.loads(capsys.readouterr().out)
    assert status == 1
    assert found["schema"]["name"] == "issue"
    assert found["run"]["fails"] is True
    assert found["files"]["issue"].endswith("x.issue/issue.md")
    assert found["known"][0]["issue"] == "pytorch#191937"
    assert found["preloaded"][0]["name"] == "pytorch_191937.py"


def test_the_script_is_tried_with_what_it_needs_to_fail() -> None:
    assert try_script(Path("out/repro.py"), []) == "python -I out/repro.py"
    assert try_script(Path("out/repro.py"), ["--preload", "f.py"]).endswith(" versions out/repro.py --preload f.py")


@pytest.mark.parametrize("verb", ["issue", "share"])
@pytest.mark.parametrize("name", ["none.pt", "bad.pt"])
def test_a_file_that_is_no_dump_is_one_line_and_nothing_else(
    verb: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.pt").write_text("no dump")
    assert main([verb, str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: cannot ")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]
