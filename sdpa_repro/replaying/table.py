"""Runs the cells of the replay table: every backend in one dtype after the other, in a worker process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sdpa_repro.dump import Dump
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.backends import Backend, missing_reason
from sdpa_repro.replaying.cells import Cell, judged, load_outputs
from sdpa_repro.replaying.comparable import Values, values_of
from sdpa_repro.replaying.conclusion import Live
from sdpa_repro.replaying.verdict import RowErrors, Status, row_errors, thresholds
from sdpa_repro.replaying.worker import Outcome, Worker
from sdpa_repro.switches import dtype_name
from sdpa_repro.visibility import true_ranges

NOISE = (Backend.MATH, Backend.EAGER)
"""The paths whose errors are other paths' noise. They run first: a kernel that damages its process runs last."""

ORDER = (*NOISE, *(backend for backend in Backend if backend not in NOISE))

HUNG_SECONDS, HUNG_FACTOR = 10.0, 20.0
"""A kernel that hung on this call gets this long when it is run again, or 20 times what MATH's cell took."""


def choose_device(dump: Dump, requested: str | None) -> torch.device:
    """Where to replay: as requested; else where a call that was wrong was captured; else a GPU if there is one.

    Raises InputError for a device that is not there.
    """
    recorded = str(dump.context.get("device") or "cpu").partition(":")[0]
    wrong = Live.of(dump.live, dump.context, dump.origin).wrong
    name = requested or (recorded if wrong and _exists(recorded) else "cuda" if _exists("cuda") else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: give cpu, cuda, cuda:1, …") from None
    if not _exists(place.type):
        raise InputError(f"this torch ({torch.__version__}) sees no {place.type} device: leave --device out or use cpu")
    return place


def _exists(kind: str) -> bool:
    """Whether a tensor can be made, and read, on this type of device ("meta" holds no values)."""
    try:
        torch.zeros(1, device=kind).item()
    except Exception:
        return False
    return True


class Table:
    """The cells so far, and what is needed to run the next ones."""

    def __init__(
        self,
        worker: Worker,
        folder: Path,
        path: Path,
        dump: Dump,
        device: torch.device,
        shown: Sequence[Backend],
        runs: int,
        timeout: float,
        progress: Callable[[str], None] | None,
        deadline: float = math.inf,
    ) -> None:
        self.worker, self.folder, self.path, self.dump, self.device = worker, folder, path, dump, device
        self.shown, self.runs, self.timeout = shown, runs, timeout
        self.deadline = deadline
        """When a reference that has not come to its end is given up, for `time.monotonic`."""
        self.say = progress or (lambda text: None)
        self.captured: list[Cell] = []
        self.cells: list[Cell] = []
        self.first: Values | None = None
        self.default = Outcome("declined")
        self.failures: set[tuple[str, str]] = set()
        self.math_took: float | None = None
        """Seconds of the last cell of MATH, reading the dump included; None when it did not fit in memory."""

    def add(self, dtype: str) -> None:
        """Run and judge every backend in one dtype."""
        label = dtype_name(self.dump.call.query.dtype) if dtype == "captured" else dtype
        self.say(f"{label}: reference")
        wanted = [backend for backend in ORDER if backend in self.shown or backend in NOISE]
        if dtype == "captured":
            values, outcomes = self._beside_reference(dtype, label, wanted)
            self.first = values
        else:
            values = values_of(self.dump, dtype, self.device, self.first, self._late)
            if values.not_comparable:
                reason = values.not_comparable
                self.cells += [Cell(backend.value, label, Status.NOT_COMPARABLE, reason) for backend in self.shown]
                return
            outcomes = {backend: self._run(backend, dtype, label) for backend in wanted}
        errors = {backend: self._errors(backend, dtype, outcomes[backend], values) for backend in wanted}
        for backend in NOISE:
            if outcomes[backend].answer.get("blocks"):
                rows = self._beyond_floor(outcomes, errors, values)
                outcomes[backend] = self._run(backend, dtype, label, rows) if rows else outcomes[backend]
                errors[backend] = self._errors(backend, dtype, outcomes[backend], values)
        noise = {backend.value: found for backend in NOISE if (found := errors[backend]) is not None}
        cells = []
        for backend in (backend for backend in Backend if backend in wanted):
            cell = Cell(backend.value, label, Status.NOT_COMPARABLE)
            path = self.saved(backend, dtype)
            cells.append(judged(cell, outcomes[backend], path, errors[backend], values, noise))
        if dtype == "captured":
            self.captured = cells
            self.default = outcomes.get(Backend.DEFAULT, self.default)
        self.cells += [cell for cell in cells if Backend(cell.backend) in self.shown]

    def _beside_reference(
        self, dtype: str, label: str, wanted: Sequence[Backend]
    ) -> tuple[Values, dict[Backend, Outcome]]:
        """The reference and the cells at the same time: the worker's kernels leave this process idle.

        On Ctrl-C the reference is given up, since the thread that computes it would be waited for.
        """
        stopped = threading.Event()

        def late() -> bool:
            return stopped.is_set() or self._late()

        with ThreadPoolExecutor(1) as beside:
            pending = beside.submit(values_of, self.dump, dtype, self.device, None, late)
            try:
                outcomes = {backend: self._run(backend, dtype, label) for backend in wanted}
                return pending.result(), outcomes
            except BaseException:
                stopped.set()
                raise

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def saved(self, backend: Backend, dtype: str) -> Path:
        """Where the worker saves a cell's outputs."""
        return self.folder / f"{dtype}-{backend.value}.pt"

    def _errors(self, backend: Backend, dtype: str, outcome: Outcome, values: Values) -> RowErrors | None:
        """Row errors of an output, if there is one and it can be compared."""
        if values.reference is None or not (outcome.kind == "done" or outcome.answer.get("noise_only")):
            return None
        output = load_outputs(self.saved(backend, dtype))["first"]
        return row_errors(output, values.reference) if output.numel() == values.reference.output.numel() else None

    def _beyond_floor(
        self, outcomes: Mapping[Backend, Outcome], errors: Mapping[Backend, RowErrors | None], values: Values
    ) -> list[tuple[int, int]]:
        """Query rows, as [first, last) pairs, in which a path's error needs the noise of others to be judged."""
        if values.reference is None:
            return []
        needed = torch.zeros(values.reference.live.shape[-1], dtype=torch.bool)
        for backend, found in errors.items():
            if found is None or outcomes[backend].kind != "done":
                continue
            limit, rms = thresholds(values.reference, values.call.query.dtype, backend.value, {})
            beyond = ~found.finite | (found.max_abs > limit) | (found.rms > rms)
            needed |= (beyond & values.reference.decides).flatten(0, -2).any(0).cpu()
        return [(first, last + 1) for first, last in true_ranges(needed)]

    def _run(self, backend: Backend, dtype: str, label: str, rows: Sequence[tuple[int, int]] = ()) -> Outcome:
        """One cell in the worker; a failure is confirmed once in a fresh process.

        rows: those on which a path that does not fit in memory is run for its noise.
        """
        missing = missing_reason(backend, self.device.type)
        if missing:
            return Outcome("declined", missing)
        self.say(f"{label}: {backend.value}")
        job = {
            "do": "cell",
            "dump": str(self.path.resolve()),
            "device": str(self.device),
            "dtype": dtype,
            "backend": backend.value,
            "runs": self.runs,
            "output": str(self.saved(backend, dtype)),
            "rows": list(rows),
        }
        limit = self._patience() if self._hung(backend) else self.timeout
        outcome = self.worker.request(job, limit)
        if backend is Backend.MATH:
            self.math_took = outcome.answer.get("took") if outcome.kind == "done" else None
        if outcome.kind not in ("crashed", "timeout", "error"):
            return outcome
        failure = (str(outcome.answer.get("chosen") or backend.value), outcome.kind)
        if failure in self.failures or (outcome.kind == "error" and self._saw("error")):
            return outcome
        self.say(f"{label}: {backend.value}: {outcome.reason}; once more in a fresh process")
        self.worker.close()
        again = self.worker.request(job, self._patience() if outcome.kind == "timeout" else limit)
        if again.kind in ("crashed", "timeout", "error"):
            self.failures.add(failure)
            return outcome
        then = "ran in a fresh process" if again.kind == "done" else f"not run again ({again.reason})"
        return Outcome("unstable", f"{_past(outcome)}, then {then}", again.answer)

    def _patience(self) -> float:
        """Seconds for a kernel that has hung: what it was waited for once is not waited for again."""
        if self.math_took is None:
            return self.timeout
        return min(self.timeout, max(HUNG_SECONDS, float(round(HUNG_FACTOR * self.math_took))))

    def _saw(self, kind: str) -> bool:
        """Whether a failure of this kind was confirmed: an exception in a process as fresh needs no second proof."""
        return any(seen == kind for _, seen in self.failures)

    def _hung(self, backend: Backend) -> bool:
        kernels = {backend.value}
        if backend is Backend.DEFAULT:
            kernels.add(str(self.default.answer.get("chosen")))
        return any((kernel, "timeout") in self.failures for kernel in kernels)


def _past(outcome: Outcome) -> str:
    """A failure in the past tense: "crashed once (SIGSEGV)"."""
    word = {"crashed": "crashed", "timeout": "hung", "error": "raised an error"}[outcome.kind]
    return f"{word} once ({outcome.reason})"
