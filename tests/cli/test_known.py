"""`sdpa-repro known`: the table, the trial on this machine, and what scripts read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sdpa_repro.cli import main
from sdpa_repro.cli.known import command
from sdpa_repro.explaining import known_here
from sdpa_repro.explaining.known_here import Outcome
from sdpa_repro.known_issues import KNOWN_ISSUES

FAULT = Path(__file__).resolve().parent.parent / "faults" / "pytorch_191937.py"


def known(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def outcome(issue: str, status: str = "not tested", **fields: Any) -> Outcome:
    return Outcome(issue, status, fields.pop("detail", "no CUDA device"), **fields)


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What the trial finds, instead of running it; a KeyboardInterrupt follows when the list is cut short."""
    found = [outcome(known.issue) for known in KNOWN_ISSUES]

    def check(preload: Any, *, timeout: float, report: Any) -> list[Outcome]:
        for entry in found:
            report(entry)
        if len(found) < len(KNOWN_ISSUES):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(known_here, "check_here", check)
    return found


def test_the_list_has_a_line_for_each_bug_and_says_what_to_run_next() -> None:
    result = known()
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == f"{len(KNOWN_ISSUES)} upstream attention bugs are known to sdpa-repro"
    assert lines[-1].startswith("next: ")
    assert lines[-1].endswith("known --here")
    for entry in KNOWN_ISSUES:
        assert entry.issue in result.stdout
    assert "2.2 to 2.13, fixed in 2.14.0" in result.stdout


def test_the_list_as_json_holds_every_field() -> None:
    document = json.loads(known("--json").stdout)
    assert document["schema"]["name"] == "known"
    assert {"preloaded", "environment"} <= document.keys()
    first = document["issues"][0]
    assert (first["issue"], first["fixed_in"], first["device"]) == ("pytorch#191937", "2.14.0", "cuda")
    assert "here" not in first


def test_a_machine_without_any_of_the_bugs_exits_with_0(trial: list[Outcome]) -> None:
    trial[0] = outcome("pytorch#191937", "not affected", device="cuda", detail="largest error 1e-07")
    result = known("--here")
    assert result.exit_code == 0
    assert "0 of 1 known bugs that can be tested here are present" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[-1].endswith(" diagnose -- YOUR_SCRIPT.py")


def test_a_bug_that_is_present_comes_first_and_exits_with_1(trial: list[Outcome]) -> None:
    trial[-1] = outcome("pytorch#195320", "affected", device="cpu", detail="row 3 off by 1")
    result = known("--here")
    assert result.exit_code == 1
    assert "1 of 1 known bugs" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[-1].endswith(" guard -- YOUR_SCRIPT.py")
    table = [line for line in result.stdout.splitlines() if "pytorch#" in line]
    assert table[0].split()[:2] == ["pytorch#195320", "affected"]
    assert "cannot be tested here" in table[1]


def test_a_trial_that_is_interrupted_prints_what_it_has(trial: list[Outcome]) -> None:
    trial[:] = [outcome("pytorch#191937", "affected", device="cuda", detail="query row 32 off by 3")]
    result = known("--here")
    assert result.exit_code == 130
    assert "interrupted" in result.stdout.splitlines()[0]
    assert "query row 32 off by 3" in result.stdout
    assert "not run" in result.stdout


def test_json_marks_a_partial_trial(trial: list[Outcome]) -> None:
    trial[:] = [outcome("pytorch#191937", "affected", device="cuda")]
    document = json.loads(known("--here", "--json").stdout)
    assert document["complete"] is False
    assert document["issues"][0]["here"]["status"] == "affected"
    assert document["issues"][1]["here"] is None


def test_a_preload_without_a_trial_is_bad_usage() -> None:
    result = known("--preload", str(FAULT))
    assert result.exit_code == 2
    assert "--here" in result.stderr


@pytest.mark.slow
def test_a_planted_bug_is_reported_with_what_was_preloaded() -> None:
    result = known("--here", "--preload", str(FAULT))
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert "1 of them emulated by what was preloaded" in lines[0]
    assert any(line.startswith("preloaded: pytorch_191937.py (sha256 ") for line in lines)
    row = next(line for line in lines if line.startswith("pytorch#191937"))
    assert "affected, as emulated on the CPU" in row
    assert "query row 32 off by" in row


@pytest.mark.slow
def test_the_trial_as_json_says_where_each_trigger_ran() -> None:
    result = known("--here", "--json")
    document = json.loads(result.stdout)
    here = {entry["issue"]: entry["here"] for entry in document["issues"]}
    assert document["preloaded"] == []
    assert here["pytorch#193728"]["status"] == "affected"
    assert (here["pytorch#193728"]["device"], here["pytorch#193728"]["backend"]) == ("cpu", "FLASH_ATTENTION")


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_a_trial_gets_some_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "--here", "--timeout", seconds]) == 2
    assert "Invalid value for '--timeout'" in capsys.readouterr().err
