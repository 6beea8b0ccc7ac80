"""Kill a piece of work at each moment at which it changes the disk. Run as a module by the tests of killed runs.

    python -m tests.killing SCENARIO FOLDER

Each attempt is a fork of this process, which starts no threads, and dies by SIGKILL just before its n-th change
below FOLDER, or in the middle of a write that passes a size. Prints one JSON line an attempt: what was there after.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir")
"""Audit events, raised before the thing is done."""


def attempt(work: Callable[[], object], folder: Path, *, kill: int = 0, size: int = 0, full: int = 0) -> int:
    """Do the work in a fork; the status that `os.waitpid` reports as `os.waitstatus_to_exitcode` gives it.

    kill: die before the n-th change below `folder`. size: die in a write beyond so many bytes of a file. full: have
    such a write fail, as on a full disk.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 70
    try:
        if kill:
            sys.addaudithook(_killer(folder, kill))
        if size or full:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if size else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size or full, resource.RLIM_INFINITY))
        result = work()
        status = result if isinstance(result, int) else 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _killer(folder: Path, moment: int) -> Callable[[str, tuple[Any, ...]], None]:
    left = [moment]
    inside = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(arguments[0]).startswith(inside):
            return
        if event == "open" and not _writes(arguments):
            return
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Whether an `open` event (path, mode, flags) is for writing."""
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


def tell(**facts: Any) -> None:
    """One line for the test."""
    print(json.dumps(facts), flush=True)


def temporary(folder: Path) -> list[str]:
    """Names of files under temporary names anywhere below the folder."""
    return sorted(path.name for path in folder.rglob("*") if path.name.endswith(".tmp") or ".jsonl." in path.name)


def main() -> None:
    """Run the scenario named on the command line."""
    from tests import killed_work

    scenarios: Mapping[str, Callable[[Path], None]] = {
        "capture": killed_work.capture,
        "reduce": killed_work.reduce,
        "diagnose": killed_work.diagnose,
    }
    scenarios[sys.argv[1]](Path(sys.argv[2]).resolve())


if __name__ == "__main__":
    main()
