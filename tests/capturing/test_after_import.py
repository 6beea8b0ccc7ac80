"""An action right after a module's import, whichever way and whenever that happens."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdpa_repro.capturing.after_import import after_import, forget

NAME = "module_for_after_import"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / f"{NAME}.py"
    path.write_text("done = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop(NAME, None)


def test_the_action_runs_once_when_the_module_is_complete(module: Path) -> None:
    found: list[bool] = []
    finder = after_import(NAME, lambda: found.append(sys.modules[NAME].done))
    assert found == []
    imported = importlib.import_module(NAME)
    importlib.reload(imported)
    assert found == [True]
    assert finder not in sys.meta_path


def test_the_action_runs_at_once_when_the_module_is_there(module: Path) -> None:
    importlib.import_module(NAME)
    found: list[int] = []
    assert after_import(NAME, lambda: found.append(1)) is None
    assert found == [1]


def test_the_module_looks_as_if_nothing_had_happened(module: Path) -> None:
    after_import(NAME, lambda: None)
    imported = importlib.import_module(NAME)
    assert type(imported.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(imported.__loader__)
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__


def test_a_pending_action_can_be_forgotten(module: Path) -> None:
    found: list[int] = []
    forget(after_import(NAME, lambda: found.append(1)))
    importlib.import_module(NAME)
    assert found == []


def test_a_module_that_fails_to_import_fails_as_before(module: Path) -> None:
    module.write_text("raise ValueError('broken')\n")
    found: list[int] = []
    after_import(NAME, lambda: found.append(1))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(NAME)
    assert found == []


def test_a_module_that_does_not_exist_is_not_found_as_before() -> None:
    finder = after_import("no_such_module_at_all", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    forget(finder)


def test_asking_whether_the_module_is_there_does_not_use_the_action_up(module: Path) -> None:
    found: list[int] = []
    finder = after_import(NAME, lambda: found.append(1))
    for _ in range(2):
        assert importlib.util.find_spec(NAME) is not None
    assert found == []
    importlib.import_module(NAME)
    assert found == [1]
    assert finder not in sys.meta_path


def test_a_spec_that_was_asked_for_and_is_used_later_does_not_run_the_action_again(module: Path) -> None:
    found: list[int] = []
    after_import(NAME, lambda: found.append(1))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    importlib.import_module(NAME)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert found == [1]


def test_two_may_wait_for_one_module(module: Path) -> None:
    found: list[int] = []
    for number in (1, 2):
        after_import(NAME, lambda number=number: found.append(number))  # type: ignore[misc]
    imported = importlib.import_module(NAME)
    assert sorted(found) == [1, 2]
    assert "exec_module" not in vars(imported.__loader__)
