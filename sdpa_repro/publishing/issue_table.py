"""The table of versions in an issue that was written before: found, checked to be about this script, replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files
from sdpa_repro.publishing.issue import PRELOADED_BEFORE
from sdpa_repro.publishing.version_row import Row
from sdpa_repro.publishing.version_table import issue_rows
from sdpa_repro.publishing.versions import markdown, table

_HEAD = re.compile(r"\| torch \|( [A-Za-z_]+ \|)+")
_FENCE = re.compile("(`{3,})")
_PRELOADED = re.compile(r"`+ ?([^`]+?) ?`+ \(sha256 ")
LARGEST = 4 << 20
"""Bytes of an issue; GitHub takes 64 KiB."""


def issue_beside(script: Path, given: Path | None = None) -> Path | None:
    """The issue to update: as given (a file, or the folder that holds it), else the one beside the script."""
    path = given if given is not None else script.with_name(files.ISSUE)
    path = path / files.ISSUE if path.is_dir() else path
    return path if given is not None or path.is_file() else None


def check_issue(path: Path, script: str) -> str:
    """The text of an issue. Raises InputError unless it can be read and holds this very script."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--issue {path}: {getattr(error, 'strerror', None) or 'no text'}; give issue.md") from error
    if len(data) > LARGEST:
        raise InputError(f"--issue {path}: it has more than {LARGEST >> 20} MiB; give issue.md")
    if script.strip() not in text:
        raise InputError(f"--issue {path}: it does not hold this script; give the issue that was written with it")
    if _place(text.split("\n")) is None:
        raise InputError(f"--issue {path}: it has no table of versions and no line 'Expected: …' to put one after")
    return text


def check_preloads(path: Path, text: str, planted: bool) -> None:
    """Raise InputError where the issue was made with files preloaded and the new rows are not, or the reverse.

    text: of the issue at `path`. planted: whether files run before the new rows.
    """
    banner = next((line for line in text.split("\n") if line.startswith("> ") and PRELOADED_BEFORE in line), "")
    if banner and not planted:
        names = " ".join(f"--preload {name}" for name in _PRELOADED.findall(banner)) or "--preload FILE"
        raise InputError(f"--issue {path}: its runs had files preloaded, this table would contradict it; add {names}")
    if planted and not banner:
        raise InputError(
            f"--issue {path}: its runs had nothing preloaded, this table would contradict it; leave --preload out"
        )


def fits(path: Path, script: str, planted: bool) -> bool:
    """Whether the issue holds this script and its runs were made with files preloaded just as the new rows were."""
    try:
        check_preloads(path, check_issue(path, script), planted)
    except InputError:
        return False
    return True


def with_rows(text: str, rows: Sequence[Row]) -> str:
    """The issue with the table of these rows in place of the one it had, or below what was expected."""
    made = markdown(table(None, issue_rows(rows)))
    lines = text.split("\n")
    place = _place(lines)
    if place is None or not made:
        return text
    first, last = place
    new = [made] if last > first else ["", made]
    return "\n".join([*lines[:first], *new, *lines[last:]])


def update_issue(path: Path, script: str, rows: Sequence[Row]) -> None:
    """Write the issue anew with the table of these rows. Raises InputError as `check_issue` does."""
    text = check_issue(path, script)
    files.write(path.parent, path.name, with_rows(text, rows))


def _place(lines: Sequence[str]) -> tuple[int, int] | None:
    """First line of the table and the one after its last; an empty range after `Expected: …` where there is none."""
    fence, expected = "", None
    for index, line in enumerate(lines):
        opening = _FENCE.match(line)
        if fence:
            fence = "" if line == fence else fence
        elif opening:
            fence = opening[1]
        elif _HEAD.fullmatch(line) and lines[index + 1 : index + 2] and lines[index + 1].startswith("|---|"):
            last = index
            while last < len(lines) and lines[last].startswith("|"):
                last += 1
            return index, last
        elif line.startswith("Expected: ") and expected is None:
            expected = index + 1
    return None if expected is None else (expected, expected)
