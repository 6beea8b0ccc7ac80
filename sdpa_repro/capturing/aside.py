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
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Aside:
    """A thread that computes on request; started on first use, and again in a forked child."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        """`prepare` runs first in the thread."""
        self._prepare = prepare
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pid = 0

    def run(self, function: Callable[[], Result], device: torch.device) -> Result:
        """`function()`, without gradients and on the caller's stream if `device` is a GPU; raises what it raises.

        Where no thread can start (the interpreter is ending) it runs in the caller's.
        """
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        done = threading.Event()
        outcome: list[Any] = [None, None]

        def job() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(stream):
                    outcome[0] = function()
            except BaseException as error:
                outcome[1] = error
            finally:
                done.set()

        if self._start():
            self._jobs.put(job)
            done.wait()
        else:
            job()
        result, error = outcome
        if error is not None:
            outcome.clear()
            raise error
        return result  # type: ignore[no-any-return]

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

    def _work(self, jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
        self._prepare()
        while True:
            jobs.get()()
