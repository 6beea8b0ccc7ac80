"""Hostile files kept from the search for them, and a short search: see `tests/fuzz.py` and `tests/make_hostile.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import loaded, resident, shown
from tests.make_hostile import FOLDER, files
from tests.mutants import MARK, mutant

MEBIBYTES = 256
SOME = 300
"""Mutants of the short search; `python -m tests.fuzz` puts thousands through more."""

KEPT = sorted(FOLDER.glob("*.pt"))


def test_the_hostile_files_are_small_and_those_that_are_described() -> None:
    assert {path.stem for path in KEPT} == set(files())
    assert max(path.stat().st_size for path in KEPT) < 10_000
    assert sum(path.stat().st_size for path in KEPT) < 200_000


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_hostile_file_is_refused_in_one_line_or_shown_as_text(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = resident()
    found = loaded(path)
    assert (found is not None) == path.stem.startswith("harmless")
    if found is not None:
        shown(found, path)
    assert resident() - before < MEBIBYTES
    assert list(tmp_path.iterdir()) == []


def test_a_few_hundred_mutants_are_refused_in_one_line_or_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, path, read = resident(), tmp_path / "x.pt", 0
    for index in range(SOME):
        whole, what = mutant(1, index)
        path.write_bytes(whole)
        try:
            found = loaded(path)
            if found is not None:
                shown(found, path)
                read += 1
        except Exception as error:
            raise AssertionError(f"mutant(1, {index}): {what}") from error
    assert 0 < read < SOME
    assert resident() - before < MEBIBYTES
    assert not list(tmp_path.rglob(MARK))


def test_a_mutant_is_the_same_one_each_time() -> None:
    assert [mutant(3, index) for index in range(12)] == [mutant(3, index) for index in range(12)]
