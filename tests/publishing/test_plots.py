"""The picture for an issue: what it needs, what it replaces, what is on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing.plots import PNG, check_picture, write_picture
from sdpa_repro.publishing.section import Section
from tests.publishing.sections import FAULT, crashing, failing, healthy, hostile, last_row_wrong


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        check_picture(tmp_path / "x.png", force=False)


def drawn(section: Section, path: Path) -> tuple[int, int]:
    """Width and height of the picture, from the header of the file."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    data = write_picture(section, path).read_bytes()
    assert data.startswith(PNG)
    assert len(data) > 10_000
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.slow
@pytest.mark.parametrize("make", [failing, healthy, crashing, hostile])
def test_every_kind_of_dump_has_a_picture(make: Callable[[], Section], tmp_path: Path) -> None:
    width, height = drawn(make(), tmp_path / "new" / "x.png")
    assert width == 1650
    assert height == 1140
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.png"]


@pytest.mark.slow
def test_many_rows_are_drawn_with_their_worst(tmp_path: Path) -> None:
    drawn(replace(failing(), heat=last_row_wrong(heads=2, rows=20_000)), tmp_path / "x.png")


@pytest.mark.slow
def test_a_preloaded_file_changes_the_picture(tmp_path: Path) -> None:
    drawn(failing(), tmp_path / "a.png")
    drawn(failing(preloaded=(FAULT,)), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_a_picture_replaces_a_picture_but_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    path = tmp_path / "x.png"
    check_picture(path, force=False)
    path.write_bytes(PNG)
    check_picture(path, force=False)
    path.write_bytes(b"my thesis")
    with pytest.raises(InputError, match="is no PNG picture"):
        check_picture(path, force=False)
    check_picture(path, force=True)
    with pytest.raises(InputError, match=r"ends in \.png"):
        check_picture(tmp_path / "x.jpg", force=True)
    (tmp_path / "d.png").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_picture(tmp_path / "d.png", force=True)
