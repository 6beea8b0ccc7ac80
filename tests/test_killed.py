"""Killed with -9 at any moment: no broken dump is ever listed, and the next start cleans up or goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.capturing import folder as dumps

KILLED, CUT_OFF = -9, -25
"""Statuses of a process killed before a change of the disk, and in the middle of a write (SIGXFSZ)."""


def scenario(name: str, folder: Path) -> list[dict[str, Any]]:
    """The lines that `tests.killing` prints about a scenario."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.killing", name, str(folder / name)],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_killed_capture_never_lists_a_broken_dump_and_the_next_one_adds_to_the_folder(tmp_path: Path) -> None:
    told = scenario("capture", tmp_path)
    killed = [line for line in told if "kill" in line]
    assert len(killed) >= 12
    assert {line["status"] for line in killed[:-1]} == {KILLED}
    listed = [len(line["listed"]) for line in killed]
    assert listed == sorted(listed)
    assert listed[-1] > listed[0]
    assert all(line["status"] == CUT_OFF for line in told if "size" in line)
    assert (told[-1]["status"], told[-1]["more"]) == (0, 3)


@pytest.mark.slow
def test_a_killed_reduction_leaves_no_half_written_dump(tmp_path: Path) -> None:
    told = scenario("reduce", tmp_path)
    assert [line["status"] for line in told] == [*[KILLED] * 4, *[CUT_OFF] * 3, 0]
    assert not any(line["there"] for line in told[:-1])
    assert told[-1]["read"]


@pytest.mark.slow
def test_a_killed_diagnosis_goes_on_where_it_was_and_a_full_disk_is_one_line(tmp_path: Path) -> None:
    lines = scenario("diagnose", tmp_path)
    told = [line for line in lines if "stderr" not in line]
    killed = [line for line in told if "kill" in line]
    assert len(killed) >= 12
    assert {line["status"] for line in killed[:-1]} == {KILLED}
    for line in told:
        assert line["again"] == 1
        assert line["stages"] == ["replay", "explain", "reduce", "issue", "report"]
        assert line["temporary"] == []
        assert line["read"]
        assert line["files"] == [
            "call.pt",
            "diagnose.log",
            "issue.md",
            "report.html",
            "repro.py",
            "result.json",
            "x.pt",
        ]
    for line in killed:
        assert line["reused"] == line["ended"]
        for name in line["ended"]:
            assert f"{name}: " in line["again_said"]
    assert any(len(line["ended"]) not in (0, 5) for line in killed)
    said = [line["stderr"] for line in lines if "stderr" in line]
    assert [line["status"] for line in told if "full" in line.get("limit", {})] == [2, 2, 2]
    assert len(said) == 3
    for text in said:
        assert text.splitlines()[-1].startswith("error: cannot write ")


def test_the_next_capture_removes_old_half_written_files_and_leaves_recent_ones(tmp_path: Path) -> None:
    old, recent, index = (tmp_path / f".{name}" for name in ("sdpa-repro-a.tmp", "sdpa-repro-b.tmp", "index.jsonl.7"))
    for path in (old, recent, index):
        path.write_bytes(b"half")
    for path in (old, index):
        os.utime(path, (0, 0))
    dumps.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [recent.name]
