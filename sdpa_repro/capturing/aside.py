"""Compute beside the recorded code: in a thread of its own, under none of the model's modes.

A thread starts without grad, autocast, function and dispatch modes of others, and with an OpenMP pool of its
own. The latter matters to scripts that fork: a process whose thread has started a pool (GNU OpenMP) hangs in
its forked children when they compute in parallel, so a check in the script's own thread could hang it. Where that
thread has a pool already, a second one only slows both down: threads of one pool no longer wait for work awake.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

IDLE_SECONDS = 1.0
"""A thread that has had nothing to do for so long ends: some scripts wait for every thread that is alive."""


def undisturbed(device: torch.device) -> bool:
    """Whether no autocast and no transform would change what this thread computes.

    Gradients, compilers, and modes of functions and dispatch are not asked for: `no_grad`, the patch and
    `recorder.unseen` take them away.
    """
    return not torch.is_autocast_enabled(device.type) and torch._C._functorch.peek_interpreter_stack() is None


class Job(Generic[Result]):
    """Work given to an `Aside`."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function: Callable[[], Result] | None = function
        self._done = threading.Event()
        self._outcome: list[Any] = [None, None]

    def run(self) -> None:
        """Do it once, keep what comes of it, and let go of what it was done with."""
        function, self._function = self._function, None
        try:
            if function is not None:
                with torch.no_grad():
                    self._outcome[0] = function()
        except BaseException as error:
            self._outcome[1] = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Return when it is done."""
        self._done.wait()

    def result(self) -> Result:
        """What came of it, when it is done; raises what it raised."""
        self.wait()
        result, error = self._outcome
        if error is None:
            return result  # type: ignore[no-any-return]
        self._outcome.clear()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: together they would keep the model's tensors alive


class Aside:
    """A thread that computes on request; started when there is something to do, and ended when there no longer is."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        """`prepare` runs first in the thread."""
        self._prepare = prepare
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()
        self._pid = 0

    def forked(self) -> None:
        """In a forked child: another thread may have held the lock, and nobody here lets go of it."""
        self._lock = threading.Lock()

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
        if not self._hand_over(job):
            job.run()
        return job

    def _hand_over(self, job: Job[Any]) -> bool:
        """Give the thread a job; False when there can be no thread, or when this is it."""
        with self._lock:
            if self._thread is None or self._pid != os.getpid() or not self._thread.is_alive():
                self._jobs = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._work, args=(self._jobs,), name="sdpa-repro", daemon=True)
                self._pid = os.getpid()
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
                    return False
            elif threading.current_thread() is self._thread:
                return False
            self._jobs.put(job)
            return True

    def _work(self, jobs: queue.SimpleQueue[Job[Any]]) -> None:
        self._prepare()
        while True:
            try:
                jobs.get(timeout=IDLE_SECONDS).run()
            except queue.Empty:
                with self._lock:
                    if jobs.empty():
                        self._thread = None
                        return
