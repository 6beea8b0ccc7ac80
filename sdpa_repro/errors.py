"""The one exception whose text is meant for the user."""

from __future__ import annotations


class InputError(Exception):
    """Bad usage or bad input.

    The message is one line that says what is wrong and what to do; the command line prints it
    without a traceback and exits with status 2.
    """
