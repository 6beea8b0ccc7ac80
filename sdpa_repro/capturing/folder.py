"""The folder of dumps and its `index.jsonl`: unique names, whole lines, never a line for a missing file.

Several processes may write into one folder (ranks, workers): each change holds a lock on the folder.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sdpa_repro.errors import InputError

INDEX = "index.jsonl"
STALE_SECONDS = 3600.0

Write = Callable[[Path], int]
"""Writes a dump under the given path and returns its size in bytes; raises InputError (see `dump.save`)."""


def prepare(folder: Path) -> None:
    """Create the folder. Raises InputError when it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _sweep(folder)
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror or error}; choose another --out") from error


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half-written: files under our temporary names that nobody touched for long."""
    for pattern in (".sdpa-repro-*.tmp", f".{INDEX}.*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


def add(
    folder: Path, stem: str, write: Write, line: Mapping[str, Any], *, instead_of: str | None = None
) -> tuple[str, int]:
    """Write a dump as `<stem>.pt` (or `<stem>-2.pt`, …) and add its line to the index.

    `instead_of` names a dump of this folder that goes: its line first, then its file. Returns the new file's
    name and size in bytes. Raises what `write` raises, and InputError when the index cannot be written.
    """
    with _locked(folder):
        path = _free(folder, stem, instead_of)
        size = write(path)
        full = {"file": path.name, **line}
        try:
            if instead_of is None:
                _append(folder / INDEX, full)
            else:
                _rewrite(folder, full, without=instead_of)
        except OSError as error:
            if path.name != instead_of:
                path.unlink(missing_ok=True)
            raise InputError(
                f"cannot write {folder / INDEX}: {error.strerror or error}; choose another --out"
            ) from error
        if instead_of not in (None, path.name):
            (folder / str(instead_of)).unlink(missing_ok=True)
        return path.name, size


def remove(folder: Path, file: str) -> None:
    """Take a dump out of the index, then off the disk."""
    with _locked(folder), suppress(OSError):
        _rewrite(folder, None, without=file)
        (folder / file).unlink(missing_ok=True)


def entries(folder: Path) -> list[dict[str, Any]]:
    """The index, one dict a dump; lines that are no JSON objects or whose file is gone are left out."""
    try:
        lines = (folder / INDEX).read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, OSError, RecursionError):
            entry = json.loads(line)
            file = entry.get("file") if isinstance(entry, dict) else None
            if isinstance(file, str) and Path(file).name == file and (folder / file).is_file():
                found.append(entry)
    return found


def stem_of(module: str, layer: int | None, index: int, rows: int, keys: int, rank: int | None = None) -> str:
    """File name without ending: `L05-self_attn-call12-289x289`, safe on every file system.

    With a rank it ends in `-rank1`, so that ranks share no name even where there are no locks.
    """
    parts = [part for part in module.split(":")[0].removesuffix(".py").split(".") if part and not part.isdigit()]
    leaf = re.sub(r"[^A-Za-z0-9_-]+", "_", parts[-1] if parts else "call").strip("_")[:60]
    first = [f"L{layer:02d}"] if layer is not None else []
    last = [f"rank{rank}"] if rank is not None else []
    return "-".join([*first, leaf or "module", f"call{index}", f"{rows}x{keys}", *last])


def layer_of(module: str) -> int | None:
    """The first part of a module path that is a number."""
    return next((int(part) for part in module.split(".") if part.isascii() and part.isdigit()), None)


def _free(folder: Path, stem: str, instead_of: str | None) -> Path:
    """The first unused name, or that of the dump to replace."""
    path, number = folder / f"{stem}.pt", 2
    while path.exists() and path.name != instead_of:
        path, number = folder / f"{stem}-{number}.pt", number + 1
    return path


def _append(index: Path, entry: Mapping[str, Any]) -> None:
    """One write at the end, so that a line is there as a whole or not at all; a torn line before it is closed."""
    descriptor = os.open(index, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = b"\n" * torn + _line(entry)
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _rewrite(folder: Path, entry: Mapping[str, Any] | None, *, without: str) -> None:
    """The index without one file's line and with a new one if any, under a temporary name first."""
    kept = [each for each in entries(folder) if each["file"] != without]
    fresh = folder / f".{INDEX}.{os.getpid()}"
    fresh.write_bytes(b"".join(_line(each) for each in [*kept, *([entry] if entry else [])]))
    os.replace(fresh, folder / INDEX)


def _line(entry: Mapping[str, Any]) -> bytes:
    plain = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; where there is none (network file systems, Windows) go on without."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # closing is not enough: a child forked meanwhile has the file open, lock included
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
