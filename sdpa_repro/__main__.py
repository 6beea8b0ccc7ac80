"""The program, `sdpa-repro` or `python -m sdpa_repro`: the command line, and Ctrl-C from its first moment to its last.

Imports next to nothing before it has taken Ctrl-C over.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from sdpa_repro.errors import INTERRUPTED

AGAIN_SECONDS = 0.01
"""After which a KeyboardInterrupt that came to nothing is raised again."""


def run() -> int:
    """Run the command line as this process's program and return its exit status; see `sdpa_repro.cli.main`.

    While torch is imported, C code and the locks of imports swallow a KeyboardInterrupt, and nothing is worth
    keeping yet: Ctrl-C ends the process at once, with the same line and status as later. From then on it raises
    KeyboardInterrupt, as usual. A process that ignores Ctrl-C goes on doing so.
    """
    ours = _take_over()
    try:
        from sdpa_repro.cli import main

        status = main()
    except KeyboardInterrupt:  # a second one, while the first was being told
        status = INTERRUPTED
    if ours:
        exec("")  # Python kills itself by SIGINT in the end when one went through such a piece of code, until the next
        _end_at_once_with(status)
    return status


def _take_over() -> bool:
    """Handle Ctrl-C here, unless it is ignored, somebody else's, or this is not the main thread."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, _Stop())
    except ValueError:  # not the main thread
        return False
    sys.unraisablehook = _raise_again
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first is the last to run: what follows is short
    return True


class _Stop:
    """Ctrl-C: ends the process when torch is not there yet, else raises KeyboardInterrupt."""

    interrupts_only = True
    """What computes in this thread is asked for it (`capturing.handlers`): no other exception comes from here."""

    def __call__(self, number: int, frame: object) -> None:
        if _torch_is_imported():
            raise KeyboardInterrupt
        try:
            os.write(2, b"error: interrupted\n")
        finally:
            os._exit(INTERRUPTED)


def _torch_is_imported() -> bool:
    """Whether the import of torch, if anybody asked for it, has come to its end."""
    torch = sys.modules.get("torch")
    return torch is not None and not getattr(getattr(torch, "__spec__", None), "_initializing", False)


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    """A KeyboardInterrupt in a finalizer or callback is printed and forgotten: press Ctrl-C again for the user."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    import threading

    again = threading.Timer(AGAIN_SECONDS, _press)
    again.daemon = True
    again.start()


def _press() -> None:
    """Ctrl-C for the main thread, which may be asleep."""
    import _thread
    import threading

    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _end_at_once_with(status: int) -> None:
    """The answer is given: Ctrl-C while Python ends cuts that short, and neither raises nor changes the status."""
    leave = os._exit  # not a global, which may be gone by then
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # Python says so itself as it ends
        return
    signal.signal(signal.SIGINT, lambda number, frame: leave(status))


if __name__ == "__main__":
    sys.exit(run())
