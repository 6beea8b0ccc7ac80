"""Run the triggers of all known issues on this machine and this torch, in processes that may die.

Two child processes share the list. A child that crashes convicts the trigger it was running; the rest of its list
goes to a new one. No dump is needed.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sdpa_repro.environment import preload_records
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.triggers import TRIGGERS
from sdpa_repro.known_issues import CRASH, KNOWN_ISSUES, SDP_BACKENDS, KnownIssue, may_be_emulated
from sdpa_repro.situation import on_rocm

CHILDREN = 2
TIMEOUT = 60.0
"""Seconds a trigger may take, the start of its process included."""

AFFECTED, NOT_AFFECTED, NOT_TESTED = "affected", "not affected", "not tested"
CRASHES = frozenset({"SIGSEGV", "SIGFPE", "SIGBUS", "SIGABRT", "SIGILL"})
"""Signals that come from the process itself; any other one (SIGKILL for want of memory) is no answer."""

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import sdpa_repro.explaining.known_child as child; "
)
_CODE += "child.main()"


@dataclass(frozen=True)
class Outcome:
    """What one trigger showed here. status: "affected", "not affected" or "not tested"; `detail` says what or why."""

    issue: str
    status: str
    detail: str
    device: str | None = None
    backend: str | None = None
    emulated: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """A trigger and where to run it. `emulated`: on a CPU in place of the device that has the bug."""

    issue: str
    device: str
    backend: str | None
    emulated: bool = False


@dataclass(frozen=True)
class _Child:
    """A running child, its lines of output (None at the end), and the last it wrote to standard error."""

    process: subprocess.Popen[str]
    lines: queue.Queue[str | None]
    complaints: list[str]


Report = Callable[[Outcome], None]


def check_here(
    preload: Sequence[str | Path] = (), *, timeout: float = TIMEOUT, report: Report | None = None
) -> list[Outcome]:
    """One Outcome for each known issue, in the order of the table.

    preload: Python files each child runs first; with any, bugs of other devices are looked for on the CPU as
    well, since one may have been planted there. report: called with each Outcome as it comes, from any thread.
    Raises InputError for a preload that is missing or fails; Ctrl-C ends the children and is passed on.
    """
    preload_records(preload)
    tell: Report = report or (lambda outcome: None)
    jobs, outcomes = [], {}
    for known in KNOWN_ISSUES:
        planned = plan(known, preloaded=bool(preload))
        if isinstance(planned, Job):
            jobs.append(planned)
        else:
            outcomes[known.issue] = Outcome(known.issue, NOT_TESTED, planned)
            tell(outcomes[known.issue])
    for outcome in _run(jobs, preload, timeout, tell):
        outcomes[outcome.issue] = outcome
    return [outcomes[known.issue] for known in KNOWN_ISSUES]


def plan(known: KnownIssue, *, preloaded: bool = False) -> Job | str:
    """Where to run the issue's trigger on this machine, or why that cannot be done."""
    trigger, device = TRIGGERS[known.issue], _device_here(known.device)
    if trigger.run is None:
        return trigger.why_not
    if device is None:
        if preloaded and known.device != "cpu" and may_be_emulated(known, SDP_BACKENDS[1]):
            return Job(known.issue, "cpu", None, emulated=True)
        return _no_device(known)
    if device == "cuda" and trigger.capability is not None:
        here = torch.cuda.get_device_capability()
        if here != trigger.capability:
            return "seen on compute capability {}.{} only, this GPU has {}.{}".format(*trigger.capability, *here)
    forced = device != "mps" and known.backends[0] in SDP_BACKENDS and known.backends != SDP_BACKENDS
    return Job(known.issue, device, known.backends[0] if forced else None)


def _no_device(known: KnownIssue) -> str:
    return f"no {'ROCm' if known.device == 'rocm' else known.device.upper()} device"


def _device_here(device: str) -> str | None:
    """The torch device on which bugs of "cuda", "rocm", "cpu", "mps" or "any" can be looked for; None without one."""
    rocm = on_rocm(torch.__version__) or getattr(torch.version, "hip", None) is not None
    gpu = torch.cuda.is_available()
    mps = getattr(torch.backends, "mps", None)
    return {
        "cpu": "cpu",
        "cuda": "cuda" if gpu and not rocm else None,
        "rocm": "cuda" if gpu and rocm else None,
        "mps": "mps" if mps is not None and mps.is_available() else None,
        "any": "cuda" if gpu else "cpu",
    }[device]


def _run(jobs: Sequence[Job], preload: Sequence[str | Path], timeout: float, tell: Report) -> list[Outcome]:
    """All jobs, split over a few children; a child has one device, and what may end it comes last."""
    crashing = {known.issue for known in KNOWN_ISSUES if known.symptoms == CRASH}
    ordered = sorted(jobs, key=lambda job: (job.device, job.issue in crashing))
    devices = sorted({job.device for job in jobs})
    lanes = [
        [job for job in ordered if job.device == device][i::CHILDREN] for device in devices for i in range(CHILDREN)
    ]
    stop = threading.Event()
    with ThreadPoolExecutor(CHILDREN) as pool:
        futures = [pool.submit(_lane, lane, preload, timeout, stop, tell) for lane in lanes if lane]
        try:
            return [outcome for future in futures for outcome in future.result()]
        finally:
            stop.set()  # after Ctrl-C or an error the other lanes end their children


def _lane(
    jobs: Sequence[Job], preload: Sequence[str | Path], timeout: float, stop: threading.Event, tell: Report
) -> list[Outcome]:
    """Jobs one after another in one child, and in a new one after each that ended it."""
    left, found = list(jobs), []
    while left and not stop.is_set():
        with _started(left, preload) as child:
            for outcome in _watch(left, child, timeout, stop):
                left = [job for job in left if job.issue != outcome.issue]
                found.append(outcome)
                tell(outcome)
    return found


@contextmanager
def _started(jobs: Sequence[Job], preload: Sequence[str | Path]) -> Iterator[_Child]:
    """A child that works through the jobs; killed at the end of the block whatever it is doing."""
    job = {
        "device": jobs[0].device,
        "issues": [(job.issue, job.backend) for job in jobs],
        "preload": [str(Path(path).resolve()) for path in preload],
    }
    package = str(Path(__file__).resolve().parents[2])
    path = [package, *(entry for entry in sys.path if entry and entry != package)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _CODE, json.dumps(path), json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C in the terminal must not look like a crash
    )
    child = _Child(process, queue.Queue(), [])
    readers = [threading.Thread(target=read, args=(child,), daemon=True) for read in (_read_lines, _read_complaints)]
    for reader in readers:
        reader.start()
    try:
        yield child
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()


def _read_lines(child: _Child) -> None:
    with child.process.stdout or open("/dev/null") as stream:
        for line in stream:
            child.lines.put(line)
    child.lines.put(None)


def _read_complaints(child: _Child) -> None:
    with child.process.stderr or open("/dev/null") as stream:
        for line in stream:
            child.complaints[:] = [line.strip() or "nothing was said"]


def _watch(jobs: Sequence[Job], child: _Child, timeout: float, stop: threading.Event) -> Iterator[Outcome]:
    """The outcomes a child reports, and one for the trigger that ended it or did not come back.

    A child that ends or hangs before its first trigger (a preloaded file can do that) answers for none of its jobs.
    """
    by_issue = {job.issue: job for job in jobs}
    begun, running = False, list(jobs)
    since = time.monotonic()
    while not stop.is_set():
        try:
            line = child.lines.get(timeout=0.2)
        except queue.Empty:
            if running and time.monotonic() - since > timeout:
                text = f"no answer within {timeout:.0f} s" + ("" if begun else " while starting")
                yield from (_outcome(job, NOT_TESTED, text, since) for job in running)
                return
            continue
        if line is None:
            status, text = _end(child, begun)
            yield from (_outcome(job, status, text, since) for job in running)
            return
        event = json.loads(line)
        if event["event"] == "refused":
            raise InputError(event["detail"])
        if event["event"] == "start":
            begun, running, since = True, [by_issue[event["issue"]]], time.monotonic()
        else:
            yield _outcome(by_issue[event["issue"]], event["status"], event["detail"], since)
            running = []


def _end(child: _Child, begun: bool) -> tuple[str, str]:
    """Status and words for a child that ended by itself: a crash in a trigger is the bug, all else is no answer."""
    code = child.process.wait()
    if code >= 0:
        said = child.complaints[-1][:200] if child.complaints else f"exit status {code}"
        return NOT_TESTED, f"the process ended {'early' if begun else 'while starting'}: {said}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    crashed = begun and name in CRASHES
    text = f"the process was killed by {name}" + ("" if begun else " while starting")
    return AFFECTED if crashed else NOT_TESTED, text


def _outcome(job: Job, status: str, detail: str, since: float) -> Outcome:
    """As the child said; where a planted bug was looked for and none found, the real one remains untested."""
    seconds = round(time.monotonic() - since, 3)
    outcome = Outcome(job.issue, status, detail, job.device, job.backend, job.emulated, seconds)
    if job.emulated and status != AFFECTED:
        known = next(known for known in KNOWN_ISSUES if known.issue == job.issue)
        return replace(outcome, status=NOT_TESTED, detail=f"{_no_device(known)}, and nothing like it was preloaded")
    return outcome
