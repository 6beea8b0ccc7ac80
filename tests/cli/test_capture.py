"""`sdpa-repro capture`: what it prints and the status it ends with, for a model and for a script."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.capturing import report
from sdpa_repro.cli import main
from sdpa_repro.cli.capture import call_rows, command_line, parse_size, script_lines
from sdpa_repro.dump import load
from sdpa_repro.errors import InputError
from tests.capturing import faults

FAULT = faults.FAULTS / "pytorch_191937.py"
TINY = ["--layers", "2", "--text-only"]
SCRIPT = """
import sys, torch
query = torch.randn(1, 2, 5, 8)
torch.nn.functional.scaled_dot_product_attention(query, query, query)
print("from the script")
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def real_kernels_afterwards() -> Iterator[None]:
    yield
    faults.restore()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def capture(out: Path, *words: str) -> int:
    return main(["capture", "--out", str(out), *words])


def test_the_embedded_model_is_healthy_without_a_fault(tmp_path: Path, capfd: Captured) -> None:
    assert capture(tmp_path, "--pad", "7", *TINY, "--no-prove") == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("no wrong attention call: 2 attention calls")
    assert lines[-1].startswith("next: ")
    assert "healthy" in out
    assert "reveal the model's input" in out
    assert "torch 2" in err
    assert "transformers" in err
    assert "length % 32 == 1, length % 64 == 33" in err


@pytest.mark.slow
def test_a_planted_fault_is_found_proven_and_shown_as_planted(tmp_path: Path, capfd: Captured) -> None:
    assert capture(tmp_path, "--pad", "7", *TINY, "--preload", str(FAULT)) == 1
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("1 of 2 attention calls wrong")
    assert "pytorch_191937.py" in lines[0]
    assert "row 288" in lines[0]
    (path,) = tmp_path.glob("*.pt")
    assert path.name.startswith("L01-self_attn-call1-289x289")
    assert "proven: same layout, output bit for bit" in out
    assert f"replay {path} --preload {FAULT}" in lines[-1]
    assert [line for line in err.splitlines() if line.startswith("call 1 (")]
    dump = load(path)
    assert dump.origin["total_length"] == 289
    assert dump.origin["padding"] == {"tokens": 7, "side": "left"}
    assert dump.origin["model"].startswith("tiny Gemma 4")
    assert dump.origin["command"] == "sdpa-repro capture --out --pad --layers --text-only --preload"
    assert dump.call.key.stride(1) == 0


def test_the_table_has_a_line_for_each_call(tmp_path: Path, capfd: Captured) -> None:
    assert capture(tmp_path, "--pad", "7", *TINY, "--no-prove") == 0
    out = capfd.readouterr().out
    header = next(line for line in out.splitlines() if line.startswith("call"))
    for name in ("module", "query", "key", "head stride", "kernel", "error / threshold", "kept"):
        assert name in header
    row = next(line for line in out.splitlines() if line.split()[:1] == ["1"])
    assert "layers.1.self_attn" in row
    assert "1x16x289x512" in row
    assert "FLASH_ATTENTION" in row


@pytest.mark.slow
def test_without_pad_every_residue_is_tried_and_the_worst_is_kept(tmp_path: Path, capfd: Captured) -> None:
    words = ["--layers", "1", "--text-only", "--no-prove", "--preload", str(FAULT), "--json", "--max-dumps", "1"]
    assert capture(tmp_path, *words) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["checked"] == 64
    wrong = sorted(call["total_length"] for call in report["calls"] if call["status"] == "diverges")
    assert wrong == [289, 321]
    worst = max(report["calls"], key=lambda call: call["ratio"])
    assert [call["total_length"] for call in report["calls"] if call["kept"]] == [worst["total_length"]]


def test_json_is_one_document(tmp_path: Path, capfd: Captured) -> None:
    assert capture(tmp_path, "--pad", "7", *TINY, "--no-prove", "--json") == 0
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert report["schema"]["name"] == "capture"
    assert report["preloaded"] == []
    assert report["environment"]["torch"]
    assert [call["index"] for call in report["calls"]] == [0, 1]
    assert [each["file"] for each in report["dumps"]] == [path.name for path in tmp_path.glob("*.pt")]


@pytest.mark.slow
def test_a_script_runs_and_its_own_output_comes_first(tmp_path: Path, capfd: Captured, script: str) -> None:
    assert capture(tmp_path / "dumps", "--", script) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "from the script"
    assert lines[1].startswith("no wrong attention call: 1 attention call")
    assert any("proven: same layout, output bit for bit" in line for line in lines)


@pytest.mark.slow
def test_a_scripts_own_status_is_returned(tmp_path: Path, capfd: Captured, script: str) -> None:
    assert capture(tmp_path / "dumps", "--no-prove", "--", script, "5") == 5
    assert "the script itself failed: exit status 5" in capfd.readouterr().out


@pytest.mark.slow
def test_with_json_a_scripts_output_goes_to_stderr(tmp_path: Path, capfd: Captured, script: str) -> None:
    assert capture(tmp_path / "dumps", "--no-prove", "--json", "--", script) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["script"]["status"] == 0
    assert "from the script" in err


@pytest.mark.slow
def test_a_script_without_attention_is_an_error_in_one_line(tmp_path: Path, capfd: Captured) -> None:
    path = tmp_path / "plain.py"
    path.write_text("import torch")
    assert capture(tmp_path / "dumps", "--", str(path)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "no scaled_dot_product_attention call was seen" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_script_that_fails_before_any_call_gives_its_own_status(tmp_path: Path, capfd: Captured) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(9)")
    assert capture(tmp_path / "dumps", "--", str(path)) == 9
    assert "exit status 9" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "missing.py"], "no script or program 'missing.py'"),
        (["--"], "nothing to run after --"),
        (["--", "tests"], "tests is a folder without a __main__.py"),
        (["--model", "x", "--", "script.py"], "--model does not go with a script"),
        (["--max-bytes", "much"], "is no size"),
        (["--pad", "7", "--total-length", "9"], "give one of them"),
        (["--phase", "both"], "phase"),
        (["--preload", "missing-file.py"], "preload"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(tmp_path: Path, capfd: Captured, words: list[str], said: str) -> None:
    assert capture(tmp_path / "dumps", *words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


def test_a_selection_that_matches_nothing_is_status_2(tmp_path: Path, capfd: Captured) -> None:
    assert capture(tmp_path, "--pad", "7", *TINY, "--module", "cross_attn") == 2
    assert "none of the 2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("4096", 4096), ("3 MiB", 3 << 20), ("1g", 10**9)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "0", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_size(text)


def test_the_recorded_command_names_options_but_no_values() -> None:
    values = {
        "prompt": "a secret",
        "images": ("cat.png",),
        "pad": None,
        "phase": "all",
        "input_": None,
        "no_check": True,
    }
    assert command_line(values) == "sdpa-repro capture --prompt --image --no-check"


def test_the_recorded_command_is_that_of_the_verb_that_was_used() -> None:
    values = {"out": Path("out"), "preload": (Path("secret.py"),), "phase": "all", "fresh": True}
    assert command_line(values, "diagnose", "out") == "sdpa-repro diagnose --preload --fresh"


def call(index: int, status: str, ratio: float, kept: str | None = None, rank: int | None = None) -> dict[str, Any]:
    shape = (1, 2, 3, 4)
    return {
        "index": index,
        "module": "m",
        "query": shape,
        "key": shape,
        "value": shape,
        "key_head_stride": 0,
        "value_head_stride": 0,
        "kernel": "MATH",
        "status": status,
        "ratio": ratio,
        "kept": kept,
        "note": "",
        "process": 0,
        "rank": rank,
    }


def test_of_many_calls_the_table_shows_those_worth_a_look() -> None:
    calls = [call(index, "agrees", index / 1000) for index in range(500)]
    calls[100] = call(100, "diverges", 7.0)
    calls[200] = call(200, "agrees", 0.0, kept="x.pt")
    rows, colours = call_rows({"calls": calls})
    shown = [int(row[0]) for row in rows]
    assert shown == [100, 200, 495, 496, 497, 498, 499]
    assert colours[shown.index(100)] == "red"


def press(*_: object) -> None:
    """Ctrl-C in this process."""
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_in_a_script_says_so_and_keeps_what_was_dumped(tmp_path: Path, capfd: Captured) -> None:
    path = tmp_path / "stops.py"
    path.write_text(
        "import os, signal, time, torch\n"
        "q = torch.randn(1, 2, 8, 16)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"  # to the one that captures alone: it is passed on
        "time.sleep(300)\n"
    )
    assert capture(tmp_path / "dumps", "--", str(path)) == 130
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("interrupted: no wrong attention call: 1 attention call, ")
    assert not [line for line in out if "failed" in line or "killed" in line]
    assert len(list((tmp_path / "dumps").glob("*.pt"))) == 1


@pytest.mark.slow
def test_ctrl_c_while_dumps_are_proven_keeps_them_and_tells_what_was_found(
    tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "prove", press)
    assert main(["capture", "--out", str(tmp_path / "dumps"), *TINY, "--pad", "7"]) == 130
    assert capfd.readouterr().out.startswith("interrupted: no wrong attention call: ")
    assert len(list((tmp_path / "dumps").glob("*.pt"))) == 1


@pytest.mark.parametrize(
    ("status", "interrupted", "said"),
    [
        (0, False, []),
        (130, True, []),
        (0, True, []),
        (1, True, ["the script ended: exit status 1"]),
        (130, False, ["the script itself failed: exit status 130"]),
    ],
)
def test_how_a_script_ended_is_told_unless_the_user_stopped_it(status: int, interrupted: bool, said: list[str]) -> None:
    script = {"status": status, "interrupted": interrupted, "end": f"exit status {status}"}
    assert script_lines({**script, "failed": [], "without_report": 0, "inside": [], "not_recorded": []}) == said
