"""One self-contained HTML page for one or several dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files
from sdpa_repro.publishing.html import MARK, plain, render
from sdpa_repro.publishing.section import Section
from sdpa_repro.publishing.view import view
from sdpa_repro.version import VERSION

LOOKED_AT = 1 << 12
"""Bytes of a file in which the mark of a page is looked for."""


def page(sections: Sequence[Section], unread: Mapping[str, str] | None = None) -> str:
    """The page: a section for each dump, and an index on top when there are several.

    unread: file name → why that dump could not be read. No part of the page is fetched from anywhere; text from a
    dump is shown as text. Raises InputError when there is nothing to show.
    """
    if not sections and not unread:
        raise InputError("no dump to show: give one or more .pt files")
    views = [view(one, index) for index, one in enumerate(sections, 1)]
    return render({"title": _title(views), "sections": views, "unread": _unread(unread or {}), "version": VERSION})


def _title(views: Sequence[Mapping[str, Any]]) -> str:
    """For the browser's tab: the answer of the one dump, else their number."""
    if len(views) == 1:
        planted = "PRELOADED: " if views[0]["planted"] else ""
        return f"{planted}{views[0]['verdict']}: {views[0]['file']}"
    wrong = sum(one["status"] == "wrong" for one in views)
    planted = "PRELOADED: " if any(one["planted"] for one in views) else ""
    return f"{planted}{len(views)} attention calls, {wrong} wrong"


def _unread(unread: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"file": plain(name, 120), "reason": plain(reason)} for name, reason in unread.items()]


def check_target(path: Path, *, force: bool) -> None:
    """Raise InputError when `path` is a folder, or a file that is no such page and `force` is not set."""
    if "\0" in str(path):
        raise InputError("a file's name has no null byte: give another one with -o")
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder: give a file, such as -o {path / 'report.html'}")
        files.check_writable(path.parent)
        if not path.exists() or force:
            return
        with path.open("rb") as file:
            ours = MARK.encode("ascii") in file.read(LOOKED_AT)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot use {str(path)[:200]!r}: {reason}; give another file with -o") from error
    if not ours:
        raise InputError(f"{path} exists and is no report of this program: give --force to replace it, or another file")


def write_page(path: Path, text: str) -> Path:
    """Write the page whole or not at all; its folder is created. Raises InputError when that cannot be done."""
    return files.write(path.parent, path.name, text)
