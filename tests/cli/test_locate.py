"""`sdpa-repro locate`: what it prints and the status it ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdpa_repro.cli import main
from tests.capturing import faults

FAULT = str(faults.FAULTS / "pytorch_191937.py")
TINY = ["--layers", "1", "--text-only", "--device", "cpu"]

Captured = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_the_planted_fault_is_told_first_and_its_dump_last(tmp_path: Path, capfd: Captured) -> None:
    assert main(["locate", *TINY, "--pad", "7", "--preload", FAULT, "--out", str(tmp_path), "--greedy", "2"]) == 1
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("SDPA backend: FLASH_ATTENTION in model.language_model.layers.0.self_attn")
    assert "row 288" in lines[0]
    assert lines[0].endswith(" (preloaded: pytorch_191937.py)")
    assert "1 of 2 total lengths (282, 289) wrong: 289" in lines
    (dump,) = tmp_path.glob("*.pt")
    assert lines[-1].endswith(f"diagnose {dump} --preload {FAULT}")
    assert "greedy, MATH: " in out
    assert "2 of 2: total length 289" in err
    assert any("not that its values are right" in line for line in lines)


@pytest.mark.slow
def test_a_healthy_model_is_one_json_document_and_status_0(tmp_path: Path, capfd: Captured) -> None:
    assert main(["locate", *TINY, "--pads", "1", "--no-lengths", "--json", "--out", str(tmp_path / "none")]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["schema"]["name"] == "locate"
    assert document["level"] == "nothing beyond dtype noise"
    assert {"module", "stage", "sentence", "sweep", "length_rule", "stages", "preloaded", "environment"} <= set(
        document
    )
    assert {(row["pad"], row["path"]) for row in document["sweep"]} >= {(0, "default"), (1, "MATH"), (1, "eager")}
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_healthy_model_is_said_to_be_healthy(tmp_path: Path, capfd: Captured) -> None:
    assert main(["locate", *TINY, "--pad", "1", "--padding-side", "right", "--out", str(tmp_path)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("nothing beyond dtype noise")
    assert lines[-1].startswith("next: ")
    assert lines[-1].endswith("verify --pad 1 --padding-side right --device cpu --layers 1 --text-only")
    assert any(line.endswith("remark") for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pad", "3", "--pads", "9"], "--pads tries many paddings"),
        (["--pad", "3", "--total-length", "300"], "give one of them"),
        (["--total-length", "5", "--layers", "1"], "too short"),
        (["--model", "nowhere/at/all/here"], "no folder"),
        (["--pads", "0"], "--pads"),
        (["--preload", "missing.py"], "missing.py"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(words: list[str], said: str, capfd: Captured) -> None:
    assert main(["locate", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
