"""`sdpa-repro versions`: the answer, the table, the files, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdpa_repro.cli import main, output
from sdpa_repro.publishing import try_versions
from sdpa_repro.publishing.environments import Interpreter
from sdpa_repro.publishing.issue import issue
from tests.publishing.interpreters import SCRIPT, failing, passing
from tests.publishing.test_issue import report
from tests.publishing.test_publish import closed_dump


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script; "here" is a program under which it fails."""
    here = failing(tmp_path / "here" / "python")
    monkeypatch.setattr(try_versions, "here", lambda: Interpreter("here", here))
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "repro.py").write_text(SCRIPT)
    return tmp_path / "report"


def test_the_answer_comes_first_then_the_table_then_the_next_command(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    python = passing(tmp_path / "new")
    status = main(["versions", str(folder / "repro.py"), "--python", python])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert status == 1
    assert lines[0] == "repro.py fails in 1 of 2 environments (torch 2.13.0), passes in 1 (torch 2.14.1)"
    assert lines[2].split() == ["environment", "torch", "where", "MATH", "FLASH_ATTENTION", "default", "result", "why"]
    assert lines[4].split()[:7] == ["here", "2.13.0", "cpu", "ok", "wrong", "wrong", "fails"]
    assert lines[5].split() == [python, "2.14.1", "cpu", "ok", "ok", "ok", "passes"]
    assert lines[-1] == f"next: {output.python()} -I {folder}/repro.py"
    assert "here: running repro.py" in printed.err


def test_nothing_wrong_ends_with_0_and_nothing_run_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    python = passing(tmp_path / "new")
    assert main(["versions", str(folder / "repro.py"), "--no-here", "--python", python]) == 0
    assert capsys.readouterr().out.startswith("repro.py passes in 1 environment (torch 2.14.1)")
    assert main(["versions", str(folder / "repro.py"), "--no-here"]) == 2
    assert capsys.readouterr().err.startswith("error: nothing to do")
    assert main(["versions", str(folder / "none.py")]) == 2
    assert main(["versions", str(folder / "repro.py"), "--torch", "newest"]) == 2


def test_results_travel_from_one_machine_to_the_issue_on_another(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report()
    script, results = folder / "repro.py", tmp_path / "new.json"
    script.write_text(made.script, encoding="utf-8")
    (folder / "issue.md").write_text(issue(made), encoding="utf-8")
    there = ["versions", str(script), "--no-here", "--python", passing(tmp_path / "new"), "-o", str(results)]
    assert main(there) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"results {results}"
    assert lines[-1].endswith(f" versions {script} --issue {folder} --no-here --results {results}")
    assert main(["versions", str(script), "--results", str(results), "--issue", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"issue   {folder}/issue.md: its table of versions is this one"
    assert lines[-1] == f"next: cat {folder}/issue.md"
    text = (folder / "issue.md").read_text(encoding="utf-8")
    assert "| 2.13.0 (cpu) | ok | wrong | wrong |\n| 2.14.1 (cpu) | ok | ok | ok |\n" in text


def test_an_issue_about_another_script_is_refused_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(try_versions, "run_in", lambda *words, **more: pytest.fail("something ran"))
    (folder / "issue.md").write_text("Expected: x\n")
    assert main(["versions", str(folder / "repro.py"), "--issue", str(folder)]) == 2
    assert "does not hold this script" in capsys.readouterr().err
    (folder / "mine.json").write_text("{}")
    assert main(["versions", str(folder / "repro.py"), "-o", str(folder / "mine.json")]) == 2
    assert main(["versions", str(closed_dump(folder / "x.pt")), "--issue", str(folder)]) == 2


def test_json_is_one_document_that_is_also_what_a_file_holds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "r.json"
    assert main(["versions", str(folder / "repro.py"), "--json", "-o", str(target)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == {"name": "versions", "version": 1}
    assert {"sdpa_repro", "preloaded", "environment"} <= found.keys()
    assert found["backends"] == ["MATH", "FLASH_ATTENTION", "default"]
    assert found["rows"][0]["results"]["FLASH_ATTENTION"] == "wrong"
    assert found["rows"][0]["machine"]["torch"] == "2.13.0"
    assert json.loads(target.read_text()) == found


def test_ctrl_c_prints_and_writes_the_rows_so_far(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(version: str, **words: object) -> Interpreter:
        raise KeyboardInterrupt

    monkeypatch.setattr(try_versions, "built", interrupt)
    target = tmp_path / "r.json"
    assert main(["versions", str(folder / "repro.py"), "--torch", "2.14.1", "-o", str(target)]) == 130
    assert capsys.readouterr().out.startswith("repro.py fails in 1 of 1 environment (torch 2.13.0)")
    assert len(json.loads(target.read_text())["rows"]) == 1
    assert main(["versions", str(folder / "repro.py"), "--no-here", "--torch", "2.14.1"]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "interrupted" in printed.err


def test_what_is_preloaded_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fault.py").write_text("")
    assert main(["versions", str(folder / "repro.py"), "--preload", str(tmp_path / "fault.py")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("; planted: fault.py")
    assert "preloaded: fault.py: if that file plants a fault, this is no finding about torch" in lines


def test_a_table_that_contradicts_the_issue_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fault.py").write_text("")
    planted, results = ["--preload", str(tmp_path / "fault.py")], tmp_path / "new.json"
    records = [{"name": "fault.py", "sha256": "ab" * 32}]
    with_it, at_capture, without = report(preloaded=records), report(captured_with=records), report()
    script = folder / "repro.py"
    script.write_text(without.script, encoding="utf-8")
    assert main(["versions", str(script), "-o", str(results)]) == 1
    capsys.readouterr()
    tried = ["versions", str(script), "--issue", str(folder)]
    with monkeypatch.context() as still:
        still.setattr(try_versions, "run_in", lambda *words, **more: pytest.fail("something ran"))
        (folder / "issue.md").write_text(issue(with_it), encoding="utf-8")
        for words in (tried, [*tried, "--no-here", "--results", str(results)]):
            assert main(words) == 2
            said = capsys.readouterr().err.splitlines()
            assert len(said) == 1
            assert said[0].endswith("add --preload fault.py")
        for made in (without, at_capture):
            (folder / "issue.md").write_text(issue(made), encoding="utf-8")
            assert main([*tried, *planted]) == 2
            assert "leave --preload out" in capsys.readouterr().err
    assert main(tried) == 1
    (folder / "issue.md").write_text(issue(with_it), encoding="utf-8")
    capsys.readouterr()
    assert main(["versions", str(script)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"next: cat {folder}/issue.md"
    assert main([*tried, *planted]) == 1


def test_an_environment_that_was_asked_for_and_could_not_be_tried_ends_with_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho no such option\nexit 2\n")
    other.chmod(0o755)
    words = ["versions", str(folder / "repro.py"), "--python", str(other)]
    assert main([*words, "--no-here", "--python", passing(tmp_path / "new")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("not a Python") for line in lines)
    assert main(words) == 1
