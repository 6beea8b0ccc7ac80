"""`sdpa-repro sweep`: lists of numbers, the table, the document, and ranks that split the grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sdpa_repro.cli import main
from sdpa_repro.cli.sweep import numbers, words
from sdpa_repro.errors import InputError
from tests import torchrun
from tests.calls import make_call
from tests.replaying.dumps import FAULTS, write_dump

FAULT = str(FAULTS / "pytorch_191937.py")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.inference_mode():
        return write_dump(make_call(rows=33, heads=2, padding=3), tmp_path_factory.mktemp("dump") / "call.pt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ()),
        ("5", (5,)),
        ("3:6", (3, 4, 5, 6)),
        ("64, 65,63:64", (63, 64, 65)),
        ("7:7", (7,)),
    ],
)
def test_lists_hold_numbers_and_ranges(text: str | None, expected: tuple[int, ...]) -> None:
    assert numbers("--lengths", text) == expected


@pytest.mark.parametrize("text", ["0", "6:3", "a", "1:", ":5", "1:2:3", "-4", "1.5", "1:99999999999"])
def test_other_lists_are_errors_that_name_the_option(text: str) -> None:
    with pytest.raises(InputError, match="--head-dim"):
        numbers("--head-dim", text)


def test_words_are_split_at_commas() -> None:
    assert words("as-dumped, dense,") == ("as-dumped", "dense")


def test_a_wrong_word_is_one_line_and_bad_input(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(path), "--layout", "tidy"]) == 2
    assert "there is no layout 'tidy': choose from as-dumped, dense" in capsys.readouterr().err


@pytest.mark.slow
def test_the_answer_is_first_and_the_next_command_last(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lengths", "31:35", "--layout", "as-dumped,dense", "--in-process", "--preload", FAULT]
    assert main(["sweep", str(path), *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "default, bfloat16, head_dim 136, as-dumped: wrong at 1 of 5 lengths, L in 33; "
        "1 of 2 forms of the call fail (preloaded: pytorch_191937.py)"
    )
    assert "lengths: L, with S = L in 31–35" in lines
    assert lines[-1].startswith("next: ")
    assert f"explain {path} --preload {FAULT}" in lines[-1]


def test_json_is_one_document(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["sweep", str(path), "--lengths", "33", "--vary", "S", "--backend", "MATH", "--in-process", "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["schema"]["name"] == "sweep"
    assert {"rows", "lengths", "complete", "ranks", "preloaded", "environment", "sdpa_repro"} <= set(document)
    assert document["rows"][0]["passing"] == [[33, 33]]


@pytest.mark.slow
def test_ranks_split_the_grid_and_rank_0_tells_the_whole(path: Path, tmp_path: Path) -> None:
    words = ["--lengths", "31:35", "--layout", "as-dumped,dense", "--in-process", "--json", "--preload", FAULT]
    done = torchrun.run("-m", "sdpa_repro", "sweep", path, *words, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert document["ranks"] == 2
    assert [(row["layout"], row["failing"], row["passes"]) for row in document["rows"]] == [
        ("as-dumped", [[33, 33]], 4),
        ("dense", [], 5),
    ]


def test_a_call_that_was_wrong_live_is_said_where_no_length_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = {"ran": "FLASH_ATTENTION", "status": "diverges", "ratio": 39.0}
    planted = {"preloaded": [{"name": "fault.py", "sha256": "0" * 64}]}
    words = ["--lengths", "33", "--backend", "MATH", "--in-process"]
    for told, said in (
        (planted, "the dumped call was wrong live with fault.py preloaded: add --preload to see it again"),
        ({}, "the dumped call was wrong live, and no length tried here is"),
    ):
        dumped = write_dump(make_call(rows=33, heads=2), tmp_path / "call.pt", live=live, **told)
        assert main(["sweep", str(dumped), *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == said
        assert lines[-1].endswith(f" replay {dumped}")
        assert main(["sweep", str(dumped), *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["hint"] == said


def test_a_call_that_was_right_live_needs_no_hint(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(path), "--lengths", "33", "--backend", "MATH", "--in-process"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == ""
    assert lines[-1].endswith(f" show {path}")
