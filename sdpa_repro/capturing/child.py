"""The recorder inside a process that `capture -- script.py` has started, directly or through the script.

Imports the standard library alone until the script imports torch. The session then covers every thread of
the process; each process leaves a report for the one that asked, and a forked one starts a session of its own.
"""

from __future__ import annotations

import atexit
import json
import math
import mmap
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdpa_repro.capturing.after_import import after_import

if TYPE_CHECKING:
    from sdpa_repro.capturing.session import Session

VARIABLE = "SDPA_REPRO_CAPTURE"
"""Environment variable with the plan, in JSON: `out`, `reports`, `package`, `options`, `preload`, `origin`."""

SO_FAR_SECONDS, SO_FAR_SHARE = 0.5, 0.03
"""A report of the calls so far is left this often, for a process that is killed before its last one; with many calls
less often, so that it takes no larger share of the time."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?$")
_ISOLATED = re.compile(r"-[A-Za-z]*[IES]")


def install(plan: dict[str, Any]) -> Process:
    """Wait for torch in this process, and notice child processes that cannot be recorded."""
    process = Process(plan)
    sys.addaudithook(process.audit)
    after_import("torch", process.start)
    return process


class Watch(Protocol):
    """What a process does from its first import of torch on: record, or guard."""

    def summary(self) -> dict[str, Any]:
        """What it has come to; `seen` and `passed` are counts of calls."""

    def close(self) -> None:
        """End it."""

    def forget(self) -> None:
        """In a forked child: this one is the parent's."""


class Process:
    """This process's session and its report."""

    variable = VARIABLE

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.session: Watch | None = None
        self.unrecorded: list[str] = []
        self._preloaded: list[dict[str, str]] = []
        self._report = self._name()
        self._pid = os.getpid()
        self._workers_know = False
        self._next = 0.0

    def start(self) -> None:
        """Preload, then record from here to the end of the process. Ends the process when a preload fails."""
        from sdpa_repro.errors import InputError

        try:
            from sdpa_repro.environment import preload

            self._preloaded = preload(self.plan["preload"])
            self._open()
        except InputError as error:
            self._leave({"state": "failed", "error": str(error), "fatal": True})
            say(str(error))
            raise SystemExit(2) from None
        except Exception as error:
            self._leave({"state": "failed", "error": f"{type(error).__name__}: {error}"[:300]})
            return
        self._leave({"state": "running"})
        atexit.register(self.finish)
        self._tell_workers()
        process: Any = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            self._in_worker()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._tell_workers, after_in_child=self._forked)

    def finish(self) -> None:
        """Close the session and leave the report; what comes after is not recorded."""
        session = self.session
        if session is None:
            return
        session.close()
        summary = session.summary()
        if not self._is_fork or summary["seen"] or summary["passed"]:
            self._leave({"state": "ended", "summary": summary, "unrecorded": self.unrecorded})
        self.session = None

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Notice Python children that do not get the hook, and the end of this program by `exec`."""
        if event == "subprocess.Popen":
            with suppress(Exception):
                self._look_at_child(*args)
        elif event == "os.exec" and self.session is not None:
            self._leave({"state": "ended", "summary": self.session.summary(), "unrecorded": self.unrecorded})

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._pid

    def _open(self) -> None:
        """A session that sees the whole process."""
        from sdpa_repro.capturing import recorder
        from sdpa_repro.capturing.records import Options
        from sdpa_repro.capturing.session import Session

        session = Session(
            self.plan["out"],
            Options(**self.plan["options"]),
            progress=say,
            origin=self.plan["origin"],
            preloaded=self._preloaded,
            trail=Trail(Path(self.plan["reports"]) / f"{self._report}.at").write,
            recorded=self._so_far,
        )
        self.session = _Recording(session)
        self._next = 0.0
        recorder.open_session(session, everywhere=True)

    def _so_far(self) -> None:
        """Leave what is known now, now and then: `multiprocessing.Pool` kills its workers, `os._exit` skips the end."""
        began = time.monotonic()
        if self.session is not None and began >= self._next:
            self._next = math.inf  # for other threads
            try:
                self._leave({"state": "running", "summary": self.session.summary(), "unrecorded": self.unrecorded})
            finally:
                self._next = began + max(SO_FAR_SECONDS, (time.monotonic() - began) / SO_FAR_SHARE)

    def _tell_workers(self) -> None:
        """Workers of `multiprocessing` may end without `atexit`, and forget finalizers as they begin."""
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None and not self._workers_know:
            util.register_after_fork(self, Process._in_worker)
            self._workers_know = True

    def _in_worker(self) -> None:
        util: Any = sys.modules["multiprocessing.util"]
        util.Finalize(None, self.finish, exitpriority=-100)

    def _forked(self) -> None:
        """A forked child has a copy of the parent's session, locks included: it gets its own."""
        if self.session is None:
            return
        self._report = self._name()
        self.unrecorded = []
        self.session.forget()
        self.session = None
        with suppress(Exception):
            self._open()

    def _look_at_child(self, program: Any, arguments: Any, _: Any, environment: Any) -> None:
        words = [os.fsdecode(word) for word in arguments] if isinstance(arguments, (list, tuple)) else [str(arguments)]
        first = os.path.basename(os.fsdecode(program) if program else words[0])
        if not _PYTHON.match(first):
            return
        flags = []
        for word in words[1:]:
            if not word.startswith("-") or word in ("-c", "-m"):
                break
            flags.append(word)
        isolated = next((flag for flag in flags if _ISOLATED.match(flag)), None)
        if isolated is not None:
            self.unrecorded.append(f"a child process {first} {isolated}")
        elif environment is not None and self.variable not in {os.fsdecode(name) for name in environment}:
            self.unrecorded.append(f"a child process {first} with an environment of its own")

    def _name(self) -> str:
        return f"{os.getpid()}-{time.time_ns()}.json"

    def _leave(self, report: dict[str, Any]) -> None:
        """Write this process's report, whole or not at all; without the folder there is nobody to read it."""
        folder = Path(self.plan["reports"])
        fresh = folder / f".{self._report}"
        text = json.dumps({"pid": os.getpid(), "parent": os.getppid(), **report})
        with suppress(OSError):
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, folder / self._report)


class _Recording:
    """A session as a `Watch`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def summary(self) -> dict[str, Any]:
        return self._session.summary()

    def close(self) -> None:
        from sdpa_repro.capturing import recorder

        recorder.close_session(self._session)
        self._session.close()

    def forget(self) -> None:
        from sdpa_repro.capturing import recorder

        recorder.forget_sessions()


class Trail:
    """A small file in memory that outlives the process: the call that is running."""

    SIZE = 512

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._running: dict[int, str] = {}

    def write(self, text: str) -> None:
        """Note this thread's call, or "" when it has come back: then one that is running in another thread, if any."""
        with self._lock:
            self._running.pop(threading.get_ident(), None)
            if text:
                self._running[threading.get_ident()] = text
            self._put(next(reversed(self._running.values()), ""))

    def _put(self, text: str) -> None:
        """Into the file; nothing where it cannot be made."""
        if self._memory is None:
            with suppress(OSError):
                self._path.write_bytes(bytes(self.SIZE))
                with self._path.open("r+b") as file:
                    self._memory = mmap.mmap(file.fileno(), self.SIZE)
        if self._memory is not None:
            self._memory[:] = text.encode()[: self.SIZE].ljust(self.SIZE, b"\0")


def say(text: str) -> None:
    """One line on the process's own stderr, past whatever the script has made of `sys.stderr`."""
    with suppress(OSError):
        os.write(2, f"sdpa-repro: {text}\n".encode())
