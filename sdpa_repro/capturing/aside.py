"""Compute beside the recorded code: in a thread of its own, under none of the model's modes.

A thread starts without grad, autocast, function and dispatch modes of others, and with an OpenMP pool of its
own. The latter matters to scripts that fork: a process whose thread has started a pool (GNU OpenMP) hangs in
its forked children when they compute in parallel, so a check in the script's own thread could hang it. Where that
thread has a pool already, a second one only slows both down: threads of one pool no longer wait for work awake.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from sdpa_repro.capturing.handlers import may_be_interrupted

Result = TypeVar("Result")

LAST_SECONDS = 5.0
"""How long the end of the interpreter waits for what is being computed, such as after Ctrl-C: a thread that is cut off
within a kernel ends the process by SIGABRT."""

IDLE_SECONDS = 1.0
"""A thread that has had nothing to do for so long ends: some scripts wait for every thread that is alive."""


def undisturbed(device: torch.device) -> bool:
    """Whether what this thread computes is changed by nothing, shown to nobody, and ended by nothing but Ctrl-C.

    No autocast, transform, profiler, or signal handler of the program, whose exceptions would be taken for those of the
    computation. Gradients, compilers, and modes of functions and dispatch are not asked for: `apart`, the patch and
    `recorder.unseen` take them away.
    """
    if torch.is_autocast_enabled(device.type) or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    profiled: bool = torch._C._autograd._profiler_enabled()
    return not profiled and not may_be_interrupted()


def apart(function: Callable[[], Result]) -> Result:
    """`function()` without gradients, and without emptying the cache of autocast, which all threads share.

    The outermost `torch.autocast` of a thread empties it when it is left.
    """
    torch.autocast_increment_nesting()
    try:
        with torch.no_grad():
            return function()
    finally:
        torch.autocast_decrement_nesting()


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
                self._outcome[0] = apart(function)
        except BaseException as error:
            self._outcome[1] = error
        finally:
            self._done.set()

    def wait(self, seconds: float | None = None) -> None:
        """Return when it is done, or after so many seconds."""
        self._done.wait(seconds)

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
        self._last: Callable[[], Job[Any] | None] = lambda: None

    def _settle(self) -> None:
        job = self._last()
        if job is not None and self._pid == os.getpid():
            job.wait(LAST_SECONDS)

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
                atexit.register(self._settle)
            elif threading.current_thread() is self._thread:
                return False
            self._jobs.put(job)
            self._last = weakref.ref(job)
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
                        atexit.unregister(self._settle)  # which would keep this object to the end of the process
                        return
