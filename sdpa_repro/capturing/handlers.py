"""Exceptions that a signal handler of the recorded program raises, such as a time limit by SIGALRM.

The handler runs wherever the main thread happens to be. Under the recorder that may be within its own work, whose
errors are counted and forgotten; this one is the program's, and has to reach it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

from sdpa_repro.capturing.load_errors import causes

_SIGNALS = tuple(map(int, signal.valid_signals()))
_HANDLER: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
"""Without the enums that `signal` makes of what the system says: they take most of the time."""


def hand_on(error: BaseException) -> None:
    """Raise what a signal handler has raised, if that is `error` or what it comes from; else return."""
    codes = {code for number in _SIGNALS if (code := _code(signal.getsignal(number))) is not None}
    for link in causes(error):
        trace = link.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                raise link
            trace = trace.tb_next


def may_be_interrupted() -> bool:
    """Whether a signal handler of the program that does more than Ctrl-C may run in this thread at any moment."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = map(_HANDLER, _SIGNALS)
    usual = signal.default_int_handler
    return any(callable(each) and each is not usual and not hasattr(each, "interrupts_only") for each in handlers)


def _code(handler: Any) -> CodeType | None:
    """What runs for a handler written in Python: a function, a method, or an object that can be called."""
    handler = getattr(handler, "func", handler)  # functools.partial
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    found = getattr(handler, "__code__", None)
    return found if isinstance(found, CodeType) else None
