"""Under a budget the cells that matter least are put off or left out, and none of them is taken for an outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.hurried import LATER, Hurried, replay_within, unjudged
from sdpa_repro.explaining.pacing import Budget
from sdpa_repro.replaying.verdict import Status
from sdpa_repro.replaying.worker import Outcome, Worker
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump

SHORT = make_call(rows=33, width=16)
LONG = make_call(rows=4097, keys=40000, width=16, layout="expanded", mask=None)
TOOK = Outcome("done", "", {"chosen": "FLASH_ATTENTION"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mapping[str, Any], float]]:
    """The jobs that get through to a worker, each with its time; no process is started, and all of them end well."""
    jobs: list[tuple[Mapping[str, Any], float]] = []

    def request(self: Worker, job: Mapping[str, Any], timeout: float) -> Outcome:
        jobs.append((job, timeout))
        return TOOK

    monkeypatch.setattr(Worker, "start", lambda self: None)
    monkeypatch.setattr(Worker, "wait", lambda self: None)
    monkeypatch.setattr(Worker, "request", request)
    return jobs


def hurried(call: AttentionCall, seconds: float = 20.0, spent: float = 0.0, backend: str | None = None) -> Hurried:
    return Hurried(call, Budget(seconds, time.monotonic() - spent), backend, (), "cpu")


def cell(backend: str, rows: object = ()) -> dict[str, Any]:
    return {"do": "cell", "backend": backend, "dtype": "captured", "rows": list(rows)}  # type: ignore[call-overload]


def names(asked: list[tuple[Mapping[str, Any], float]]) -> list[str]:
    return [job["backend"] for job, _ in asked]


def test_every_cell_of_a_short_call_is_run(asked: list[tuple[Mapping[str, Any], float]]) -> None:
    worker = hurried(SHORT)
    for name in ("MATH", "eager", "default", "FLASH_ATTENTION"):
        worker.request(cell(name), 120.0)
    assert names(asked) == ["MATH", "eager", "default", "FLASH_ATTENTION"]
    assert worker.left_out == []


def test_an_ample_budget_leaves_nothing_out_of_a_long_call(asked: list[tuple[Mapping[str, Any], float]]) -> None:
    worker = hurried(LONG, seconds=3600)
    for name in ("MATH", "eager", "default", "FLASH_ATTENTION"):
        worker.request(cell(name), 120.0)
    assert len(asked) == 4
    assert worker.left_out == []


def test_the_noise_of_a_long_call_is_put_off_and_then_measured_on_the_rows_that_need_it(
    asked: list[tuple[Mapping[str, Any], float]],
) -> None:
    worker = hurried(LONG)
    put_off = worker.request(cell("MATH"), 120.0)
    assert (put_off.kind, put_off.reason, put_off.answer) == ("declined", LATER, {"blocks": True})
    assert asked == []
    worker.request(cell("MATH", [(4096, 4097)]), 120.0)
    assert asked[0][0]["blocks"] == LATER
    assert worker.left_out == ["MATH"]


def test_the_kernel_that_the_default_path_took_is_not_run_twice(
    asked: list[tuple[Mapping[str, Any], float]],
) -> None:
    worker = hurried(LONG)
    worker.request(cell("default"), 120.0)
    assert worker.request(cell("FLASH_ATTENTION"), 120.0).kind == "declined"
    assert names(asked) == ["default"]
    assert worker.left_out == []


@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "MATH"])
def test_the_backend_that_was_asked_for_is_run(asked: list[tuple[Mapping[str, Any], float]], name: str) -> None:
    worker = hurried(LONG, backend=name)
    worker.request(cell("default"), 120.0)
    worker.request(cell(name), 120.0)
    assert names(asked) == ["default", name]


def test_what_comes_too_late_is_left_out_but_never_the_default_path(
    asked: list[tuple[Mapping[str, Any], float]],
) -> None:
    worker = hurried(LONG, spent=30.0)
    worker.request(cell("default"), 120.0)
    assert worker.request(cell("CUDNN_ATTENTION"), 120.0) == Outcome("declined", LATER)
    assert names(asked) == ["default"]
    assert worker.left_out == ["CUDNN_ATTENTION"]


def test_a_cell_that_is_cut_short_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "start", lambda self: None)
    monkeypatch.setattr(Worker, "wait", lambda self: None)
    monkeypatch.setattr(Worker, "request", lambda self, job, timeout: Outcome("timeout", "no result"))
    worker = hurried(LONG, seconds=8.0)
    assert worker.request(cell("default"), 120.0).kind == "declined"
    assert worker.left_out == ["default"]


def test_a_short_call_that_does_not_return_hangs_and_is_given_the_same_time_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: list[float] = []

    def request(self: Worker, job: Mapping[str, Any], timeout: float) -> Outcome:
        times.append(timeout)
        return Outcome("timeout", "no result")

    monkeypatch.setattr(Worker, "start", lambda self: None)
    monkeypatch.setattr(Worker, "wait", lambda self: None)
    monkeypatch.setattr(Worker, "request", request)
    worker = hurried(SHORT, seconds=60.0)
    assert worker.request(cell("default"), 120.0).kind == "timeout"
    worker._budget = Budget(60.0, time.monotonic() - 100.0)
    assert worker.request(cell("default"), 120.0).kind == "timeout"
    assert times[0] == times[1] < 60.0
    assert worker.left_out == []


def test_a_part_of_the_time_is_kept_for_a_shorter_call(asked: list[tuple[Mapping[str, Any], float]]) -> None:
    for seconds, first in ((20.0, 12.0), (60.0, 50.0), (1.0, 5.0)):
        worker = hurried(LONG, seconds=seconds)
        assert worker.deadline - worker._budget.start == pytest.approx(first)
        worker.request(cell("default"), 120.0)
        assert asked[-1][1] <= first


def test_a_process_that_starts_takes_its_seconds_from_the_budget(
    asked: list[tuple[Mapping[str, Any], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = hurried(LONG, seconds=60.0)

    def starts(self: Worker) -> None:
        worker.deadline -= 20.0

    monkeypatch.setattr(Worker, "wait", starts)
    worker.request(cell("default"), 120.0)
    assert asked[0][1] <= 30.0


def test_a_short_call_is_judged_whatever_the_budget_is(asked: list[tuple[Mapping[str, Any], float]]) -> None:
    worker = hurried(SHORT, seconds=0.001)
    assert worker.deadline - worker._budget.start == pytest.approx(30.0)


def test_a_call_is_judged_when_the_default_path_and_the_reference_have_ended() -> None:
    assert not unjudged(("MATH", "eager", "CUDNN_ATTENTION"))
    assert unjudged(("MATH", "eager", "default"))
    assert unjudged(("MATH", "eager", "reference"))


@pytest.mark.slow
def test_a_reference_without_time_is_named_among_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sdpa_repro.explaining.hurried as module

    monkeypatch.setattr(module, "HANGS", -3600.0)
    monkeypatch.setattr(module, "LEAST", 60.0)
    path = write_dump(make_call(rows=65, width=16), tmp_path / "call.pt")
    found, left_out = replay_within(path, Budget(1e-3, time.monotonic() - 1.0), preload=fault("pytorch_191937"))
    assert left_out == ("reference",)
    assert found.guilty == ()
    assert {cell.status for cell in found.cells} <= {Status.NOT_COMPARABLE, Status.DECLINED}


@pytest.mark.slow
def test_a_hurried_replay_names_the_same_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sdpa_repro.explaining.hurried as module

    monkeypatch.setattr(module, "RATE", {"cpu": 1.0})
    path = write_dump(make_call(rows=65, width=16), tmp_path / "call.pt")
    found, left_out = replay_within(path, Budget(60.0), preload=fault("pytorch_191937"))
    assert found.guilty == ("FLASH_ATTENTION",)
    assert found.known[0].issue == "pytorch#191937"
    assert left_out == ("MATH", "eager")
    cells = {cell.backend: cell for cell in found.cells}
    assert (cells["MATH"].status, cells["MATH"].reason) == (Status.DECLINED, LATER)
    assert cells["default"].bad is not None
    assert cells["default"].bad.rows == (64,)
