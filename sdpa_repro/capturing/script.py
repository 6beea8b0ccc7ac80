"""Run a script or program under the recorder: a child process that sees nothing of it, its children included.

The child is started as the user would start it. A folder with a `sitecustomize.py` comes first on its
PYTHONPATH; the recorder in it wakes up when torch is imported (see `child`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdpa_repro.capturing import child, folder
from sdpa_repro.capturing.records import Options
from sdpa_repro.environment import preload_records
from sdpa_repro.errors import InputError

HOOK = Path(__file__).resolve().parent / "hook"
PACKAGE = Path(__file__).resolve().parent.parent
REPORTS = ".sessions"


@dataclass(frozen=True)
class ScriptRun:
    """How the script ended, and what each of its Python processes reported.

    status: its exit status as a shell gives it, 128 + n for signal n. reports: a dict a process that imported
    torch, with `pid`, `state` ("ended", "running", or "failed") and a `summary`, of all calls when it ended and of
    those so far when not. new: index entries that were added during the run.
    """

    status: int
    reports: tuple[dict[str, Any], ...]
    new: tuple[dict[str, Any], ...]
    interrupted: bool = False

    @property
    def end(self) -> str:
        """How it ended, in words: "exit status 3", "killed by SIGSEGV"."""
        return f"killed by {signal_name(self.status - 128)}" if self.status > 128 else f"exit status {self.status}"


def run_script(
    words: Sequence[str],
    out: str | os.PathLike[str],
    options: Options,
    *,
    preload: Sequence[str | os.PathLike[str]] = (),
    origin: Mapping[str, Any] | None = None,
    stdout: int | None = None,
) -> ScriptRun:
    """Run `words` (a Python file or `-m module`, or any program that starts Python, with arguments) to its end.

    `stdout` is the child's standard output as `subprocess` takes it (None: this process's). Raises InputError
    when there is no such script, a preload file is missing, or `out` cannot be written to.
    """
    command = command_of(words)
    preload_records([Path(path) for path in preload])
    target = Path(out).absolute()
    folder.prepare(target)
    before = {entry["file"] for entry in folder.entries(target)}
    reports = target / REPORTS / f"{os.getpid()}-{os.urandom(4).hex()}"
    reports.mkdir(parents=True)
    plan = {
        "out": str(target),
        "reports": str(reports),
        "package": str(PACKAGE),
        "options": asdict(options),
        "preload": [str(Path(path).absolute()) for path in preload],
        "origin": dict(origin or {}),
    }
    try:
        status, interrupted = run_command(command, environment_with(plan), stdout)
        found = tuple(read_reports(reports))
    finally:
        shutil.rmtree(reports, ignore_errors=True)
        with suppress(OSError):
            reports.parent.rmdir()
    new = tuple(entry for entry in folder.entries(target) if entry["file"] not in before)
    return ScriptRun(status, found, new, interrupted)


def command_of(words: Sequence[str]) -> list[str]:
    """The command line that runs the user's words. Raises InputError when there is nothing to run.

    A Python file, a folder or archive with a `__main__`, and Python's own options (`-m module`) go to this
    interpreter; any other program (`torchrun`, `accelerate launch`) is run as it is.
    """
    if not words:
        raise InputError("nothing to run after --: give a script, or -m and a module")
    first = words[0]
    if not first:
        raise InputError("nothing to run after --: the script's name is empty")
    if first.startswith("-"):
        if first not in ("-m", "-c") and any(letter in first for letter in "IES"):
            raise InputError(f"python {first} ignores the recorder's hook: run without it")
        return [sys.executable, *words]
    path = Path(first)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise InputError(f"{first} is a folder without a __main__.py: give the script in it that is to run")
    if path.is_dir() or (path.is_file() and not _runs_by_itself(path)):
        return [sys.executable, *words]
    program = shutil.which(first)
    if program is not None:
        return [program, *words[1:]]
    raise InputError(f"no script or program {first!r} here: check the path, or give -m and a module")


def _runs_by_itself(path: Path) -> bool:
    """Whether an executable file is anything but Python."""
    if path.suffix in (".py", ".pyw", ".pyz", ".zip") or not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        line = file.readline(200)
    return not (line.startswith(b"#!") and b"python" in line)


def environment_with(plan: Mapping[str, Any], variable: str = child.VARIABLE) -> dict[str, str]:
    """This process's environment with the hook first on PYTHONPATH and the plan."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != HOOK]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOOK), *paths]), variable: json.dumps(plan)}


def run_command(command: list[str], environment: dict[str, str], stdout: int | None) -> tuple[int, bool]:
    """Run to the end; exit status and whether Ctrl-C was pressed.

    A terminal sends Ctrl-C to the script too, as does whoever signals the whole process group; a signal that was sent
    to this process alone is passed on, so that the script gets each of them once.
    """
    interrupts: list[int] = []
    early: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def passed_on(number: int, _: object) -> None:
        if number == signal.SIGINT:
            interrupts.append(number)
        if not started:  # an exception here would leave behind a script that nobody waits for
            early.append(number)
        elif not witness.has_ended():
            started[0].send_signal(number)

    with Witness() as witness, _signals({signal.SIGINT: passed_on, signal.SIGTERM: passed_on}):
        try:
            started.append(subprocess.Popen(command, env=environment, stdout=stdout))
        except OSError as error:
            raise InputError(f"cannot run {command[0]}: {error.strerror or error}") from error
        for number in early:
            witness.has_ended()
            started[0].send_signal(number)
        returned = started[0].wait()
    return (returned if returned >= 0 else 128 - returned), bool(interrupts)


class Witness:
    """A process that does nothing, in this one's process group: a signal to the group ends it, one to this process
    alone does not. It ends with this process, whose end of its input is closed then."""

    COMMAND = (sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.buffer.read()")
    SECONDS = 0.5
    """How long it may take to end once it was signalled."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Witness:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def has_ended(self) -> bool:
        """Whether the signal that has just come ended it; another takes its place. On Windows always: there Ctrl-C
        goes to every process of the console, and cannot be sent to one."""
        if os.name == "nt":
            return True
        try:
            if self._process is None:
                return False
            self._process.wait(self.SECONDS)
        except subprocess.TimeoutExpired:
            return False
        self._end()
        self._start()
        return True

    def _start(self) -> None:
        quiet = subprocess.DEVNULL
        with suppress(OSError):  # no process to be had: every signal is passed on
            self._process = subprocess.Popen(self.COMMAND, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()


@contextmanager
def _signals(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handle signals for the block, but those that are ignored; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_reports(reports: Path) -> Iterator[dict[str, Any]]:
    """The reports, oldest process first; `inside`: the call that was running when it ended.

    A forked process leaves a trail only, until its report at the end.
    """
    paths = {path.with_name(path.name.removesuffix(".at")) for path in reports.glob("[!.]*.json*")}
    for path in sorted(paths, key=lambda path: path.stem.rpartition("-")[2]):
        if not path.exists():
            path.write_text('{"pid": null, "state": "running"}')
        with suppress(OSError, ValueError):
            report = json.loads(path.read_text(encoding="utf-8"))
            trail = path.with_name(f"{path.name}.at")
            inside = trail.read_bytes().rstrip(b"\0").decode(errors="replace") if trail.is_file() else ""
            if isinstance(report, dict):
                yield {**report, "inside": inside}


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
