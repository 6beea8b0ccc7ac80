"""A replay that has to end in time: what matters least is cut down or left out, and says so.

The default path comes first, since it is what users run. MATH and eager, whose memory and time grow with L·S in full,
are run on the rows that need their noise alone, and the kernel that the default path took is not run twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import load
from sdpa_repro.explaining.pacing import Budget, work_of
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.comparable import LATE
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.table import NOISE, choose_device
from sdpa_repro.replaying.worker import Outcome, Worker

FULL_SHARE = 0.1
"""Share of the budget within which MATH and eager are expected to end in full; else they are left for later."""

QUICK = 1.0
"""Seconds that they may take in full whatever the budget is."""

RATE = {"cpu": 5e9}
"""Multiply-adds a second of MATH by device type, to tell what it would take; other devices take `FAST`."""

FAST = 1e12

LEAST = 5.0
"""Seconds that a cell gets at least: a call that is over sooner is judged whatever the budget is."""

RESERVE_SHARE, RESERVE = 0.4, 10.0
"""What a long call leaves of the budget, as a share and in seconds at most: for a shorter one in its place."""

HANGS = 30.0
"""Seconds, fewer in a short budget, or 20 times what MATH is expected to take, after which a kernel hangs."""

LATER = "left out for want of time"
REFERENCE = "reference"
"""What is named among the cells that were left out when the float64 reference did not come to its end."""

NO_ANSWER = "no answer: the call did not come to an end in this time; give a larger budget"
"""Of a call that the default path, or the reference, did not get through."""


def replay_within(
    path: str | Path,
    budget: Budget,
    *,
    device: str | None = None,
    backend: str | None = None,
    preload: Sequence[str | Path] = (),
    timeout: float = 120.0,
    progress: Callable[[str], None] | None = None,
) -> tuple[Replay, tuple[str, ...]]:
    """A replay of the captured dtype, and the names of the cells that the budget left no room for.

    backend: the one that was asked for, which is always run. Where `unjudged` is True of what was left out, nothing
    is known about the call, and a part of the budget is still there. Raises InputError as `replay` does.
    """
    words: dict[str, Any] = {"device": device, "dtypes": ("captured",), "runs": 1, "timeout": timeout}
    if budget.seconds is None:
        return replay(path, **words, preload=preload, progress=progress), ()
    dump = load(path)
    worker = Hurried(dump.call, budget, backend, preload, choose_device(dump, device).type)
    del dump
    with worker:
        found = replay(path, **words, worker=worker, progress=progress, deadline=worker.deadline)
    if any(cell.reason == LATE for cell in found.cells):
        worker.left_out.append(REFERENCE)
    return found, tuple(worker.left_out)


def unjudged(left_out: Sequence[str]) -> bool:
    """Whether what was left out of a replay leaves it open whether the call fails."""
    return Backend.DEFAULT.value in left_out or REFERENCE in left_out


class Hurried(Worker):
    """A worker that knows the time: cells for which there is none are declined with that as the reason.

    left_out: the backends that were not run, or not to their end.
    """

    def __init__(
        self,
        call: AttentionCall,
        budget: Budget,
        asked: str | None,
        preload: Sequence[str | Path],
        device_type: str,
    ) -> None:
        self.left_out: list[str] = []
        self._budget, self._asked = budget, asked
        expected = work_of(call) / RATE.get(device_type, FAST)
        self._in_full = len(NOISE) * expected <= max(QUICK, FULL_SHARE * (budget.seconds or math.inf))
        seconds = budget.seconds or math.inf
        for_it = max(HANGS, seconds) if self._in_full else max(LEAST, seconds - min(RESERVE, RESERVE_SHARE * seconds))
        self.deadline = budget.start + for_it
        """When the reference, and the first cells of a long call, have to be over."""
        self._hangs = max(min(HANGS, seconds / 6), LEAST, 20 * expected)
        self._took: str | None = None
        self._failed: set[Backend] = set()
        super().__init__(preload)

    def request(self, job: Mapping[str, Any], timeout: float) -> Outcome:
        """As in `Worker`, for cells within the time that is left."""
        if job.get("do") != "cell":
            return super().request(job, timeout)
        backend = Backend(job["backend"])
        rows = job.get("rows")
        if backend in NOISE and backend.value != self._asked and not self._in_full:
            self._leave_out(backend)
            if not rows:
                return Outcome("declined", LATER, {"blocks": True})
            job = {**job, "blocks": LATER}
        limit = min(timeout, self._hangs)
        if self._is_known(backend):
            return Outcome("declined", f"{LATER}: the default path took it")
        if self._room(backend, limit) <= 0:
            self._leave_out(backend)
            return Outcome("declined", LATER)
        self.wait()  # the seconds in which a process starts are the budget's too
        room = max(QUICK, self._room(backend, limit))
        outcome = super().request(job, room)
        if backend is Backend.DEFAULT:
            self._took = outcome.answer.get("chosen")
        if outcome.kind == "timeout" and room < limit:
            self._leave_out(backend)
            return Outcome("declined", f"stopped after {room:.0f} s, when the time was up", outcome.answer)
        if outcome.kind in ("crashed", "timeout", "error"):  # it is confirmed next, which takes a proper run
            self._failed.add(backend)
        return outcome

    def _leave_out(self, backend: Backend) -> None:
        if backend.value not in self.left_out:
            self.left_out.append(backend.value)

    def _is_known(self, backend: Backend) -> bool:
        return not self._in_full and backend.value == self._took and backend.value != self._asked

    def _room(self, backend: Backend, limit: float) -> float:
        """Seconds that a cell may take, `limit` at most: those until the deadline, and some in any case for the first.

        Quick cells, and noise, without which nothing is judged, get a little more than the budget.
        """
        if backend in self._failed:  # the second time decides, and is given as long as the first
            return limit
        if self._in_full or backend in NOISE:
            return min(limit, max(LEAST, self._budget.left + 2 * self._budget.slack))
        left = self.deadline - time.monotonic()
        first = backend is Backend.DEFAULT or backend.value == self._asked
        return min(limit, max(LEAST, left) if first else left)
