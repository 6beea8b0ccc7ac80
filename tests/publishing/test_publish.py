"""The whole chain from a dump to a folder: files, answers, refusals."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.environment import capture_context
from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files
from sdpa_repro.publishing import publish as chain
from sdpa_repro.publishing.facts import Tried, is_synthetic, recipes_of, same_tensor
from sdpa_repro.publishing.publish import publish
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.publishing.story import Story
from sdpa_repro.publishing.version_row import Outcome, Row
from sdpa_repro.recipe import to_document
from tests.calls import make_call
from tests.faults import emulation
from tests.publishing.calls import FAULTS, HOSTILE, closed, tail

FAULT = FAULTS / "pytorch_191937.py"


@pytest.fixture(autouse=True)
def real_kernels() -> Iterator[None]:
    yield
    emulation.restore()


@pytest.fixture(autouse=True)
def quick_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "collect_env", lambda: "PyTorch version: here")


def dumped(path: Path, call: Any, **more: Any) -> Path:
    with torch.no_grad():
        context = capture_context(call)
    save(snapshot(call, context=context, **more), path)
    return path


def closed_dump(path: Path, **more: Any) -> Path:
    call, recipes = tail()
    return dumped(path, call, recipe={name: to_document(recipe) for name, recipe in recipes.items()}, **more)


@pytest.mark.slow
def test_a_failing_dump_becomes_a_script_that_fails_and_an_issue(tmp_path: Path) -> None:
    call = make_call(heads=4, rows=33, width=136, padding=5)
    dumped(tmp_path / "x.pt", call)
    result = publish(tmp_path / "x.pt", tmp_path / "out", preload=[FAULT], explained=False, test=True, budget=120)
    assert result.run is not None
    assert result.run.fails, result.run.output
    assert result.exit_status == 1
    assert "fails here as it should" in result.sentence
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"repro.py", "issue.md", "test_repro.py", "call.pt"}
    assert result.closed
    text = (tmp_path / "out" / "repro.py").read_text()
    assert len(text.splitlines()) <= 40
    assert text in (tmp_path / "out" / "issue.md").read_text()
    assert call.query.numel() > load(tmp_path / "out" / "call.pt").call.query.numel()
    done = subprocess.run([sys.executable, "-I", str(result.script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    space: dict[str, Any] = {}
    exec(compile(text[: text.index("with torch.no_grad()")], "repro.py", "exec"), space)
    for name, tensor in load(tmp_path / "out" / "call.pt").call.tensors.items():
        assert same_tensor(space["mask" if name == "attn_mask" else name], tensor)


@pytest.mark.slow
def test_what_is_known_of_the_captured_call_is_not_worked_out_again_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "explain", None)
    path = closed_dump(tmp_path / "x.pt")
    told = {"sentence": "FLASH_ATTENTION: known already", "needed": ["attn_mask"]}
    result = publish(path, tmp_path / "out", preload=[FAULT], reduced=False, captured=told)
    assert (result.cause, result.explanation) == ("FLASH_ATTENTION: known already.", told)


def test_the_captured_calls_lengths_are_searched_where_the_reduced_call_gives_no_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Found:
        def document(self) -> dict[str, Any]:
            return {"length_rule": {"rule": "S % 32 == 1"}}

    def explained(path: Path, **options: Any) -> Found:
        asked.append({"path": path, **options})
        return Found()

    monkeypatch.setattr(chain, "explain", explained)
    seen: Any = object()
    options = chain._Options(tmp_path / "x.pt", tmp_path, (), "cpu", False, False, None, True, True, 60, print)
    none = {"length_rule": {"rule": None, "fails": 3, "passes": 9}}
    case = chain._Case(tmp_path / "call.pt", "MATH", seen, reduction={"needed": ["S"]}, explanation=none)
    assert chain._told(options, case, seen, 20.0) == Found().document()
    (only,) = asked
    assert only["path"] == tmp_path / "x.pt"
    assert (only["backend"], only["parts"], only["replayed"]) == ("MATH", ("length_rule",), seen)
    assert only["budget"] == pytest.approx(40)
    known = {"length_rule": {"rule": "S > 2"}}
    assert chain._told(replace(options, captured=known), case, seen, 20.0) == known
    for found in ({"length_rule": {**none["length_rule"], "rule": "S > 1"}}, {}, {"length_rule": {"fails": 3}}):
        assert chain._told(options, replace(case, explanation=found), seen, 20.0) == {}
    assert chain._told(options, replace(case, reduction={}), seen, 20.0) == {}
    assert chain._told(options, case, seen, 59.5) == {}
    assert len(asked) == 1


@pytest.mark.slow
def test_a_healthy_dump_is_nothing_to_report(tmp_path: Path) -> None:
    result = publish(closed_dump(tmp_path / "x.pt"), tmp_path / "out")
    assert result.exit_status == 0
    assert result.sentence.startswith("nothing to report: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_captured_values_stay_in_a_file_beside_the_script(tmp_path: Path) -> None:
    call = make_call(heads=2, rows=33, width=136)
    path = dumped(tmp_path / "x.pt", call, origin={"model": "real/model"})
    result = publish(path, tmp_path / "out", preload=[FAULT], reduced=False, explained=False)
    assert result.run is not None
    assert result.run.fails, result.run.output
    assert not result.closed
    text = (tmp_path / "out" / "repro.py").read_text()
    assert "torch.tensor([" not in text
    assert "weights_only=True" in text
    assert (tmp_path / "out" / "call.pt").read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_hostile_metadata_stays_in_its_place(tmp_path: Path) -> None:
    text = " ".join(HOSTILE.values())
    origin = {name: text.encode("utf-8", "replace").decode() for name in ("model", "module", "phase", "command")}
    path = closed_dump(tmp_path / "x.pt", origin=origin)
    result = publish(path, tmp_path / "out", preload=[FAULT], reduced=False, explained=False)
    assert result.run is not None
    assert result.run.fails
    assert {file.name for file in tmp_path.iterdir()} == {"x.pt", "out"}
    imported = ast.parse((tmp_path / "out" / "repro.py").read_text())
    names = {alias.name for node in ast.walk(imported) if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"torch", "torch.nn.functional"}


def test_files_of_an_earlier_run_are_kept_without_force(tmp_path: Path) -> None:
    path = closed_dump(tmp_path / "x.pt")
    folder = tmp_path / "x.issue"
    folder.mkdir()
    (folder / "issue.md").write_text("mine")
    with pytest.raises(InputError, match=r"already holds issue\.md"):
        publish(path)
    assert (folder / "issue.md").read_text() == "mine"
    with pytest.raises(InputError, match="is no folder"):
        publish(path, path)
    with pytest.raises(InputError, match="null byte"):
        publish(path, "a\0b")


def test_a_bad_template_stops_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the template"):
        publish(closed_dump(tmp_path / "x.pt"), template=tmp_path / "none.txt")


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "repro.py").symlink_to(outside)
    with pytest.raises(InputError, match="already holds"):
        files.check_free(tmp_path / "out", ["repro.py"], force=False)
    files.write(tmp_path / "out", "repro.py", "new")
    assert outside.read_text() == "mine"
    assert (tmp_path / "out" / "repro.py").read_text() == "new"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["repro.py"]


def test_a_recipe_that_does_not_build_its_tensor_is_not_believed(tmp_path: Path) -> None:
    call, recipes = closed(rows=5)
    stated: dict[str, Any] = {name: to_document(recipe) for name, recipe in recipes.items()}
    stated["key"] = {**stated["key"], "seed": 99}
    stated["value"] = {"kind": "nonsense"}
    dump = load(dumped(tmp_path / "x.pt", call, recipe=stated))
    assert set(recipes_of(dump)) == {"query", "attn_mask"}


def test_only_made_up_values_may_go_inline_unasked() -> None:
    assert is_synthetic({"model": "none: made by a script"})
    assert is_synthetic({"model": "tiny Gemma 4 Unified (embedded, random weights)"})
    for model in ("google/gemma", None, 3, "not none: x"):
        assert not is_synthetic({"model": model})


def test_results_of_this_script_or_dump_go_into_the_issue_and_others_into_a_note(tmp_path: Path) -> None:
    made = Tried("script", Story("MATH"), ScriptRun(0, "torch 2.13.0 on cpu\nMATH   0.5\n", 1.0, ""))
    path = tmp_path / "x.pt"
    path.write_bytes(b"dump")
    row = Row("r.json", Outcome.PASSES, {"MATH": "ok"}, {"torch": "2.14.1", "device": "cpu"})
    tried = tuple(
        (name, hashlib.sha256(data).hexdigest(), [row])
        for name, data in (("script.json", b"script"), ("dump.json", b"dump"), ("other.json", b"other"))
    )
    options = chain._Options(path, tmp_path, (), "cpu", False, False, None, True, True, None, print, tried)
    rows, notes = chain._versions(options, made)
    assert [row["torch"] for row in rows] == ["2.13.0 (cpu)", "2.14.1 (cpu)", "2.14.1 (cpu)"]
    assert notes == ["other.json is about another script: run the new one with sdpa-repro versions and --issue"]
    assert chain._versions(replace(options, tried=()), made) == ([], [])


def test_bad_results_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "replay", lambda *words, **more: pytest.fail("something ran"))
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(InputError, match=r"r\.json holds no results"):
        publish(tmp_path / "x.pt", results=[tmp_path / "r.json"])
