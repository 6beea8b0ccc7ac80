"""A script under the guard: it notices nothing, and its threads and child processes are guarded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sdpa_repro.errors import InputError
from sdpa_repro.guarding.script import GuardedRun, run_guarded
from tests.guarding.calls import rule_file
from tests.guarding.conftest import FAULT

HEAD = """
import os, subprocess, sys, threading
import torch
from torch.nn import functional
torch.set_num_threads(1)
random = torch.Generator().manual_seed(0)
query = torch.randn(1, 4, 33, 136, generator=random)
key = torch.randn(1, 1, 33, 136, generator=random).expand(1, 4, 33, 136)
mask = torch.ones(33, 33, dtype=torch.bool).tril()[None, None]
mask[..., :3] = False
expected = (query @ key.mT * 136**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)[:, :, 3:] @ key
def attend():
    with torch.no_grad():
        output = functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    print("right" if (output[:, :, 3:] - expected).abs().max() < 1e-4 else "wrong", flush=True)
"""


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(HEAD + body)
    return str(path)


@pytest.mark.slow
def test_threads_and_child_processes_are_guarded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
attend()
thread = threading.Thread(target=attend); thread.start(); thread.join()
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
    if os.fork() == 0:
        attend()
        sys.exit(0)
    os.wait()
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    sys.exit(9)
"""
    run = run_guarded([script(tmp_path, body)], preload=[FAULT])
    out, err = capfd.readouterr()
    assert out.split() == ["right"] * 5
    assert run.status == 9
    document = run.document()
    assert document["changed"] == {"pytorch#191937": 5}
    assert (document["calls"], document["processes"], document["needed"]) == (5, 3, True)
    assert document["not_guarded"] == [f"a child process {Path(sys.executable).name} -I"]
    assert document["preloaded"][0]["name"] == FAULT.name
    assert "GuardWarning" in err
    assert run.sentence == (
        "5 attention calls in 3 processes, changed 5 for pytorch#191937 (fixed in 2.14.0; contiguous key and value)"
    )


@pytest.mark.slow
def test_a_rule_is_found_from_wherever_the_script_goes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rule_file(tmp_path).parent)
    body = "os.chdir('/')\nattend()"
    late = "import os; os.chdir('/')\n"
    Path("script.py").write_text(late + HEAD + body)
    run = run_guarded(["script.py"], rule="result.json", preload=[FAULT])
    assert capfd.readouterr().out.split() == ["right"]
    assert run.document()["changed"] == {"result.json": 1}


def test_a_script_without_torch_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("import sys; sys.exit(3)")
    run = run_guarded([str(path)])
    assert run.status == 3
    assert run.sentence.startswith("the guard was in no process")


def test_what_cannot_be_run_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("open('ran', 'w')")
    for words, options in (
        ([], {}),
        (["missing.py"], {}),
        ([str(path)], {"rule": tmp_path / "missing.json"}),
        ([str(path)], {"preload": [tmp_path / "missing.py"]}),
    ):
        with pytest.raises(InputError):
            run_guarded(words, **options)  # type: ignore[arg-type]
    assert not Path("ran").exists()


def summary(**changes: object) -> dict[str, object]:
    issue = {"issue": "pytorch#1", "fixed_in": None, "cure": "MATH for this call"}
    found = {"needed": True, "why": "", "calls": 1, "changed": {}, "passed": {}, "issues": [issue], "torch": "2.13.0"}
    return {"state": "ended", "summary": {**found, **changes}}


def test_the_sentence_says_what_was_changed_or_why_nothing_was() -> None:
    assert GuardedRun(0, (summary(),)).sentence == "1 attention call in 1 process, none of which had to be changed"
    changed = GuardedRun(0, (summary(changed={"pytorch#1": 1}), summary(changed={"pytorch#1": 2}), {"state": "failed"}))
    assert changed.sentence == (
        "2 attention calls in 2 processes, changed 3 for pytorch#1 (no release with a fix known; MATH for this call)"
    )
    unneeded = GuardedRun(0, (summary(needed=False, why="torch 2.14.0 has none"),))
    assert unneeded.sentence == "the guard is not needed and did nothing: torch 2.14.0 has none"
    failed = GuardedRun(0, ({"state": "failed", "error": "ImportError: no"},))
    assert failed.not_guarded == ["ImportError: no"]
