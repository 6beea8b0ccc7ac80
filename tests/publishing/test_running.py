"""Scripts run as a stranger runs them: fail while the fault is there, pass without it, see nothing of this package."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdpa_repro.errors import InputError
from sdpa_repro.publishing.facts import tried_script
from sdpa_repro.publishing.limit import rounding_limit
from sdpa_repro.publishing.running import ScriptRun, check_imports, run_script
from sdpa_repro.publishing.script import script
from sdpa_repro.publishing.story import Story
from sdpa_repro.publishing.unit_test import unit_test
from sdpa_repro.publishing.versions import results_in
from tests.publishing.calls import FAULTS, closed, tail

FLASH = Story("FLASH_ATTENTION")


def test_the_package_and_the_environment_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mine.py").write_text("")
    text = (
        "import importlib, os, sys\n"
        "for name in ('sdpa_repro', 'sdpa_repro.attention', 'mine'):\n"
        "    try:\n        importlib.import_module(name)\n        print(name, 'found')\n"
        "    except ModuleNotFoundError:\n        print(name, 'absent')\n"
        "print(sorted(os.listdir()), __name__, os.path.basename(__file__), sys.flags.isolated)\n"
    )
    run = run_script(text)
    assert run.passes
    assert run.output.splitlines() == [
        "sdpa_repro absent",
        "sdpa_repro.attention absent",
        "mine absent",
        "['output.txt', 'repro.py'] __main__ repro.py 1",
    ]


def test_an_assertion_is_told_from_other_endings() -> None:
    failed = run_script("print('before')\nassert not ['x'], 'wrong result from x'\n")
    assert failed.fails
    assert failed.shown == "before\nAssertionError: wrong result from x"
    assert 'File "repro.py", line 2' in failed.output
    assert "alone.py" not in failed.output
    for text, status in (("raise ValueError('no')", 1), ("import sys; sys.exit(3)", 3), ("import os; os.abort()", -6)):
        run = run_script(text)
        assert (run.status, run.fails, run.passes) == (status, False, False)


def wait_for_end(pid: int) -> bool:
    """Whether a process that was killed is gone, or waits for its parent, within a few seconds."""
    for _ in range(400):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_with_its_children() -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    started = time.monotonic()
    run = run_script(text, timeout=8)
    assert time.monotonic() - started < 50
    assert run.status is None
    assert run.ending() == "stopped after 8 s"
    assert wait_for_end(int(run.output))


def test_imports_beyond_torch_are_refused() -> None:
    check_imports("import torch.nn.functional as F, sys\nfrom contextlib import nullcontext\n")
    for text in ("import numpy", "from transformers import x", "def f():\n    import sdpa_repro", "from . import x"):
        with pytest.raises(InputError, match="imports"):
            check_imports(text)
    with pytest.raises(InputError, match="is no Python"):
        check_imports("x = = 1")


def test_a_missing_preload_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--preload"):
        run_script("", preload=[tmp_path / "none.py"])


@pytest.mark.slow
def test_a_script_fails_under_its_fault_and_passes_without_it() -> None:
    text = script(*tail(), FLASH)
    failed = run_script(text, preload=[FAULTS / "pytorch_191937.py"])
    assert failed.fails, failed.output
    assert failed.last_line == "AssertionError: wrong result from FLASH_ATTENTION, default"
    assert failed.preloaded == ("pytorch_191937.py",)
    assert failed.where.endswith("after pytorch_191937.py")
    assert results_in(failed.output)["FLASH_ATTENTION"] == "wrong"
    passed = run_script(text)
    assert passed.passes, passed.output
    assert results_in(passed.output) == {
        "MATH": "ok",
        "FLASH_ATTENTION": "ok",
        "EFFICIENT_ATTENTION": "declined",
        "CUDNN_ATTENTION": "declined",
        "default": "ok",
    }


@pytest.mark.slow
def test_nan_counts_as_wrong() -> None:
    run = run_script(script(*closed(rows=4), FLASH), preload=[FAULTS / "nan_live.py"])
    assert run.fails
    assert "nan  wrong in query rows 3\n" in run.output


@pytest.mark.slow
def test_a_crash_is_seen_from_outside_and_the_others_still_run() -> None:
    text = script(*closed(rows=3), Story("FLASH_ATTENTION", "crashed"))
    run = run_script(text, preload=[FAULTS / "segfault.py"])
    assert run.fails, run.output
    assert results_in(run.output) == {
        "MATH": "ok",
        "EFFICIENT_ATTENTION": "declined",
        "CUDNN_ATTENTION": "declined",
        "default": "crashed",
        "FLASH_ATTENTION": "crashed",
    }
    assert run_script(text).passes


@pytest.mark.slow
def test_a_hang_is_given_up_on() -> None:
    text = script(*closed(rows=3), Story("FLASH_ATTENTION", "timeout", timeout=12))
    only = text.replace("for name in (", 'for name in ("FLASH_ATTENTION",) or (')
    run = run_script(only, preload=[FAULTS / "hang.py"])
    assert run.fails, run.output
    assert results_in(run.output) == {"FLASH_ATTENTION": "no answer"}


@pytest.mark.slow
def test_a_limit_that_hides_the_failure_is_replaced_and_the_script_run_again() -> None:
    call, recipes = tail()
    loose = replace(FLASH, limit=20.0, limit_reason="too much")
    found = tried_script(call, recipes, loose, preload=[FAULTS / "pytorch_191937.py"])
    assert found.story.limit == rounding_limit(call)[0]
    assert found.run.fails
    assert "limit = 0.25" in found.text


@pytest.mark.slow
def test_the_unit_test_fails_under_the_fault_and_passes_without_it(tmp_path: Path) -> None:
    text = unit_test(*tail(), FLASH)
    run = run_script(text, preload=[FAULTS / "pytorch_191937.py"])
    assert run.status == 1
    assert "(backend='FLASH_ATTENTION')" in run.output
    assert "(backend='MATH')" not in run.output
    assert "FAILED (failures=2)" in run.output
    path = tmp_path / "test_repro.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_crash_makes_no_unit_test() -> None:
    with pytest.raises(InputError, match=r"use repro\.py"):
        unit_test(*closed(), Story("MATH", "crashed"))


def test_a_unit_test_of_a_call_with_masked_rows_compares_the_live_ones() -> None:
    text = unit_test(*closed(padding=2), FLASH)
    assert "out.double()[live], expected[live]" in text
    compile(text, "test_repro.py", "exec")


def test_words_about_a_run() -> None:
    assert ScriptRun(0, "", 1.0, "").ending() == "exit status 0"
    assert ScriptRun(1, "AssertionError: x\n", 1.0, "").ending() == "exit status 1, AssertionError"
    assert ScriptRun(-11, "", 1.0, "").ending() == "signal 11"
    assert ScriptRun(1, "ValueError: x", 1.0, "").ending() == "exit status 1, ValueError: x"
    assert torch.__version__ in run_script("").where
