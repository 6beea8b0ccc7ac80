"""Run something under torchrun: several ranks on this machine's CPU, connected by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT = 300.0
"""Seconds for a whole run; a busy machine takes a minute to start the processes."""


def launch(*words: Any, ranks: int = 2) -> list[str]:
    """The command line that runs `words` (a script, or -m and a module) in each rank, at a port that is free."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*run, *map(str, words)]


def run(*words: Any, cwd: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run `words` in each rank and wait for all of them."""
    return call(launch(*words, ranks=ranks), cwd)


def call(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, one thread a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
