"""Files that belong together are all there or none is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / files.SCRIPT).write_text("old")
    real, flushed = os.fsync, []

    def fsync(descriptor: int) -> None:
        flushed.append(descriptor)
        if len(flushed) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match=r"call\.pt: No space left on device; choose another folder with -o"):
        files.write_all(tmp_path, {files.SCRIPT: "new", files.ISSUE: "new", files.DUMP: b"new"})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(files.SCRIPT, "old")]


def test_all_of_them_are_written_under_their_names(tmp_path: Path) -> None:
    paths = files.write_all(tmp_path / "new", {files.SCRIPT: "a", files.DUMP: b"b"})
    assert {name: path.read_text() for name, path in paths.items()} == {files.SCRIPT: "a", files.DUMP: "b"}
    assert len(list((tmp_path / "new").iterdir())) == 2
