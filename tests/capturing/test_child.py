"""The recorder inside a script's process: its trail of running calls, and how often it reports."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.capturing import child
from sdpa_repro.capturing.child import Process, Trail


def test_a_call_that_still_runs_in_another_thread_stays_on_the_trail(tmp_path: Path) -> None:
    trail, path = Trail(tmp_path / "report.at"), tmp_path / "report.at"

    def named() -> str:
        return path.read_bytes().rstrip(b"\0").decode()

    def other() -> None:
        trail.write("call 1")
        entered.set()
        left.wait(60)

    entered, left = threading.Event(), threading.Event()
    trail.write("call 0")
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    trail.write("")
    assert named() == "call 1"
    trail.write("call 2")
    assert named() == "call 2"
    trail.write("")
    assert named() == "call 1"
    left.set()
    thread.join(60)


class Clock:
    """Time that passes only while a summary is made."""

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.summaries = 100.0, cost, 0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 1

    def summary(self) -> dict[str, Any]:
        self.now += self.cost
        self.summaries += 1
        return {"seen": 1, "passed": {}}

    def close(self) -> None: ...

    def forget(self) -> None: ...


@pytest.mark.parametrize(("cost", "most"), [(0.0, 201), (0.3, 12)])
def test_reports_so_far_take_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: float, most: int
) -> None:
    clock = Clock(cost)
    monkeypatch.setattr(child, "time", clock)
    process = Process({"reports": str(tmp_path)})
    process.session = clock
    for _ in range(10_000):
        process._so_far()
        clock.now += 0.01
    assert 1 < clock.summaries <= most
    (report,) = tmp_path.glob("[!.]*.json")
    assert json.loads(report.read_text())["summary"]["seen"] == 1
