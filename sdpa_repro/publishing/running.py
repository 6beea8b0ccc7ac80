"""Run a script as a stranger would: a fresh isolated Python in an empty folder, without this package."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sdpa_repro.environment import preload_records
from sdpa_repro.errors import InputError
from sdpa_repro.publishing import alone

NAME = "repro.py"
ENOUGH = 100_000
"""Characters kept of a script's output, from its end."""


@dataclass(frozen=True)
class ScriptRun:
    """What one run of a script came to.

    status: exit status, negative for a signal, None when it was stopped after `timeout` seconds. output: stdout and
    stderr as they came, without the folder's name. where: how it was run, for people. preloaded: files run before it.
    """

    status: int | None
    output: str
    seconds: float
    where: str
    preloaded: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether it ended as it should while the bug is there: by its assertion."""
        return self.status == 1 and self.last_line.startswith("AssertionError")

    @property
    def passes(self) -> bool:
        return self.status == 0

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def shown(self) -> str:
        """The output without the traceback's frames: what a report needs."""
        lines, kept, inside = self.output.rstrip().splitlines(), [], False
        for line in lines:
            if line.startswith("Traceback (most recent call last)"):
                inside = True
            elif inside and not line.startswith(" "):
                inside = False
            if not inside:
                kept.append(line)
        return "\n".join(kept)

    def ending(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return f"stopped after {self.seconds:.0f} s"
        if self.fails:
            return "exit status 1, AssertionError"
        how = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return how if self.passes or not self.last_line else f"{how}, {self.last_line[:120]}"


def run_script(
    text: str,
    *,
    preload: Sequence[str | Path] = (),
    timeout: float = 120.0,
    beside: Mapping[str, Path] | None = None,
    python: str | None = None,
) -> ScriptRun:
    """Run a script's text with `python -I` in a temporary folder that holds it and nothing else.

    beside: files to copy there, by the name they get. preload: files that run first (planted faults, kernels from
    elsewhere); the result names them. python: another interpreter than this one. The script and its children are
    ended after `timeout` seconds.
    Raises InputError when the text imports anything but torch and the standard library, or when a preloaded file
    cannot be read; OSError when `python` cannot be started.
    """
    check_imports(text)
    names = tuple(record["name"] for record in preload_records(preload))
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        script, log = Path(folder) / NAME, Path(folder) / "output.txt"
        script.write_text(text, encoding="utf-8")
        for name, path in (beside or {}).items():
            shutil.copyfile(path, Path(folder) / name)
        command = [python or sys.executable, "-I", "-u", os.path.abspath(alone.__file__)]  # -u: a crash loses no line
        command += [word for path in preload for word in ("--preload", str(Path(path).resolve()))]
        started = time.monotonic()
        with log.open("wb") as target:
            status = _ended([*command, NAME], folder, target.fileno(), timeout)
        seconds = time.monotonic() - started
        output = log.read_text(encoding="utf-8", errors="replace")[-ENOUGH:]
        for name in {folder, str(Path(folder).resolve())}:
            output = output.replace(f"{name}/", "")
    where = "python -I in an empty folder" + ("" if python else f", torch {torch.__version__}")
    if names:
        where += f", after {', '.join(names)}"
    return ScriptRun(status, output, seconds, where, names)


def _ended(command: list[str], folder: str, target: int, timeout: float) -> int | None:
    """Run a command in a session of its own and end all of it when the time is up."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also children that outlive the script
        process.wait()


def check_imports(text: str) -> None:
    """Raise InputError unless every import of the source is torch or the standard library."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"the script is no Python: {error.msg} in line {error.lineno}") from error
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    foreign = sorted(names - {"torch"} - set(sys.stdlib_module_names))
    if foreign:
        raise InputError(f"the script imports {', '.join(foreign)}; a reproducer imports torch alone")
