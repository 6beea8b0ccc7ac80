"""Names of folders, and which commands are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.diagnosing import naming
from sdpa_repro.diagnosing.naming import command_key, fingerprint, name_of, subject_of
from sdpa_repro.errors import InputError


@pytest.mark.parametrize(
    ("dump", "words", "model", "name"),
    [
        (Path("dumps/L05-self_attn-call5-289x289.pt"), [], None, "L05-self_attn-call5-289x289"),
        (Path("ö /…/ä b.pt"), [], None, "b"),
        (None, ["dir/failing.py", "--lr", "3"], None, "failing"),
        (None, ["torchrun", "--nproc-per-node", "2", "train.py"], None, "train"),
        (None, ["-m", "package.module", "x"], None, "package.module"),
        (None, ["-c", "import torch"], None, "command"),
        (None, ["/bin/serve"], None, "serve"),
        (None, [], "google/gemma-4-12B-it", "gemma-4-12B-it"),
        (None, [], "models/mine/", "mine"),
        (None, [], None, "embedded-model"),
        (None, [], "../..", "call"),
    ],
)
def test_the_folder_is_named_after_what_is_diagnosed(
    dump: Path | None, words: list[str], model: str | None, name: str
) -> None:
    assert name_of(dump, words, model) == name


def test_a_subject_is_a_dump_by_its_bytes_a_script_a_model(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one.pt", "same.pt", "other.pt"))
    one.write_bytes(b"1")
    same.write_bytes(b"1")
    other.write_bytes(b"2")
    assert subject_of(one, [], None) == subject_of(same, [], None) != subject_of(other, [], None)
    assert subject_of(None, ["a.py", "1"], None) == subject_of(None, ["a.py", "2"], None)
    subjects = [
        subject_of(None, ["a.py"], None),
        subject_of(None, ["b.py"], None),
        subject_of(None, [], "a"),
        subject_of(None, [], None),
        subject_of(None, [], None, demo=True),
    ]
    assert len(set(subjects)) == 5
    with pytest.raises(InputError, match="cannot read"):
        subject_of(tmp_path / "none.pt", [], None)


def test_a_command_is_the_same_until_its_files_its_options_or_torch_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, fault = tmp_path / "s.py", tmp_path / "fault.py"
    script.write_text("1")
    fault.write_text("1")

    def key(**values: Any) -> str:
        return command_key([str(script), "x"], {"preload": (fault,), **values})

    first = key()
    assert key() == first
    assert key(pad=7) != first
    script.write_text("2")
    second = key()
    assert second != first
    fault.write_text("2")
    third = key()
    assert third != second
    monkeypatch.setattr(naming, "software", lambda: {"torch": "9.9.9"})
    assert key() != third


def test_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    before = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) != before
    assert fingerprint(tmp_path / "none") is None
    assert fingerprint("a\0b") is None
