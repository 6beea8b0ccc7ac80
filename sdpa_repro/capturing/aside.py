"""Compute beside the recorded code: in a thread of its own, under none of the model's modes.

A thread starts without grad, autocast, function and dispatch modes of others, and with an OpenMP pool of its
own. The latter matters to scripts that fork: a process whose thread has started a pool (GNU OpenMP) hangs in
its forked children when they compute in parallel, so a check in the script's own thread could hang it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class Job(Generic[Result]):
    """Work given to an `Aside`."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._done = threading.Event()
        self._outcome: list[Any] = [None, None]
        self._pid = os.getpid()

    @property
    def lost(self) -> bool:
        """Whether this is a forked child's copy: its work goes on in the parent."""
        return self._pid != os.getpid()

    def run(self) -> None:
        """Do it, and keep what comes of it."""
        try:
            with torch.no_grad():
                self._outcome[0] = self._function()
        except BaseException as error:
            self._outcome[1] = error
        finally:
            self._done.set()

    def result(self) -> Result:
        """What came of it, when it is done; raises what it raised."""
        self._done.wait()
        result, error = self._outcome
        if error is not None:
            self._outcome.clear()
            raise error
        return result  # type: ignore[no-any-return]


class Aside:
    """A thread that computes on request; started on first use, and again in a forked child."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        """`prepare` runs first in the thread."""
        self._prepare = prepare
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()
        self._pid = 0

    def run(self, function: Callable[[], Result], device: torch.device) -> Result:
        """`function()`, without gradients and on the caller's stream if `device` is a GPU; raises what it raises."""
        if device.type != "cuda":
            return self.begin(function).result()
        stream = torch.cuda.current_stream(device)

        def streamed() -> Result:
            with torch.cuda.stream(stream):
                return function()

        return self.begin(streamed).result()

    def begin(self, function: Callable[[], Result]) -> Job[Result]:
        """Start `function()`, without gradients, after what was started before it.

        Where no thread can start (the interpreter is ending) it runs in the caller's, before this returns.
        """
        job = Job(function)
        if self._start():
            self._jobs.put(job)
        else:
            job.run()
        return job

    def _start(self) -> bool:
        """Have a thread; False when there can be none, or when this is it."""
        with self._lock:
            if self._thread is not None and self._pid == os.getpid() and self._thread.is_alive():
                return threading.current_thread() is not self._thread
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, args=(self._jobs,), name="sdpa-repro", daemon=True)
            self._pid = os.getpid()
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
            return self._thread is not None

    def _work(self, jobs: queue.SimpleQueue[Job[Any]]) -> None:
        self._prepare()
        while True:
            jobs.get().run()
