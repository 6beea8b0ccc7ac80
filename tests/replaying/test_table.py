"""How long a cell is waited for: once in full, and not again for a kernel that hung."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.dump import load
from sdpa_repro.replaying import table as module
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.comparable import LATE, Values
from sdpa_repro.replaying.table import Table
from sdpa_repro.replaying.verdict import Status
from sdpa_repro.replaying.worker import Outcome
from tests.calls import make_call
from tests.replaying.dumps import write_dump

TIMEOUT = 120.0


class Scripted:
    """Stands in for a worker: MATH answers after `math_took` seconds, `flash` lists what becomes of FLASH."""

    def __init__(self, math_took: float | None, flash: list[Outcome]) -> None:
        self.math_took, self.flash = math_took, flash
        self.waited: list[float] = []

    def request(self, job: Mapping[str, Any], timeout: float) -> Outcome:
        if job["backend"] == "MATH":
            if self.math_took is None:
                return Outcome("declined", "needs 80 GiB", {"took": 0.1})
            return Outcome("done", answer={"took": self.math_took})
        self.waited.append(timeout)
        return self.flash.pop(0)

    def close(self) -> None:
        """There is no process."""


HANGS = Outcome("timeout", "no result after 120 s")


def run_flash(tmp_path: Path, worker: Scripted, times: int = 1) -> list[Outcome]:
    path = write_dump(make_call(rows=5), tmp_path / "call.pt")
    fake: Any = worker
    table = Table(fake, tmp_path, path, load(path), torch.device("cpu"), list(Backend), 1, TIMEOUT, None)
    table._run(Backend.MATH, "captured", "bfloat16")
    return [table._run(Backend.FLASH_ATTENTION, "captured", "bfloat16") for _ in range(times)]


@pytest.mark.parametrize(("math_took", "again"), [(0.2, 10.0), (1.5, 30.0), (60.0, TIMEOUT), (None, TIMEOUT)])
def test_a_kernel_that_hung_is_not_waited_for_in_full_again(
    tmp_path: Path, math_took: float | None, again: float
) -> None:
    worker = Scripted(math_took, [HANGS] * 3)
    first, second = run_flash(tmp_path, worker, times=2)
    assert worker.waited == pytest.approx([TIMEOUT, again, again])
    assert (first.kind, second.kind) == ("timeout", "timeout")


def test_a_crash_is_confirmed_with_all_the_time_there_is(tmp_path: Path) -> None:
    worker = Scripted(0.2, [Outcome("crashed", "SIGSEGV")] * 2)
    run_flash(tmp_path, worker)
    assert worker.waited == [TIMEOUT, TIMEOUT]


def test_a_kernel_that_is_declined_after_a_crash_is_not_said_to_have_run(tmp_path: Path) -> None:
    worker = Scripted(0.2, [Outcome("crashed", "SIGSEGV"), Outcome("declined", "needs 80 GiB")])
    (outcome,) = run_flash(tmp_path, worker)
    assert (outcome.kind, outcome.reason) == ("unstable", "crashed once (SIGSEGV), then not run again (needs 80 GiB)")


class Answering:
    """Stands in for a worker whose backends all return zeros, or on which Ctrl-C is pressed."""

    def __init__(self, interrupted: bool = False) -> None:
        self.interrupted = interrupted

    def request(self, job: Mapping[str, Any], timeout: float) -> Outcome:
        if self.interrupted:
            raise KeyboardInterrupt
        torch.save({"first": torch.zeros(1, 4, 5, 8, dtype=torch.bfloat16)}, job["output"])
        return Outcome("done", answer={"runs": 1})


def table_of(tmp_path: Path, worker: Answering, deadline: float) -> Table:
    path = write_dump(make_call(rows=5, width=8), tmp_path / "call.pt")
    fake: Any = worker
    return Table(fake, tmp_path, path, load(path), torch.device("cpu"), list(Backend), 1, TIMEOUT, None, deadline)


def test_without_time_for_the_reference_nothing_is_judged(tmp_path: Path) -> None:
    table = table_of(tmp_path, Answering(), time.monotonic() - 1.0)
    table.add("captured")
    ran = [cell for cell in table.captured if cell.status is not Status.DECLINED]
    assert [cell.backend for cell in ran] == ["default", "eager", "MATH", "FLASH_ATTENTION"]
    assert {(cell.status, cell.reason) for cell in ran} == {(Status.NOT_COMPARABLE, LATE)}


def test_with_time_for_the_reference_the_cells_are_judged(tmp_path: Path) -> None:
    table = table_of(tmp_path, Answering(), time.monotonic() + 3600.0)
    table.add("captured")
    assert LATE not in {cell.reason for cell in table.captured}


def test_ctrl_c_ends_the_reference_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def endless(dump: object, dtype: str, device: object, captured: object, late: Callable[[], bool]) -> Values:
        give_up = time.monotonic() + 60.0
        while not late() and time.monotonic() < give_up:
            time.sleep(0.01)
        ended.append(late())
        raise TimeoutError

    monkeypatch.setattr(module, "values_of", endless)
    with pytest.raises(KeyboardInterrupt):
        table_of(tmp_path, Answering(interrupted=True), float("inf")).add("captured")
    assert ended == [True]
