"""Several environments in one go: order, files of other machines, Ctrl-C, the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import try_versions
from sdpa_repro.publishing.environments import Interpreter
from sdpa_repro.publishing.try_versions import Interrupted, versions
from sdpa_repro.publishing.version_results import write_results
from sdpa_repro.publishing.version_row import Outcome
from tests.publishing.interpreters import SCRIPT, failing, interpreter, passing


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script; "here" is a program under which it passes."""
    here = passing(tmp_path / "here" / "python", "2.13.0")
    monkeypatch.setattr(try_versions, "here", lambda: Interpreter("here", here))
    (tmp_path / "repro.py").write_text(SCRIPT)
    return tmp_path / "repro.py"


def built(found: dict[str, Interpreter]) -> object:
    return lambda version, *, index_url, progress: found[version]


def test_rows_come_in_the_order_here_interpreters_releases_files(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = versions(script, python=[failing(tmp_path / "gpu", "2.11.0")], with_here=False)
    write_results(other.document(), tmp_path / "h100.json")
    found = {
        "2.14.1": Interpreter("torch 2.14.1", passing(tmp_path / "e")),
        "9.9.9": Interpreter("torch 9.9.9", None, "no such release"),
    }
    monkeypatch.setattr(try_versions, "built", built(found))
    said: list[str] = []
    result = versions(
        script,
        torch=["2.14.1", "9.9.9", "2.14.1"],
        python=[failing(tmp_path / "old", "2.5.1")],
        results=[tmp_path / "h100.json"],
        progress=said.append,
    )
    assert [row.name for row in result.rows] == [
        "here",
        str(tmp_path / "old"),
        "torch 2.14.1",
        "torch 9.9.9",
        f"h100.json: {tmp_path / 'gpu'}",
    ]
    assert [row.outcome.value for row in result.rows] == ["passes", "fails", "passes", "not run", "fails"]
    assert result.exit_status == 1
    assert result.sentence.startswith("repro.py fails in 2 of 4 environments (torch 2.5.1, torch 2.11.0), passes in 2 ")
    assert said[:2] == ["here: running repro.py", "here: passes"]
    assert "torch 9.9.9: not run (no such release)" in said
    assert json.loads(json.dumps(result.document()))["subject"]["name"] == "repro.py"


def test_the_status_is_0_where_nothing_fails_and_2_where_nothing_ran(script: Path, tmp_path: Path) -> None:
    assert versions(script).exit_status == 0
    broken = interpreter(tmp_path / "broken", "ModuleNotFoundError: No module named 'torch'\n", 1)
    assert versions(script, python=[broken]).exit_status == 2
    none = versions(script, python=[broken], with_here=False)
    assert none.exit_status == 2
    assert none.sentence == "repro.py could be run in none of 1 environment"


def test_ctrl_c_keeps_the_rows_so_far(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(version: str, **words: object) -> Interpreter:
        raise KeyboardInterrupt

    monkeypatch.setattr(try_versions, "built", interrupt)
    with pytest.raises(Interrupted) as stop:
        versions(script, torch=["2.14.1"], python=[failing(tmp_path / "old")])
    assert [row.outcome for row in stop.value.partial.rows] == [Outcome.PASSES, Outcome.FAILS]


def test_results_of_another_script_are_refused(script: Path, tmp_path: Path) -> None:
    write_results(versions(script).document(), tmp_path / "r.json")
    script.write_text(SCRIPT + "# changed\n")
    with pytest.raises(InputError, match=r"r\.json holds results of another file than repro\.py"):
        versions(script, results=[tmp_path / "r.json"])


def test_this_environment_is_not_listed_twice(script: Path, tmp_path: Path) -> None:
    write_results(versions(script).document(), tmp_path / "r.json")
    assert len(versions(script, results=[tmp_path / "r.json"]).rows) == 1


def test_bad_requests_are_refused_before_anything_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(try_versions, "run_in", lambda *words, **more: pytest.fail("something ran"))
    with pytest.raises(InputError, match="nothing to do"):
        versions(script, with_here=False)
    with pytest.raises(InputError, match="is no release"):
        versions(script, torch=["newest"])
    with pytest.raises(InputError, match="no such program"):
        versions(script, python=["/nowhere/python"])
    with pytest.raises(InputError, match="takes an address"):
        versions(script, index_url="cpu")
    with pytest.raises(InputError, match="--device is for a dump"):
        versions(script, device="cpu")
    with pytest.raises(InputError, match="no such file"):
        versions(script, results=[tmp_path / "none.json"])
    with pytest.raises(InputError, match="--preload"):
        versions(script, preload=[tmp_path / "none.py"])
