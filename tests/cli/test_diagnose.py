"""`sdpa-repro diagnose`: one command from a model, a script or a dump to the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.cli import capture as capturing
from sdpa_repro.cli import diagnose_text as text
from sdpa_repro.cli import main, output
from sdpa_repro.diagnosing import chain, place
from sdpa_repro.diagnosing.chain import Located
from sdpa_repro.diagnosing.stopping import Stop
from sdpa_repro.explaining.answers import Conditions
from sdpa_repro.explaining.explain import Explanation
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.verdict import Verdict
from tests.calls import make_call
from tests.killed_work import made_replay, stand_ins
from tests.replaying.dumps import FAULTS, write_dump

FAULT = str(FAULTS / "pytorch_191937.py")

SCRIPT = """
import torch
from torch.nn.functional import scaled_dot_product_attention
torch.manual_seed(0)
query, key, value = torch.randn(1, 4, 33, 136), torch.randn(1, 1, 33, 136), torch.randn(1, 1, 33, 136)
mask = torch.ones(33, 33, dtype=torch.bool).tril()[None, None]
with torch.no_grad():
    scaled_dot_product_attention(query, key.expand_as(query), value.expand_as(query), attn_mask=mask)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdpa_repro", "diagnose", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=dict(os.environ), timeout=400)


EVERYTHING = {"call.pt", "diagnose.log", "index.jsonl", "issue.md", "report.html", "repro.py", "result.json"}


def names(folder: Path) -> set[str]:
    """The files that a user sees there."""
    return {path.name for path in folder.iterdir() if path.is_file()}


def result_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "result.json").read_bytes())
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_the_demo_finds_the_planted_fault_and_says_that_it_is_planted(tmp_path: Path) -> None:
    done = run(tmp_path, "--demo")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "PLANTED" in lines[0]
    assert lines[2].startswith("FLASH_ATTENTION is wrong in query row 288 of 16 heads; known: pytorch#191937")
    cause = next(line for line in lines if line.startswith("cause: "))
    assert "the last query row (288) was computed with mask row 0, when L % 32 == 1" in cause
    assert any("likeliest token changes" in line for line in lines)
    assert lines[-2] == "demo: found: pytorch#191937, as planted"
    assert lines[-1] == "next: cat out/demo/issue.md"
    folder = tmp_path / "out" / "demo"
    assert names(folder) == EVERYTHING | {"L05-self_attn-call11-289x289.pt"}
    text = (folder / "issue.md").read_text()
    assert "do not post it" in text
    assert "the last query row (64) was computed with mask row 0" in text
    assert "fails here as it should" in done.stdout
    result = result_of(folder)
    assert (result["schema"]["name"], result["demo"], result["stopped"]) == ("diagnose", True, None)
    assert [stage["name"] for stage in result["stages"]] == [
        "capture",
        "replay",
        "explain",
        "reduce",
        "issue",
        "report",
    ]
    assert "explain: ended after" in (folder / "diagnose.log").read_text()


@pytest.mark.slow
def test_a_killed_run_of_a_script_goes_on_and_without_the_fault_it_is_clean(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(SCRIPT)
    words = ("--preload", FAULT, "--budget", "0.001", "--", "failing.py")
    folder = tmp_path / "out" / "failing"
    command = [sys.executable, "-m", "sdpa_repro", "diagnose", *words]
    killed = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not (folder / place.STATE / "replay.json").exists() and killed.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wrong = run(tmp_path, *words)
    assert wrong.returncode == 1, wrong.stderr
    assert wrong.stdout.startswith("FLASH_ATTENTION is wrong in query row 32 of 4 heads; known: pytorch#191937")
    assert wrong.stdout.splitlines()[-1].endswith(f"versions out/failing/repro.py --preload {FAULT}")
    assert names(folder) >= EVERYTHING
    reused = {stage["name"] for stage in result_of(folder)["stages"] if stage["reused"]}
    assert {"capture", "replay"} <= reused or killed.returncode != -signal.SIGKILL
    clean = run(tmp_path, "--out", "healthy", "--", "failing.py")
    assert clean.returncode == 0, clean.stderr
    assert clean.stdout.startswith("clean on this cpu")
    assert names(tmp_path / "healthy" / "failing") - {"failing-call0-33x33.pt"} == {
        "diagnose.log",
        "index.jsonl",
        "result.json",
    }


@pytest.mark.slow
def test_a_healthy_dump_is_one_json_document_and_writes_nothing_but_the_result(tmp_path: Path) -> None:
    path = write_dump(make_call(rows=33, heads=2), tmp_path / "call.pt")
    done = run(tmp_path, str(path), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["schema"]["name"] == "diagnose"
    assert (document["capture"], document["verdict"], document["stopped"]) == (None, "healthy", "healthy")
    folder = tmp_path / "out" / "call"
    assert document == result_of(folder)
    assert names(folder) == {"captured.pt", "diagnose.log", "result.json"}


@pytest.mark.slow
def test_a_script_that_fails_keeps_its_status(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(SCRIPT + "\nraise SystemExit(7)\n")
    done = run(tmp_path, "--", "failing.py")
    assert done.returncode == 7
    assert "the script itself failed: exit status 7" in done.stdout.splitlines()


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dump for the tests in which nothing is computed; the working folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    return write_dump(make_call(rows=5, heads=2, width=8), Path("x.pt"))


def replay_is(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    def replayed(path: Path, **_: object) -> Replay:
        return made_replay(path, **fields)

    monkeypatch.setattr(chain, "replay", replayed)


def test_a_bug_that_is_known_and_fixed_says_to_upgrade_first_and_writes_an_issue_only_when_told(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Match("pytorch#191937", "exact", "title", "2.14.0", "key.contiguous()")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with stand_ins(), monkeypatch.context() as patched:
        replay_is(patched, known=(known,))
        assert main(["diagnose", str(dump)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "upgrade torch to 2.14.0 or later: MATH is wrong in query row 4"
        assert lines[1].startswith(
            "no issue is needed: pytorch#191937 is fixed in torch 2.14.0; until you upgrade: key"
        )
        assert lines[-1] == f"next: {output.python()} -m pip install --upgrade 'torch>=2.14.0'"
        folder = Path("out/x")
        assert names(folder) == {"x.pt", "diagnose.log", "report.html", "result.json"}
        assert result_of(folder)["stopped"] == "known_fixed"
        assert main(["diagnose", str(dump), "--issue"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "MATH is wrong in query row 4"
        assert lines[-1] == f"next: {output.python()} -I out/x/repro.py"
        assert "issue.md" in names(folder)


def test_without_an_issue_the_page_is_there_and_the_next_command_writes_one(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_ins():
        assert main(["diagnose", str(dump), "--no-issue"]) == 1
    assert names(Path("out/x")) == {"x.pt", "diagnose.log", "report.html", "result.json"}
    assert capsys.readouterr().out.splitlines()[-1].endswith("issue out/x/x.pt")


def test_the_same_command_again_uses_what_is_there_and_fresh_does_not(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_ins():
        first = main(["diagnose", str(dump)])
        shown = capsys.readouterr().out
        assert (first, main(["diagnose", str(dump)])) == (1, 1)
        again = capsys.readouterr()
        assert again.out == shown
        assert again.err.count("(from before)") == 5
        assert main(["diagnose", str(dump), "--fresh"]) == 1
        assert "(from before)" not in capsys.readouterr().err


def test_another_command_moves_what_is_there_and_removes_nothing(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_ins():
        assert main(["diagnose", str(dump)]) == 1
        before = {name: (Path("out/x") / name).read_bytes() for name in names(Path("out/x"))}
        capsys.readouterr()
        assert main(["diagnose", str(dump), "--device", "cpu"]) == 1
        said = capsys.readouterr().err
        assert "the results of another command or torch that were in out/x are in out/x.1 now" in said
        assert "(from before)" not in said
        assert {name: (Path("out/x.1") / name).read_bytes() for name in names(Path("out/x.1"))} == before
        assert main(["diagnose", "out/x/x.pt"]) == 1
        assert "out/x are in out/x.2 now" in capsys.readouterr().err
    assert {"x.pt", "result.json"} <= names(Path("out/x")) & names(Path("out/x.2"))
    assert result_of(Path("out/x"))["dump"] == "out/x/x.pt"


def test_a_model_whose_padding_shows_without_a_wrong_call_is_located(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def captured(words: object, values: dict[str, Any], **_: object) -> dict[str, Any]:
        write_dump(make_call(rows=5, heads=2, width=8), values["out"] / "L00.pt")
        told = dict.fromkeys(("wrong", "checked"), 0)
        moved = [{"total": 289, "shift": 0.8, "flipped": True}]
        rest = {"calls": [], "script": None, "failed": None, "preloaded": [], "moved": moved, "stopped": False}
        rest |= {"passed": {}, "elsewhere": {}, "hints": []}
        return {**told, **rest, "dumps": [{"file": "L00.pt", "status": "agrees"}], "out": str(values["out"])}

    def located(*_: object) -> Located:
        return Located("position_ids differ: the fix belongs to the model", 1, {"level": "positions"})

    monkeypatch.setattr(capturing, "run_capture", captured)
    monkeypatch.setattr(chain, "located", located)
    with stand_ins(), monkeypatch.context() as patched:
        replay_is(patched, verdict=Verdict.HEALTHY, guilty=(), sentence="clean on this cpu", exit_status=0)
        assert main(["diagnose", "--model", "some/model", "--pad", "7"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "clean on this cpu"
    assert lines[1].startswith("not SDPA: padding to 289 tokens moves the next token's logits by 0.8 of their spread")
    assert "locate: position_ids differ: the fix belongs to the model" in lines
    assert lines[-1].endswith("locate --model some/model --pad 7")
    folder = Path("out/model")
    assert names(folder) == {"L00.pt", "diagnose.log", "result.json"}
    assert (result_of(folder)["stopped"], result_of(folder)["locate"]["level"]) == ("not_sdpa", "positions")


def test_ctrl_c_tells_what_is_known_and_the_next_start_goes_on(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(path: Path, replayed: Replay, **_: object) -> Explanation:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        found = Explanation(path, "MATH", replayed, Conditions(True, flaky=True), complete=False)
        return replace(found, hypothesis=Hypothesis("mask_row", "row 4 used row 0"))

    with stand_ins():
        with monkeypatch.context() as patched:
            patched.setattr(chain, "explain", interrupted)
            assert main(["diagnose", str(dump)]) == 130
        said = capsys.readouterr()
        assert said.err.endswith("error: interrupted; results so far are kept: the same command goes on there\n")
        assert "cause: MATH: row 4 used row 0" in said.out
        assert not Path("out/x/issue.md").exists()
        assert main(["diagnose", str(dump)]) == 1
    said = capsys.readouterr()
    assert "going on where it was" in said.err
    assert said.err.count("(from before)") == 1
    assert "row 4 used row 0" not in said.out


def script_found(status: int, verdict: Verdict = Verdict.HEALTHY) -> text.Found:
    """A diagnosis of a script that ended with `status`, after the replay of its worst call."""
    script = {"status": status, "end": f"exit status {status}", "interrupted": False, "failed": [], "without_report": 0}
    report = {"script": {**script, "inside": [], "not_recorded": []}, "wrong": 0, "dumps": [], "calls": []}
    found = text.Found(
        Path("out/s"), ("s.py",), {"as_json": False, "preload": ()}, report=report, dump=Path("out/s/x.pt")
    )
    found.replay = made_replay(Path("out/s/x.pt"), verdict=verdict, exit_status=0)
    found.stop = Stop.HEALTHY if verdict is Verdict.HEALTHY else None
    return found


@pytest.mark.parametrize("status", [0, 1, 7])
def test_a_script_whose_attention_is_right_ends_with_its_own_status(status: int) -> None:
    assert script_found(status).exit_status == status


def test_a_clean_script_ends_with_what_is_left_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    found = script_found(0)
    text.print_end(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "all of it is in out/s"
    assert lines[-1].endswith(" show out/s/x.pt")
    assert "capture --keep all keeps every call" in found.advice
    assert "of a model instead of a script" in found.advice


def test_calls_that_nobody_looked_at_are_told_and_not_called_right(capsys: pytest.CaptureFixture[str]) -> None:
    found = script_found(0)
    assert found.report is not None
    found.report |= {"stopped": False, "passed": {"fake tensors": 2}, "elsewhere": {"loader": 3}, "hints": []}
    found.report["calls"] = [{"status": "unchecked", "reason": "out of memory"}]
    text._print_remarks(found.report)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["passed through: 2 x fake tensors", "not recorded: 3 calls in thread 'loader'"]
    assert said[2] == "1 calls not checked: out of memory"
    assert found.advice.startswith("nothing wrong in the calls that were checked: ")


def test_a_clean_dump_ends_with_the_command_that_describes_it(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = text.Found(Path("out/x"), ("x.pt",), {"as_json": False, "preload": ()}, dump=dump)
    found.replay, found.stop = made_replay(dump, verdict=Verdict.HEALTHY), Stop.HEALTHY
    text.print_end(found)
    assert capsys.readouterr().out.splitlines()[-1].endswith("show x.pt")
    assert found.advice == "nothing wrong: no script, issue or page written"


def test_two_at_the_same_time_into_one_folder_are_one_line(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stand_ins(), place.held(Path("out/x")):
        assert main(["diagnose", str(dump)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: another diagnosis is at work in out/x: wait for it, or choose another --out\n"


def test_a_folder_that_cannot_be_made_is_one_line(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    with stand_ins():
        assert main(["diagnose", str(dump), "-o", "file"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: cannot write into file/x: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [("x.pt", "error: dumps is a folder: give one of the dumps in it"), ("x.py", "error: dumps is a folder without ")],
)
def test_a_folder_is_one_line_that_says_what_to_give_instead(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / name).touch()
    assert main(["diagnose", "dumps"]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]


@pytest.mark.parametrize(
    "words",
    [
        ["--demo", "--pad", "3"],
        ["--demo", "x.pt"],
        ["x.pt", "--model", "y"],
        ["none.pt"],
        ["--issue", "--no-issue"],
        ["--locate", "--", "s.py"],
        ["--"],
        ["--", "missing.py"],
    ],
)
def test_options_that_do_not_go_together_are_one_line_and_status_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
