"""`sdpa-repro guard`: the script's own output and exit status, and a summary beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdpa_repro.cli import main
from tests.guarding.calls import rule_file

SCRIPT = """
import sys, torch
query = torch.randn(1, 2, 5, 8)
torch.nn.functional.scaled_dot_product_attention(query, query, query)
print("from the script", sys.argv[1:])
sys.exit(4)
"""

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.slow
def test_the_script_has_stdout_and_the_exit_status_to_itself(script: str, tmp_path: Path, capfd: Captured) -> None:
    assert main(["guard", "--rule", str(rule_file(tmp_path)), "--", script, "--json", "x"]) == 4
    out, err = capfd.readouterr()
    assert out == "from the script ['--json', 'x']\n"
    assert err == "guard: 1 attention call in 1 process, none of which had to be changed\n"


@pytest.mark.slow
def test_json_is_one_document_and_the_script_speaks_on_stderr(script: str, tmp_path: Path, capfd: Captured) -> None:
    assert main(["guard", "--json", "--rule", str(rule_file(tmp_path)), "--", script]) == 4
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["schema"]["name"] == "guard"
    assert (document["calls"], document["changed"], document["exit_status"]) == (1, {}, 4)
    assert document["preloaded"] == []
    assert "torch" in document["environment"]
    assert "from the script" in err


def test_bad_usage_is_one_line(script: str, tmp_path: Path, capfd: Captured) -> None:
    assert main(["guard"]) == 2
    assert capfd.readouterr().err == "error: nothing to run after --: give a script, or -m and a module\n"
    assert main(["guard", "--rule", str(tmp_path / "no.json"), "--", script]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "explain --json" in err
