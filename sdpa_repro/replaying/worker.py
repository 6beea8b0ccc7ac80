"""A process that runs kernels which may crash, hang or poison their GPU context, and dies in our place.

The worker is a fresh Python process, not a fork and not `multiprocessing` (which would import the user's
`__main__` again). It gets paths, not tensors, and is kept while it is healthy.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import sdpa_repro
from sdpa_repro.errors import InputError

STARTUP_SECONDS = 300.0
"""For importing torch and running preloaded files, which may load or build extensions."""

OWN_VARIABLES = "SDPA_REPRO_"
"""Environment variables of this program are not handed on: a worker is never recorded itself."""

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Has glibc keep freed memory: otherwise MATH's gigabytes of scores come fresh, page by page, in every run, which
takes longer than computing them. A cell that needs the memory gives it back first (`jobs.memory_for`)."""

BOOTSTRAP = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
import importlib.util
spec = importlib.util.spec_from_file_location("sdpa_repro", sys.argv[2])
package = importlib.util.module_from_spec(spec)
sys.modules["sdpa_repro"] = package
spec.loader.exec_module(package)
from sdpa_repro.replaying.jobs import main
main(sys.argv[3])
"""
"""Take the parent's import path and its very copy of this package before anything else is imported."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    kind: "done" | "declined" | "error" (the kernel raised) | "crashed" (signal or CUDA error) | "timeout" |
    "memory" (killed by the system for want of memory). `answer` holds what the worker measured.
    """

    kind: str
    reason: str = ""
    answer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the process had to be replaced."""
        return self.kind in ("crashed", "timeout", "memory")


class Worker:
    """A worker process, started at once and again after each failure. Use as a context manager.

    `preload`: Python files that it runs before the first job. `env`: additional environment variables.
    """

    def __init__(self, preload: Sequence[str | Path] = (), env: Mapping[str, str] | None = None) -> None:
        self.preload = tuple(str(Path(path).resolve()) for path in preload)
        self._env = dict(env or {})
        self._process: _Process | None = None
        self._jobs = 0
        self.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the process if there is none; it loads torch while the caller goes on."""
        if self._process is None:
            self._process = _Process(self._env)
            self._process.send({"id": "preload", "do": "preload", "paths": self.preload})

    def wait(self) -> None:
        """Until the process has imported torch and run the preloads. Raises as `request` does."""
        self._ready()

    def request(self, job: Mapping[str, Any], timeout: float) -> Outcome:
        """Have one job done (see `jobs.cell` for its keys); at most `timeout` seconds, start-up not counted.

        Raises InputError when a preload or the dump is bad, RuntimeError when this program is.
        """
        process = self._ready()
        self._jobs += 1
        name = f"job {self._jobs}"
        process.send({**job, "id": name, "timeout": timeout})
        try:
            return self._outcome(process, process.receive(name, timeout), timeout)
        except BaseException:  # Ctrl-C above all: the answer to this job must not be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and what it started; a later request starts a fresh one."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _ready(self) -> _Process:
        """A process that has imported torch and run the preloads."""
        self.start()
        process = self._process
        assert process is not None
        if process.ready:
            if process.alive:
                return process
            self.close()
            return self._ready()
        try:
            answer = process.receive("preload", STARTUP_SECONDS)
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Mapping) and answer.get("kind") == "done":
            process.ready = True
            return process
        reason = answer.get("reason") if isinstance(answer, Mapping) else process.cause_of_death(answer)
        self.close()
        names = ", ".join(Path(path).name for path in self.preload)
        if isinstance(answer, Mapping) and answer.get("kind") == "input":
            raise InputError(str(reason))
        if names:
            raise InputError(f"--preload {names}: the process that ran it ended with {reason}; mend it or leave it out")
        raise RuntimeError(f"a worker process could not start: {reason}")

    def _outcome(self, process: _Process, answer: Mapping[str, Any] | str, timeout: float) -> Outcome:
        if isinstance(answer, str):
            reason, notes = process.cause_of_death(answer), process.notes
            self.close()
            if answer == "timeout":
                return Outcome("timeout", f"no result after {timeout:g} s", notes)
            if reason.startswith("SIGKILL"):
                return Outcome("memory", "killed by the system, most likely for want of memory", notes)
            return Outcome("crashed", reason, notes)
        kind, reason = str(answer["kind"]), str(answer.get("reason", ""))
        if kind == "input":
            raise InputError(reason)
        if kind == "failed":
            raise RuntimeError(f"the worker failed: {reason}")
        if kind == "crashed":
            self.close()
        return Outcome(kind, reason, {**process.notes, **answer})


class _Process:
    """One child process: its pipes, its log, its end."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.ready = False
        self.notes: Mapping[str, Any] = {}
        """What a job told ahead of its answer."""
        self._token = f"{secrets.token_hex(8)} "
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill)
        variables = {name: text for name, text in os.environ.items() if not name.startswith(OWN_VARIABLES)}
        self._popen = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, "\n".join(_import_path()), str(sdpa_repro.__file__), self._token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**KEEP_MEMORY, **variables, **env},
            start_new_session=True,
        )
        self._answers: queue.Queue[Mapping[str, Any] | str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def send(self, job: Mapping[str, Any]) -> None:
        """Write one job; a process that has died meanwhile is noticed by `receive`."""
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.write(json.dumps(job).encode() + b"\n")
            self._popen.stdin.flush()

    def receive(self, name: str, timeout: float) -> Mapping[str, Any] | str:
        """The answer to the job of that name, or "timeout", or "died"."""
        end = time.monotonic() + timeout
        self.notes = {}
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return "timeout"
            if isinstance(answer, str) or answer.get("id") == name:
                return answer
            if answer.get("note") == name:
                self.notes = answer

    def _read(self) -> None:
        """Queue every line that is an answer; anything else on the pipe is somebody's print."""
        assert self._popen.stdout is not None
        token = self._token.encode()
        with suppress(OSError, ValueError):
            for line in iter(lambda: self._popen.stdout.readline(1 << 20), b""):  # type: ignore[union-attr]
                if line.startswith(token):
                    with suppress(ValueError, RecursionError):
                        answer = json.loads(line[len(token) :])
                        if isinstance(answer, dict):
                            self._answers.put(answer)
        self._answers.put("died")

    def cause_of_death(self, answer: str) -> str:
        """How the process ended: the signal's name or its exit status, and the last line it printed."""
        if answer == "timeout":
            return "timeout"
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)
        code = self._popen.returncode
        if code is None:
            return "a closed pipe"
        how = f"exit status {code}"
        if code < 0:
            how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        said = self._last_words()
        return f"{how} ({said})" if said else how

    def _last_words(self) -> str:
        """The last line that the process printed, at most 200 characters."""
        with suppress(OSError, ValueError):
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - 4096))
            lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
            return next((line for line in reversed(lines) if line), "")[:200]
        return ""

    def kill(self) -> None:
        """End the process, and on POSIX everything it started."""
        if self.alive:
            with suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(self._popen.pid, signal.SIGKILL)
                else:
                    self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout, self._log):
            with suppress(OSError, AttributeError):
                stream.close()  # type: ignore[union-attr]


def _import_path() -> list[str]:
    """The parent's `sys.path` without the folders of whatever is run or lies around: script and cwd."""
    script = Path(sys.argv[0]).parent.resolve() if sys.argv and sys.argv[0] not in ("", "-c", "-m") else None
    left_out = {Path.cwd().resolve(), script}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        left_out.discard(Path(torch).resolve().parents[1])
    return [path for path in sys.path if path and Path(path).resolve() not in left_out]


if __name__ == "__main__":
    from sdpa_repro.replaying.jobs import main

    main(sys.argv[1])
