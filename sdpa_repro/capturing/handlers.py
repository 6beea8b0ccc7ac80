"""Exceptions that a signal handler of the recorded program raises, such as a time limit by SIGALRM.

The handler runs wherever the main thread happens to be. Under the recorder that may be within its own work, whose
errors are counted and forgotten; this one is the program's, and has to reach it.
"""

from __future__ import annotations

import signal
from types import CodeType
from typing import Any

from sdpa_repro.capturing.load_errors import causes


def hand_on(error: BaseException) -> None:
    """Raise what a signal handler has raised, if that is `error` or what it comes from; else return."""
    codes = {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    for link in causes(error):
        trace = link.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                raise link
            trace = trace.tb_next


def _code(handler: Any) -> CodeType | None:
    """What runs for a handler written in Python: a function, a method, or an object that can be called."""
    handler = getattr(handler, "func", handler)  # functools.partial
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    found = getattr(handler, "__code__", None)
    return found if isinstance(found, CodeType) else None
