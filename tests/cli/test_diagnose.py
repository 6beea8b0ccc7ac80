"""`sdpa-repro diagnose`: one command from a model, a script or a dump to the cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdpa_repro.cli import main
from tests.calls import make_call
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


@pytest.mark.slow
def test_the_demo_finds_the_planted_fault_and_says_that_it_is_planted(tmp_path: Path) -> None:
    done = run(tmp_path, "--demo")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "PLANTED" in lines[0]
    assert any("the last query row (288) was computed with mask row 0, when L % 32 == 1" in line for line in lines[:4])
    assert any("likeliest token changes" in line for line in lines)
    assert lines[-2] == "demo: found: pytorch#191937, as planted"
    assert lines[-1].startswith("next: cat ")
    (issue,) = tmp_path.glob("dumps/*.issue/issue.md")
    text = issue.read_text()
    assert "do not post it" in text
    assert "the last query row (64) was computed with mask row 0" in text
    assert "fails here as it should" in done.stdout


@pytest.mark.slow
def test_a_script_with_the_fault_is_diagnosed_and_without_it_is_clean(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(SCRIPT)
    wrong = run(tmp_path, "--preload", FAULT, "--budget", "0.001", "--", "failing.py")
    assert wrong.returncode == 1, wrong.stderr
    assert wrong.stdout.startswith("FLASH_ATTENTION is wrong in query row 32 of 4 heads; known: pytorch#191937")
    clean = run(tmp_path, "--out", "healthy", "--", "failing.py")
    assert clean.returncode == 0, clean.stderr
    assert clean.stdout.startswith("clean on this cpu")


@pytest.mark.slow
def test_a_dump_is_diagnosed_as_one_json_document(tmp_path: Path) -> None:
    path = write_dump(make_call(rows=33, heads=2), tmp_path / "call.pt")
    done = run(tmp_path, str(path), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["schema"]["name"] == "diagnose"
    assert (document["capture"], document["verdict"]) == (None, "healthy")


@pytest.mark.slow
def test_a_script_that_fails_keeps_its_status(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(SCRIPT + "\nraise SystemExit(7)\n")
    assert run(tmp_path, "--", "failing.py").returncode == 7


@pytest.mark.parametrize("words", [["--demo", "--pad", "3"], ["--demo", "x.pt"], ["x.pt", "--model", "y"], ["none.pt"]])
def test_options_that_do_not_go_together_are_one_line_and_status_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
