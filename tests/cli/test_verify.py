"""`sdpa-repro verify`: the answer first, the checklist, what to run next, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.cli import main
from sdpa_repro.locating import written_test
from sdpa_repro.locating.written_test import WrittenTest
from tests import models
from tests.capturing import faults

FAULT = Path(__file__).parent.parent / "faults" / "pytorch_191937.py"
QUICK = ("--layers", "1", "--no-batches", "--no-caches", "--total-length", "289")


@pytest.fixture(autouse=True)
def healthy() -> Any:
    yield
    faults.restore()


def test_a_healthy_model_holds_and_a_test_is_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(models.save_llama(tmp_path / "llama"))
    words = ("--model", model, "--prompt", "the cat sat on the mat", "--pads", "2", "--device", "cpu")
    assert main(["verify", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all 5 invariants that apply hold at 3 total lengths from 6 to 8"
    assert any(line.startswith("dynamic and static cache  holds") for line in lines)
    assert any("the prompt has no image" in line for line in lines)
    assert lines[-1].startswith("next: ")
    assert f"verify --model {model} --prompt 'the cat sat on the mat' --device cpu --write-test test_" in lines[-1]


@pytest.mark.slow
def test_a_broken_item_is_named_first_and_locate_is_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *QUICK, "--dtype", "float32", "--preload", str(FAULT)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("logits broken at total length 289")
    assert lines[0].endswith(" (preloaded: pytorch_191937.py)")
    assert any("not asked for" in line for line in lines)
    assert f"locate --dtype float32 --layers 1 --total-length 289 --preload {FAULT}" in lines[-1]


def test_the_document_has_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *QUICK, "--text-only", "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"]["name"] == "verify"
    assert found["holds"] is True
    assert len(found["items"]) == 8
    assert {each["status"] for each in found["items"]} == {"holds", "not applicable"}
    assert [point["total"] for point in found["points"]] == [282, 289]


def test_a_written_test_is_answered_with_how_its_run_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_padding.py"

    def written(*args: Any, **words: Any) -> WrittenTest:
        return WrittenTest(path, 1, "1 failed in 1.00s", "E  assert False\n1 failed in 1.00s", "LlamaForCausalLM")

    monkeypatch.setattr(written_test, "write_test", written)
    assert main(["verify", "--write-test", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path} is written and fails here: 1 failed")
    assert lines[-1].endswith(f" -m pytest -q {path}")
    assert main(["verify", "--write-test", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["works"] is False


@pytest.mark.parametrize(("there", "said"), [(False, "is read-only; name a file"), (True, "give another name")])
def test_a_test_that_cannot_be_written_is_said_before_a_model_is_built(
    there: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_padding.py"
    if there:
        path.write_text("")
    monkeypatch.setattr("os.access", lambda name, mode: there and Path(name) != path)  # root may write anywhere
    assert main(["verify", "--write-test", str(path), "--force"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: cannot write {path}: ")
    assert said in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--pads", "3", "--pad", "1"), "--pads tries many"),
        (("--force",), "--force is for --write-test"),
        (("--model", "x", "--tp-plan", "auto"), "--tp-plan"),
        (("--write-test", "test.txt"), "no name for a test"),
        (("--total-length", "5"), "too short"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error
