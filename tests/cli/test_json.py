"""docs/json.md tells every key of every `--json` document, and no key that is not there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro import cli
from sdpa_repro.cli.diagnose_text import document as diagnose_document
from sdpa_repro.explaining import known_here
from tests.cli import documents

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "dumps" / "gemma4-global-33x33.sample.pt"
FAULT = ROOT / "tests" / "faults" / "pytorch_191937.py"
HEAD = "Every document"
SCRIPT = """\
import torch
from torch.nn.functional import scaled_dot_product_attention
query = torch.randn(1, 2, 8, 16)
scaled_dot_product_attention(query, query, query, is_causal=True)
"""


def tables() -> dict[str, dict[str, str]]:
    """Key to type, of each section of the page."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in (ROOT / "docs" / "json.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## ") or line.startswith("### "):
            section = line.lstrip("# ").strip("`")
        elif line.startswith("| `"):
            keys, kind, _ = (cell.strip() for cell in line.strip("|").split("|"))
            for key in re.findall(r"`([^`]+)`", keys):
                assert key not in found.setdefault(section, {}), f"{section}: {key} twice"
                found[section][key] = kind
    return found


TABLES = tables()


def paths(value: object, start: str = "") -> Iterable[str]:
    """Every key in a document: "cells[].bad.rows"."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            path = f"{start}.{name}" if start else str(name)
            yield path
            yield from paths(item, path)
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{start}[]")


def parent(path: str) -> str:
    """The key that holds this one, "" for one at the top."""
    return path.rpartition(".")[0].removesuffix("[]")


def told(path: str, table: Mapping[str, str]) -> bool:
    """Whether the page tells this key, or says of the key above it all that it says."""
    above = parent(path)
    if path in table or not above:
        return path in table
    whole = above in table and not any(parent(key) == above for key in table)
    return whole or (told(above, table) and not any(parent(key) == above for key in table))


def check(section: str, *samples: Mapping[str, Any], head: bool = True) -> None:
    """All keys of the samples are told, and all told keys are in them, but for those the page says may be missing."""
    table = {**(TABLES[HEAD] if head else {}), **TABLES[section]}
    seen = {path for sample in samples for path in paths(sample)}
    assert sorted(path for path in seen if not told(path, table)) == []
    missing = [path for path, kind in table.items() if path not in seen and "?" not in kind]
    open_ones = {path for path, kind in table.items() if "?" in kind and path not in seen}
    below = [path for path in missing if not any(path.startswith((f"{one}.", f"{one}[]")) for one in open_ones)]
    assert sorted(below) == []


def printed(capfd: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The document that a verb prints."""
    capfd.readouterr()
    cli.main([*map(str, words), "--json"] if "--" not in words else [str(words[0]), "--json", *map(str, words[1:])])
    found = json.loads(capfd.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def replayed() -> Any:
    """The sample with the known fault planted, replayed in the captured dtype."""
    from sdpa_repro.replaying.replay import replay

    return replay(SAMPLE, dtypes=["captured"], runs=1, preload=[FAULT])


def document(found: Any) -> dict[str, Any]:
    """As `--json` prints it, but for the head."""
    plain = json.loads(json.dumps(found.document(), default=str))
    assert isinstance(plain, dict)
    return {"schema": {"name": "", "version": 1}, "sdpa_repro": "", **plain}


def test_every_verb_with_json_has_a_table() -> None:
    commands = {name: cli.Verbs().get_command(cli.click.Context(cli.group), name) for name in cli.VERBS}
    verbs = {name for name, each in commands.items() if each and any("--json" in option.opts for option in each.params)}
    assert verbs == set(TABLES) - {HEAD, "replays", "dumps/index.jsonl"}


def test_show(capfd: pytest.CaptureFixture[str]) -> None:
    check("show", printed(capfd, "show", SAMPLE), {"preloaded": [documents.PRELOADED]})


def test_replay(replayed: Any) -> None:
    check("replay", document(replayed))


@pytest.mark.slow
def test_replays(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copy(SAMPLE, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"")
    words = ("--dtype", "captured", "--backend", "MATH", "--runs", 1)
    found = printed(capfd, "replay", *words, tmp_path)
    (one,) = found["replays"]
    assert set(one) - {"preloaded", "environment"} == {key for key in TABLES["replay"] if not parent(key)}
    assert set(found) - {"schema", "sdpa_repro"} == {"replays", "errors"}
    assert [set(each) for each in found["errors"]] == [{"file", "error"}]


def test_explain(replayed: Any) -> None:
    check("explain", document(documents.explanation(replayed)))


def test_sweep() -> None:
    check("sweep", {**document(documents.grid()), "hint": ""})


@pytest.mark.slow
def test_reduce(tmp_path: Path) -> None:
    from sdpa_repro.reducing.dump_reducer import reduce_dump

    found = reduce_dump(SAMPLE, tmp_path / "small.pt", preload=[FAULT], freeze=("L", "S", "E"))
    check("reduce", document(found))


def test_issue(replayed: Any) -> None:
    check("issue", document(documents.published(replayed)))


def test_versions() -> None:
    check("versions", document(documents.versions()))


def test_report(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, replayed: Any) -> None:
    found = documents.reported(replayed)
    check("report", {**document(found), "picture": None})


def test_share(replayed: Any) -> None:
    check("share", document(documents.shared(replayed)))


@pytest.mark.slow
def test_capture_and_the_index(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "dumps"
    of_script = printed(capfd, "capture", "--out", out, "--", tmp_path / "script.py")
    of_model = printed(capfd, "capture", "--out", out, "--pad", 7, "--no-prove")
    moved = [{"total": 289, "shift": 0.1, "flipped": False}]
    check("capture", of_script, {**of_model, "moved": moved, "preloaded": [documents.PRELOADED]})
    lines = (out / "index.jsonl").read_text(encoding="utf-8").splitlines()
    check("dumps/index.jsonl", *map(json.loads, lines), head=False)


def test_guard(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdpa_repro.guarding.script.run_guarded", lambda *words, **options: documents.guarded())
    check("guard", printed(capfd, "guard", "--", "script.py"), {"preloaded": [documents.PRELOADED]})


def test_known(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(preload: Any, *, timeout: float, report: Any) -> None:
        report(known_here.Outcome("pytorch#191937", "affected", "row 32", "cpu", "FLASH_ATTENTION", True, 0.1))

    monkeypatch.setattr(known_here, "check_here", tried)
    here = printed(capfd, "known", "--here", "--preload", FAULT)
    listed = printed(capfd, "known")
    check("known", here, listed)
    assert {"complete"} == set(here) - set(listed)


def test_diagnose(replayed: Any) -> None:
    found = json.loads(json.dumps(diagnose_document(documents.diagnosed(replayed)), default=str))
    keys = set(TABLES["diagnose"]) | set(TABLES["explain"]) | {"preloaded", "environment"}
    assert set(found) == {key for key in keys if not parent(key)}
    assert [set(stage) for stage in found["stages"]] == [{"name", "seconds", "reused"}]


def test_locate() -> None:
    check("locate", document(documents.located()))


def test_verify() -> None:
    check("verify", document(documents.verified()))


def test_the_head_names_the_preloaded_files(replayed: Any) -> None:
    assert [set(each) for each in document(replayed)["preloaded"]] == [set(asdict_keys(TABLES[HEAD]))]


def asdict_keys(table: Mapping[str, str]) -> list[str]:
    """Keys of an entry of `preloaded`."""
    return [key.rpartition(".")[2] for key in table if key.startswith("preloaded[].")]
