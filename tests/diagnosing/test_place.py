"""One folder a subject, one process a folder, and nobody's files removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sdpa_repro.capturing import folder as dumps
from sdpa_repro.diagnosing import place
from sdpa_repro.diagnosing.place import Run, brought, choose, held, read_run, set_aside, start_over, write_run
from sdpa_repro.errors import InputError


def begun(folder: Path, subject: str) -> Path:
    with held(folder):
        write_run(folder, Run(subject, "command", True))
    return folder


def test_a_subject_finds_its_folder_again_and_another_one_gets_its_own(tmp_path: Path) -> None:
    assert choose(tmp_path, "x", "a") == tmp_path / "x"
    begun(tmp_path / "x", "a")
    assert choose(tmp_path, "x", "a") == tmp_path / "x"
    assert choose(tmp_path, "x", "b") == tmp_path / "x-2"
    begun(tmp_path / "x-2", "b")
    assert choose(tmp_path, "x", "b") == tmp_path / "x-2"


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert choose(tmp_path, "x", "a") == tmp_path / "x"
    (tmp_path / "x" / "thesis.txt").write_text("years of work")
    assert choose(tmp_path, "x", "a") == tmp_path / "x-2"
    (tmp_path / "x-2").write_text("a file")
    assert choose(tmp_path, "x", "a") == tmp_path / "x-3"


def test_a_folder_whose_run_was_killed_at_its_very_beginning_is_used(tmp_path: Path) -> None:
    with held(tmp_path / "x"):
        pass
    assert choose(tmp_path, "x", "a") == tmp_path / "x"


def test_two_at_the_same_time_are_one_line(tmp_path: Path) -> None:
    other = held(tmp_path / "x")
    with held(tmp_path / "x"), pytest.raises(InputError, match="another diagnosis is at work"):
        other.__enter__()
    with held(tmp_path / "x"):
        pass


def test_what_a_killed_run_left_half_written_goes(tmp_path: Path) -> None:
    begun(tmp_path / "x", "a")
    left = [".sdpa-repro-12.tmp", ".stages/.sdpa-repro-34.tmp", ".index.jsonl.7", ".sessions/1-ab/1.json"]
    for name in left:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("half")
    with held(tmp_path / "x"):
        assert not [name for name in left if (tmp_path / "x" / name).exists()]


def test_starting_over_removes_results_and_keeps_what_was_edited_and_what_is_not_ours(tmp_path: Path) -> None:
    folder = begun(tmp_path / "x", "a")
    (folder / "issue.md").write_text("as written")
    (folder / "repro.py").write_text("as written")
    (folder / "result.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    (folder / "L00.pt").write_bytes(b"dump")
    (folder / dumps.INDEX).write_text(json.dumps({"file": "L00.pt"}) + "\n")
    hashes = {name: place.file_hash(folder / name) for name in ("issue.md", "repro.py")}
    (folder / place.STATE / "issue.json").write_text(json.dumps({"files": hashes}))
    (folder / "issue.md").write_text("with my own words")
    said = start_over(folder)
    assert said == ["issue.md was edited: kept as issue.edited.md"]
    assert sorted(path.name for path in folder.iterdir()) == [place.STATE, "issue.edited.md", "notes.txt"]
    assert (folder / "issue.edited.md").read_text() == "with my own words"
    assert read_run(folder) == Run("a", "command", True)


def test_what_was_edited_in_another_run_is_kept_beside_it(tmp_path: Path) -> None:
    folder = begun(tmp_path / "x", "a")
    for words in ("first", "second"):
        (folder / place.STATE / "issue.json").write_text(json.dumps({"files": {"issue.md": "another hash"}}))
        (folder / "issue.md").write_text(words)
        start_over(folder)
    kept = {path.name: path.read_text() for path in folder.glob("issue.*")}
    assert kept == {"issue.edited.md": "first", "issue.edited-2.md": "second"}


def test_a_dump_is_in_the_folder_without_taking_room_and_never_under_a_name_of_ours(tmp_path: Path) -> None:
    folder = begun(tmp_path / "out", "a")
    for name, there in (("x.pt", "x.pt"), ("call.pt", "captured.pt")):
        (tmp_path / name).write_bytes(name.encode())
        assert brought(tmp_path / name, folder) == folder / there
        assert brought(tmp_path / name, folder) == folder / there
        assert (folder / there).read_bytes() == name.encode()
    assert brought(folder / "x.pt", folder) == folder / "x.pt"


def test_without_hard_links_the_dump_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "x.pt").write_bytes(b"dump")
    assert brought(tmp_path / "x.pt", begun(tmp_path / "out", "a")).read_bytes() == b"dump"


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another --out"), held(tmp_path / "file" / "x"):
        pass

    def refused(*_: object, **__: object) -> int:
        raise OSError(30, "Read-only file system")

    begun(tmp_path / "x", "a")
    monkeypatch.setattr(place.os, "open", refused)
    monkeypatch.setattr(dumps, "prepare", lambda folder: None)
    with pytest.raises(InputError, match="Read-only file system; choose another --out"), held(tmp_path / "x"):
        pass


def test_the_results_of_another_command_are_moved_to_the_next_free_number(tmp_path: Path) -> None:
    (tmp_path / "x.1").write_text("a file of somebody's")
    for words, moved in (("first", "x.2"), ("second", "x.3")):
        folder = begun(tmp_path / "x", "a")
        (folder / "L00.pt").write_text(words)
        assert set_aside(folder) == tmp_path / moved
        assert not folder.exists()
        assert (tmp_path / moved / "L00.pt").read_text() == words
        assert read_run(tmp_path / moved) == Run("a", "command", True)


def test_a_folder_without_results_stays_where_it_is(tmp_path: Path) -> None:
    folder = begun(tmp_path / "x", "a")
    (folder / place.LOG).write_text("begun")
    assert set_aside(folder) is None
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_holds_what_the_command_needs_is_not_moved(tmp_path: Path) -> None:
    folder = begun(tmp_path / "x", "a")
    (folder / "repro.py").write_text("")
    with pytest.raises(InputError, match="copy it out, or choose another --out"):
        set_aside(folder, ["--option", folder / "repro.py"])
    assert (folder / "repro.py").exists()


def test_a_folder_that_cannot_be_moved_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(13, "Permission denied")

    folder = begun(tmp_path / "x", "a")
    (folder / "L00.pt").write_text("")
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(InputError, match=r"cannot move .*x to .*x\.1: Permission denied; choose another --out"):
        set_aside(folder)
