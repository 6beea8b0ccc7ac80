"""The report of a script: its own dumps, and what was not checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro import ranks
from sdpa_repro.capturing import folder, report, together
from sdpa_repro.capturing.records import CallRecord, Options
from sdpa_repro.capturing.script import ScriptRun


def summary(*dumps: str) -> dict[str, Any]:
    """What a session that saw nothing but its dumps says."""
    counts: dict[str, Any] = dict.fromkeys(("seen", "checked", "wrong", "raised"), 1)
    empty: dict[str, Any] = {"modules": [], "calls": [], "passed": {}, "elsewhere": {}, "hints": [], "problems": []}
    return {**counts, **empty, "stopped": False, "dumps": list(dumps)}


def entries(out: Path, *names: str) -> tuple[dict[str, Any], ...]:
    """Dumps of wrong calls in the folder, the last the worst, and their lines of the index."""
    found = tuple({"file": name, "status": "diverges", "live_ratio": 2.0 + at} for at, name in enumerate(names))
    for entry in found:
        (out / entry["file"]).write_bytes(b"dump")
    (out / folder.INDEX).write_text("".join(json.dumps(entry) + "\n" for entry in found))
    return found


def files(out: Path) -> set[str]:
    return {path.name for path in out.glob("*.pt")}


@pytest.mark.parametrize("slots", [1, 8])
def test_another_capture_into_the_same_folder_keeps_its_dumps_to_itself(tmp_path: Path, slots: int) -> None:
    new = entries(tmp_path, "own.pt", "other.pt")
    run = ScriptRun(0, ({"pid": 1, "state": "ended", "summary": summary("own.pt"), "inside": ""},), new)
    found = report.of_script(run, tmp_path, Options(max_dumps=slots))
    assert [dump["file"] for dump in found["dumps"]] == ["own.pt"]
    assert files(tmp_path) == {"own.pt", "other.pt"}


def test_dumps_of_a_process_that_was_killed_are_found_in_the_index(tmp_path: Path) -> None:
    new = entries(tmp_path, "told.pt", "untold.pt")
    told = {**summary("told.pt"), "calls": [{**record(0, "diverges", 2.0), "kept": "told.pt"}]}
    run = ScriptRun(137, ({"pid": 1, "state": "running", "summary": told, "inside": ""},), new)
    found = report.of_script(run, tmp_path, Options())
    assert {dump["file"] for dump in found["dumps"]} == {"told.pt", "untold.pt"}


def record(index: int, status: str, ratio: float) -> dict[str, Any]:
    """A call as in a report, with what `answer` reads."""
    fields: dict[str, Any] = dict.fromkeys(CallRecord.__dataclass_fields__)
    return {**fields, "index": index, "status": status, "ratio": ratio, "process": 0}


def test_the_answer_says_how_many_calls_were_not_checked(tmp_path: Path) -> None:
    found = report.of_session({**summary(), "wrong": 0, "raised": 0, "options": {}}, tmp_path)
    found |= {"checked": 3, "calls": [record(0, "agrees", 0.5), record(1, "unchecked", 0.0), record(2, "agrees", 0.1)]}
    said = report.answer(found)
    assert said == "no wrong attention call: 3 attention calls, 1 of them not checked, the worst at 0.5 x its threshold"


def test_ranks_that_all_told_leave_the_dumps_of_another_capture_alone(tmp_path: Path) -> None:
    entries(tmp_path, "own.pt", "other.pt")
    own = report.of_session({**summary("own.pt"), "options": {}}, tmp_path)
    found = together.of_ranks(own, tmp_path, Options(max_dumps=1))
    assert [dump["file"] for dump in found["dumps"]] == ["own.pt"]
    assert files(tmp_path) == {"own.pt", "other.pt"}


def test_dumps_of_ranks_that_were_not_heard_are_found_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries(tmp_path, "own.pt", "unheard.pt")
    own = report.of_session({**summary("own.pt"), "options": {}}, tmp_path)
    monkeypatch.setattr(ranks, "world", lambda: 2)
    found = together.of_ranks({**own, "failed": "rank 1 is gone"}, tmp_path, Options())
    assert "unheard.pt" in {dump["file"] for dump in found["dumps"]}


def stopped(tmp_path: Path, status: int, *calls: dict[str, Any], inside: str = "") -> dict[str, Any]:
    """The report of a script that Ctrl-C was pressed in."""
    told = {**summary(), "wrong": 0, "raised": 0, "checked": len(calls), "calls": list(calls)}
    state = "running" if inside else "ended"
    run = ScriptRun(status, ({"pid": 1, "state": state, "summary": told, "inside": inside},), (), interrupted=True)
    return report.of_script(run, tmp_path, Options())


@pytest.mark.parametrize("status", [0, 1, 130])
def test_ctrl_c_in_a_script_is_the_first_word_of_the_answer_and_its_status(tmp_path: Path, status: int) -> None:
    found = stopped(tmp_path, status, {**record(0, "agrees", 0.5), "kept": None})
    assert report.answer(found) == (
        "interrupted: no wrong attention call: 1 attention call, the worst at 0.5 x its threshold"
    )
    assert report.exit_status(found) == 130


@pytest.mark.parametrize("status", [0, 130])
def test_ctrl_c_before_any_call_is_no_wrong_use(tmp_path: Path, status: int) -> None:
    found = stopped(tmp_path, status)
    assert report.answer(found) == "interrupted: no attention call was recorded"
    assert report.exit_status(found) == 130


def test_ctrl_c_before_any_call_tells_of_dumps_without_a_report(tmp_path: Path) -> None:
    run = ScriptRun(130, ({"pid": 1, "state": "running", "inside": ""},), entries(tmp_path, "x.pt"), interrupted=True)
    found = report.of_script(run, tmp_path, Options())
    assert report.answer(found) == "interrupted: no attention call was recorded; what was dumped is kept"


def test_the_call_in_which_ctrl_c_came_is_no_finding_but_that_of_a_crash_is(tmp_path: Path) -> None:
    call = {**record(0, "agrees", 0.5), "kept": None}
    assert stopped(tmp_path, 130, call, inside="call 1 of x")["script"]["inside"] == []
    crashed = stopped(tmp_path, 139, call, inside="call 1 of x")
    assert report.answer(crashed) == "interrupted: the script was killed by SIGSEGV inside call 1 of x"


def test_a_model_that_is_stopped_before_any_call_is_interrupted(tmp_path: Path) -> None:
    found = report.of_session({**summary(), "options": {}}, tmp_path) | {"interrupted": True}
    assert report.answer(found) == "interrupted: no attention call was recorded"
