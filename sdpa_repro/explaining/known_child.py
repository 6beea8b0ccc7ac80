"""The child process of `known_here`: runs triggers one after another and reports each in a line of JSON.

Run as `main()` with the job in `argv[1]`: {"device", "issues": [[issue, backend or null], ...], "preload": [paths]}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from sdpa_repro.environment import preload
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.trigger_call import UntestableError
from sdpa_repro.explaining.triggers import TRIGGERS

BROKEN_DEVICE = ("CUDA error", "HIP error", "illegal memory access")
"""Texts of errors after which the device cannot be used any more in this process."""


def main() -> None:
    """Run the job; one line when a trigger starts and one when it is done."""
    job = json.loads(sys.argv[1])
    channel = _own_channel()
    _no_core_files()
    try:
        preload(job["preload"])
    except InputError as error:
        _tell(channel, event="refused", detail=str(error))
        return
    for issue, backend in job["issues"]:
        _tell(channel, event="start", issue=issue)
        status, detail, usable = answer(issue, job["device"], backend)
        _tell(channel, event="done", issue=issue, status=status, detail=detail)
        if not usable:
            return


def answer(issue: str, device: str, backend: str | None) -> tuple[str, str, bool]:
    """What a trigger says: status, a few words, and whether this process can go on."""
    run = TRIGGERS[issue].run
    if run is None:
        return "not tested", TRIGGERS[issue].why_not, True
    try:
        finding = run(device, backend)
    except UntestableError as reason:
        return "not tested", str(reason), True
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        broken = any(mark in text for mark in BROKEN_DEVICE)
        return "affected" if broken else "not tested", text, not broken
    return "affected" if finding.affected else "not affected", finding.detail, True


def _own_channel() -> TextIO:
    """Standard output as the parent reads it; whatever else prints (a preloaded file) goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def _tell(channel: TextIO, **event: str) -> None:
    channel.write(json.dumps(event) + "\n")
    channel.flush()


def _no_core_files() -> None:
    """Crashes are expected here; leave no core files about."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        return
