"""Files of results: what is written is read back, and a hostile file gets one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing.version_results import LARGEST, check_target, head, read_results, write_results
from sdpa_repro.publishing.version_row import Outcome, Row, cudnn_version, machine_of
from tests.publishing.calls import HOSTILE

SHA = "ab" * 32
H100 = {
    "torch": "2.11.0+cu128",
    "device": "cuda",
    "gpu": "NVIDIA H100",
    "driver": "570.86.15",
    "cudnn": "91501",
}
ROW = Row("here", Outcome.FAILS, {"MATH": "ok", "CUDNN_ATTENTION": "wrong"}, H100, "wrong", 3.25, ("x.py",))


def document(**changes: Any) -> dict[str, Any]:
    return {**head(), "subject": {"name": "repro.py", "kind": "script", "sha256": SHA}, "rows": [], **changes}


def row(**changes: Any) -> dict[str, Any]:
    return document(rows=[{**ROW.document(), **changes}])


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8", errors="replace")
    return path


def test_what_is_written_is_read_back_under_the_name_of_the_file(tmp_path: Path) -> None:
    other = Row("torch 2.14.1", Outcome.MISSING, reason="no network")
    write_results(document(rows=[ROW.document(), other.document()]), tmp_path / "h100.json")
    digest, rows = read_results(tmp_path / "h100.json")
    assert digest == SHA
    assert rows[0] == Row("h100.json", Outcome.FAILS, ROW.results, H100, "wrong", 3.2, ("x.py",))
    assert rows[1] == Row("h100.json: torch 2.14.1", Outcome.MISSING, reason="no network")


def test_keys_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    content = row(new="later", machine={**H100, "host": "secret"})
    _, rows = read_results(written(tmp_path / "r.json", {**content, "more": [1]}))
    assert rows[0].machine == H100


BAD = {
    "empty": "",
    "no JSON": "{",
    "deep": "[" * 100_000,
    "huge number": '{"schema": ' + "9" * 10_000 + "}",
    "NaN": json.dumps({"schema": {"name": "versions", "version": 1}, "x": float("nan")}),
    "list": [],
    "text": '"x"',
    "null": "null",
    "other schema": document(schema={"name": "replay", "version": 1}),
    "schema text": document(schema="versions"),
    "later version": document(schema={"name": "versions", "version": 2}),
    "version true": document(schema={"name": "versions", "version": True}),
    "no subject": document(subject=None),
    "short sha256": document(subject={"sha256": "ab"}),
    "sha256 list": document(subject={"sha256": ["a"] * 64}),
    "rows object": document(rows={}),
    "too many rows": document(rows=[{}] * 501),
    "row text": document(rows=["x"]),
    "no outcome": row(outcome=None),
    "outcome list": row(outcome=["fails"]),
    "own outcome": row(outcome="perfect"),
    "results list": row(results=[]),
    "own backend": row(results={"| x |": "ok"}),
    "own word": row(results={"MATH": "ok | <b>"}),
    "word list": row(results={"MATH": ["ok"]}),
    "no machine": row(machine=None),
    "large": '"' + "x" * LARGEST + '"',
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_that_holds_anything_else_is_refused_in_one_line(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InputError) as error:
        read_results(written(tmp_path / "r.json", content))
    said = str(error.value)
    assert "holds no results" in said
    assert "make such a file with sdpa-repro versions FILE -o results.json" in said
    assert "\n" not in said
    assert len(said) < 400


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError, match="is no JSON"):
        read_results(tmp_path / "bytes.json")
    for path in (tmp_path, tmp_path / "none.json", "nul\0byte"):
        with pytest.raises(InputError, match="--results"):
            read_results(path)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_foreign_text_is_one_short_line(tmp_path: Path, text: str) -> None:
    content = row(name=text, reason=text, planted=[text, 3, None], machine={"torch": text, "gpu": text, "driver": 5})
    _, rows = read_results(written(tmp_path / "r.json", content))
    for said in (rows[0].name, rows[0].reason, *rows[0].planted, *rows[0].machine.values()):
        assert said.isprintable()
        assert len(said) <= 200
    assert "driver" not in rows[0].machine


@pytest.mark.parametrize("seconds", [True, -1, 1e300, "3", None, [1]])
def test_seconds_that_are_no_time_are_left_out(tmp_path: Path, seconds: Any) -> None:
    assert read_results(written(tmp_path / "r.json", row(seconds=seconds)))[1][0].seconds is None


def test_only_files_of_results_are_overwritten(tmp_path: Path) -> None:
    check_target(tmp_path / "new.json")
    written(tmp_path / "r.json", document())
    check_target(tmp_path / "r.json")
    written(tmp_path / "mine.json", "{}")
    with pytest.raises(InputError, match="give another file with -o"):
        check_target(tmp_path / "mine.json")
    with pytest.raises(InputError, match="is a folder"):
        check_target(tmp_path)
    with pytest.raises(InputError, match=r"mine\.json is no folder"):
        check_target(tmp_path / "mine.json" / "r.json")


def test_a_gpu_is_told_with_driver_and_cudnn() -> None:
    assert ROW.where == "NVIDIA H100, driver 570.86.15, cuDNN 9.15.1"
    assert Row("here", Outcome.PASSES, machine={**H100, "device": "cpu"}).where == "cpu"
    assert Row("here", Outcome.PASSES, machine={"torch": "2.13.0", "device": "mps"}).where == "mps"
    assert Row("torch 9.9.9", Outcome.MISSING).torch == "9.9.9"
    assert Row("/usr/bin/python3", Outcome.ERROR).torch == ""


@pytest.mark.parametrize(("number", "said"), [("91501", "9.15.1"), ("90100", "9.1.0"), ("8902", "8.9.2"), ("x", "x")])
def test_the_number_of_cudnn_is_a_version(number: str, said: str) -> None:
    assert cudnn_version(number) == said


def test_a_row_keeps_nothing_that_names_the_machine() -> None:
    software = {
        "torch": "2.13.0",
        "torch_path": "~/secret",
        "platform": "Linux",
        "gpu": None,
        "host": "x",
        "cudnn": 91501,
    }
    assert machine_of(software, "cpu") == {"torch": "2.13.0", "cudnn": "91501", "device": "cpu"}
