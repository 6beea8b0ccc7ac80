"""The second field of PyTorch's form, and the table of what each version and backend gave."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_repro.environment import software, without_home
from sdpa_repro.publishing.escaping import prose
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.publishing.story import BACKENDS

SECONDS = 90
_RESULT = re.compile(rf"^({'|'.join(BACKENDS)}) +(\S.*)$", re.MULTILINE)

_DEAD = ("declined: CUDA error", "declined: HIP error")
"""What a script says where the kernel ran and the process can compute nothing after it."""


def collect_env(timeout: float = SECONDS) -> str:
    """What `python -m torch.utils.collect_env` prints, home folder as `~`; plain versions when it cannot run."""
    command = [sys.executable, "-I", "-m", "torch.utils.collect_env"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return plain_versions()
    text = done.stdout.strip()
    if done.returncode or "PyTorch version" not in text:
        return plain_versions()
    return without_home(text)


def plain_versions() -> str:
    """Versions of Python, torch, CUDA and the GPU, one a line."""
    return "\n".join(f"{name}: {value}" for name, value in software().items() if value is not None)


def results_in(output: str) -> dict[str, str]:
    """What a script's run says of each backend: "ok", "wrong", "declined", "error", "crashed" or "no answer"."""
    found = {}
    for match in _RESULT.finditer(output):
        words = match[2]
        if words.startswith(_DEAD):
            found[match[1]] = "crashed"
        elif words.startswith("declined"):
            found[match[1]] = "declined"
        elif words.startswith("raised"):
            found[match[1]] = "error"
        elif words.startswith("timed out"):
            found[match[1]] = "no answer"
        elif words.startswith(("died with", "returned non-zero")):
            found[match[1]] = "crashed"
        else:
            found[match[1]] = "wrong" if "wrong in query rows" in words else "ok"
    return found


def table(run: ScriptRun | None, versions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `torch` (Markdown) and `results` (backend to word): those given, else the run that was made here."""
    rows = [
        {"torch": _cell(row.get("torch", "?")), "results": {str(k): str(v) for k, v in row["results"].items()}}
        for row in versions
        if isinstance(row.get("results"), Mapping)
    ]
    if not rows and run is not None:
        here = re.match(r"torch (\S+) on (\w+)", run.output)
        found = results_in(run.output)
        if found:
            rows.append({"torch": f"{here[1]} ({here[2]})" if here else "here", "results": found})
    return rows


def _cell(text: object) -> str:
    """A machine's words as Markdown. What would begin a list at the start of a line, such as `2.`, begins none here."""
    return prose(f"torch {text}", 120).removeprefix("torch ")


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Backends that at least one version ran."""
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    return [name for name in names if any(row["results"].get(name, "declined") != "declined" for row in rows)]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `table` as a Markdown table; "" without rows or without a backend that ran."""
    names = columns(rows)
    if not names:
        return ""
    lines = [f"| torch | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    lines += [
        f"| {row['torch']} | {' | '.join(row['results'].get(name, 'not run') for name in names)} |" for row in rows
    ]
    return "\n".join(lines)
