"""Files of an issue: fixed names in one folder, each written whole or not at all, nothing overwritten unasked."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from sdpa_repro.errors import InputError

SCRIPT, ISSUE, TEST, DUMP = "repro.py", "issue.md", "test_repro.py", "call.pt"


def folder_for(path: Path, given: Path | None) -> Path:
    """Where the files go: as given, else a folder beside the dump that is named after it."""
    return given if given is not None else path.with_name(f"{path.stem}.issue")


def check_free(folder: Path, names: Iterable[str], *, force: bool) -> None:
    """Raise InputError when the folder is none, or holds one of the files and `force` is not set."""
    if "\0" in str(folder):
        raise InputError("a folder's name has no null byte: give another one with -o")
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is no folder: give another one with -o")
        check_writable(folder)
        taken = [name for name in names if os.path.lexists(folder / name)]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot use {str(folder)[:200]!r} as a folder: {error}; give another one with -o") from error
    if taken and not force:
        raise InputError(f"{folder} already holds {', '.join(taken)}: give --force to replace, or another folder")


def check_writable(folder: Path) -> None:
    """Raise InputError, before any work, where files cannot go into the folder or it cannot be made."""
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not above.is_dir():
        raise InputError(f"cannot write into {folder}: {above} is no folder; choose another one with -o")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into {folder}: {above} is read-only; choose another one with -o")


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file under its name in the folder, which is created; a link in its place is replaced, not followed."""
    return write_all(folder, {name: content})[name]


def write_all(folder: Path, contents: Mapping[str, str | bytes]) -> dict[str, Path]:
    """Write files that belong together, as `write` does each: where one does not fit on the disk, none is there."""
    written = {name: folder / f".sdpa-repro-{secrets.token_hex(8)}.tmp" for name in contents}
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path = folder / name
            with written[name].open("xb") as file:
                file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
        for name, temporary in written.items():
            path = folder / name
            os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another folder with -o") from error
    finally:
        for temporary in written.values():
            with suppress(OSError):
                temporary.unlink()
    return {name: folder / name for name in contents}
