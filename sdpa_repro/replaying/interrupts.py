"""Ctrl-C, counted: a search answers it with what it has found, and whoever called the search has to know."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """The Ctrl-Cs pressed in the block, each raised as it would be without; always empty outside the main thread."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if not callable(before):
            raise KeyboardInterrupt
        before(number, frame)

    if before is None or before == signal.SIG_IGN:  # not set from Python, or a background job of a shell
        yield seen
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
