"""Why an environment could not be built, in one line, from what pip, venv or uv printed."""

from __future__ import annotations

import re

from sdpa_repro.publishing.escaping import one_line

_FULL = re.compile(r"No space left on device|Errno 28|Disk quota exceeded|Errno 122|os error (?:28|122)\b", re.I)
_OFFLINE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|name resolution|Name or service not known|"
    r"Network is unreachable|Connection refused|ConnectTimeout|Read ?timed out|timed out|ProxyError|SSLError|"
    r"dns error|error sending request|connection error|No address associated",
    re.I,
)
_LAST_TRY = re.compile(r"Retry\(total=0\b")
"""pip gave up on an index; releases that it lists all the same lie in a folder here."""

_NO_VERSION = re.compile(
    r"No matching distribution found for torch|Could not find a version that satisfies the requirement torch|"
    r"there (?:is|are) no versions? of torch|no wheels? with a matching|No solution found.*torch",
    re.I,
)
_NO_VENV = re.compile(r"ensurepip is not available|No module named '?(?:venv|ensurepip|pip)'?", re.I)
_FOUND = re.compile(r"from versions: ([^)]*)\)")
_CONSTRAINT = re.compile(r"The user requested \(constraint\) (.+)")
NEAREST = 4
"""Releases that are named where the one that was asked for does not exist."""


def failure(output: str, version: str, python: str, folder: str) -> str:
    """One line that says why torch `version` is not to be had for this Python, and what may help.

    output: of the command that failed. python: as "3.11". folder: where environments are kept, for a full disk.
    """
    if _FULL.search(output):
        return f"the disk is full: an environment takes 1 to 8 GB in {folder}"
    constraint = _CONSTRAINT.search(output)
    allowed = f"pip's configuration here allows ({one_line(constraint[1], 60)})" if constraint else ""
    if constraint and _LAST_TRY.search(output):  # pip blames the constraint, whatever it says, when it found nothing
        return f"the package index was not reached, and no torch {version} is at hand that {allowed}"
    if constraint:
        return f"no torch {version} that {allowed}"
    found = [name.strip() for match in _FOUND.findall(output) for name in match.split(",")]
    known = [name for name in found if name and name != "none"]
    if _OFFLINE.search(output) and (not known or _LAST_TRY.search(output)):
        return "the package index was not reached: no network, or one that needs --index-url or a proxy"
    if _NO_VERSION.search(output):
        listed = f"; the index has {', '.join(_near(known, version))}" if known else ""
        return f"no torch {version} for Python {python} on this platform{listed}"
    if _NO_VENV.search(output):
        return "venv cannot be used with this Python: install python3-venv, or uv"
    return _last(output) or "the command that builds it failed without a word"


def _near(known: list[str], version: str) -> list[str]:
    """The releases nearest to the one asked for, oldest first."""
    wanted = _numbers(version)
    later = [name for name in known if _numbers(name) >= wanted]
    earlier = [name for name in known if _numbers(name) < wanted]
    close = sorted(earlier, key=_numbers)[-NEAREST // 2 :] + sorted(later, key=_numbers)[: NEAREST // 2]
    return [one_line(name, 30) for name in close]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version.partition("+")[0])[:4])


def _last(output: str) -> str:
    """The last line that begins with an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?:ERROR|error)\b", line)]
    return one_line((errors or lines or [""])[-1])
