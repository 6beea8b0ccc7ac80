"""The one exception whose text is meant for the user, and the exit status of Ctrl-C."""

from __future__ import annotations

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class InputError(Exception):
    """Bad usage or bad input.

    The message is one line that says what is wrong and what to do; the command line prints it
    without a traceback and exits with status 2.
    """
