"""`sdpa-repro explain`: the cause first, each part under its title, the next command last."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdpa_repro.cli import main
from sdpa_repro.cli.explain import _range, limits, next_words, sections
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.answers import Conditions, Workaround
from sdpa_repro.explaining.conditions import backend_line
from sdpa_repro.explaining.explanation import Explanation
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.explaining.test_explain import replayed
from tests.replaying.dumps import FAULTS, write_dump

FAULT = str(FAULTS / "pytorch_191937.py")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.inference_mode():
        return write_dump(make_call(rows=33, heads=2, padding=3), tmp_path_factory.mktemp("dump") / "call.pt")


@pytest.mark.slow
def test_the_cause_is_first_and_the_next_command_last(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["explain", str(path), "--lengths", "1:80", "--preload", FAULT])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[0].startswith(
        "FLASH_ATTENTION: the last query row (32) was computed with mask row 0, when L % 32 == 1"
    )
    assert "known: pytorch#191937 (as emulated here on FLASH_ATTENTION, CPU), fixed in 2.14.0" in lines[0]
    for title in ("conditions", "lengths", "what it computed", "memory", "known issues", "workarounds", "preloaded"):
        assert title in lines
    assert lines[-1].startswith("next: ")


@pytest.mark.slow
def test_json_is_one_document_with_the_promised_keys(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["explain", str(path), "--budget", "0.001", "--json", "--preload", FAULT])
    document = json.loads(capsys.readouterr().out)
    assert status == 1
    assert document["schema"]["name"] == "explain"
    promised = {"needed", "not_needed", "not_tested", "length_rule", "hypothesis", "poison", "workarounds", "known"}
    assert promised | {"preloaded", "environment", "sdpa_repro"} <= set(document)


@pytest.mark.slow
def test_a_healthy_dump_says_so_and_exits_with_0(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("clean on this cpu")
    assert "--preload" not in out


@pytest.mark.parametrize("text", ["5", "9:3", "a:b", "0:4", "1:2:3", "-1:5"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="give two numbers"):
        _range(text)


def test_a_range_is_two_numbers() -> None:
    assert _range("3:400") == (3, 400)
    assert _range(None) is None


def test_a_missing_dump_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.pt")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_what_was_not_judged_says_where_it_was_seen_and_goes_on_with_more_time() -> None:
    cells = (Cell("FLASH_ATTENTION", "bfloat16", Status.DIVERGES),)
    seen = replayed(cells, ("FLASH_ATTENTION",))
    known = Explanation(Path("x.pt"), "FLASH_ATTENTION", seen, stand_in=(257, 257), seconds=22.0)
    assert "explained at L = 257, S = 257, where it fails in the same way, for want of time" in limits(known)
    assert next_words(known, [])[0] == "issue"
    guess = replace(known, judged=False)
    assert "explained at L = 257, S = 257, for want of time" in limits(guess)
    assert next_words(guess, ["--preload", "x.py"]) == ["explain", Path("x.pt"), "--budget", 90, "--preload", "x.py"]


@pytest.mark.slow
def test_a_float8_dump_is_nobody_s_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = make_call(rows=9, layout="dense", mask=None)
    narrow = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in call.tensors.items()}
    dumped = str(write_dump(call.with_tensors(narrow), tmp_path / "call.pt"))
    for verb, *options in (["explain"], ["replay"], ["diagnose", "-o", str(tmp_path / "out")]):
        assert main([verb, *options, dumped]) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith("nothing could be judged: no backend on this cpu takes float8_e4m3fn queries; ")
    assert main(["explain", "--json", dumped]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["backend"], document["verdict"], document["judged"]) == (None, "healthy", True)


def test_a_line_that_only_a_model_of_transformers_understands_says_so() -> None:
    helps = tuple(Workaround(f"{name} is right", backend_line(name), True) for name in ("MATH", "eager"))
    found = Explanation(Path("x.pt"), "FLASH_ATTENTION", replayed((), ()), Conditions(True, workarounds=helps))
    lines = dict(sections(found))["workarounds"]
    assert [line for line in lines if line.endswith(":")] == [
        "MATH is right:",
        "eager is right (models of transformers):",
    ]
