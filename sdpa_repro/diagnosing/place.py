"""The folder of one diagnosis: chosen, held by one process at a time, cleaned of what a killed run left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro.capturing import folder as dumps
from sdpa_repro.capturing.script import REPORTS
from sdpa_repro.diagnosing.naming import file_hash
from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files

STATE = ".stages"
RUN, LOCK = "run.json", "lock"
LOG, RESULT, PAGE = "diagnose.log", "result.json", "report.html"
PUBLISHED = (files.SCRIPT, files.ISSUE, files.TEST)
OWN = (*PUBLISHED, files.DUMP, PAGE, RESULT, LOG)
"""Names of files that a diagnosis writes; beside them the dumps and their index."""


@dataclass(frozen=True)
class Run:
    """What is recorded of a folder's latest run: about what, by which command (hashes), and whether it ended."""

    subject: str
    command: str
    finished: bool


def choose(base: Path, name: str, subject: str) -> Path:
    """The folder below `base`: `name`, or `name-2`, … where that holds something else. Writes nothing."""
    number = 1
    while True:
        folder = base / (name if number == 1 else f"{name}-{number}")
        if _usable(folder, subject):
            return folder
        number += 1


def _usable(folder: Path, subject: str) -> bool:
    """Whether the folder is not there, holds nothing yet, or the results about the same subject."""
    if not os.path.lexists(folder):
        return True
    run = read_run(folder)
    if run is not None:
        return run.subject == subject
    try:
        return folder.is_dir() and all(name == STATE for name in os.listdir(folder))
    except OSError:
        return False


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Create the folder and keep other processes out of it for the block; a killed process holds nothing.

    What an earlier, killed run left half-written is removed. Raises InputError when the folder cannot be written to
    and when another process holds it.
    """
    dumps.prepare(folder)
    try:
        (folder / STATE).mkdir(exist_ok=True)
        descriptor = os.open(folder / STATE / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror or error}; choose another --out") from error
    try:
        if not _locked(descriptor):
            raise InputError(f"another diagnosis is at work in {folder}: wait for it, or choose another --out")
        clean(folder)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock; where there are no locks (network file systems, Windows) go on without."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def clean(folder: Path) -> None:
    """Remove files under temporary names and reports of processes that are gone."""
    for place in (folder, folder / STATE):
        for pattern in (".sdpa-repro-*.tmp", f".{dumps.INDEX}.*"):
            for path in place.glob(pattern):
                with suppress(OSError):
                    path.unlink()
    shutil.rmtree(folder / REPORTS, ignore_errors=True)


def start_over(folder: Path) -> list[str]:
    """Remove all results of earlier runs; script and issue stay, under another name, where somebody edited them.

    Returns sentences about what stayed.
    """
    said = []
    written = _written(folder)
    for name in OWN:
        path = folder / name
        if name in PUBLISHED and path.is_file() and written.get(name) not in (None, file_hash(path)):
            kept = _free(path.with_name(f"{path.stem}.edited{path.suffix}"))
            os.replace(path, kept)
            said.append(f"{name} was edited: kept as {kept.name}")
        path.unlink(missing_ok=True)
    clear_dumps(folder)
    for record in (folder / STATE).glob("*.json"):
        if record.name != RUN:
            record.unlink(missing_ok=True)
    return said


def set_aside(folder: Path, needed: Iterable[str | Path] = ()) -> Path | None:
    """Move the results of another command out of the way, to `folder.1`, `folder.2`, …; the folder is gone then.

    A dump of a bug that comes and goes may be the only one there ever is: nothing of it is removed. None, and nothing
    is moved, where the folder holds no file. needed: files of this command. Raises InputError when one of them lies in
    the folder, and when the folder cannot be moved.
    """
    if all(name in (STATE, LOG) for name in os.listdir(folder)):
        return None
    here = folder.resolve()
    for path in needed:
        if Path(path).is_file() and here in Path(path).resolve().parents:
            raise InputError(f"{path} lies among the results of another command: copy it out, or choose another --out")
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise InputError(f"cannot move {folder} to {aside}: {error.strerror or error}; choose another --out") from error
    return aside


def _free(path: Path) -> Path:
    """The path, or with `-2`, … in its name where something is there."""
    number, found = 1, path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def clear_dumps(folder: Path) -> None:
    """Remove the dumps of an earlier capture and their index."""
    for entry in dumps.entries(folder):
        dumps.remove(folder, entry["file"])
    (folder / dumps.INDEX).unlink(missing_ok=True)


def _written(folder: Path) -> dict[str, Any]:
    """The hashes of the files as the program wrote them, from the records of the stages."""
    found: dict[str, Any] = {}
    for record in (folder / STATE).glob("*.json"):
        with suppress(OSError, ValueError, AttributeError):
            found |= json.loads(record.read_bytes()).get("files") or {}
    return found


def read_run(folder: Path) -> Run | None:
    """The latest run of a folder; None where there was none."""
    try:
        told = json.loads((folder / STATE / RUN).read_bytes())
        return Run(str(told["subject"]), str(told["command"]), told["finished"] is True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_run(folder: Path, run: Run) -> None:
    """Record the run. Raises InputError when it cannot be written."""
    told = {"subject": run.subject, "command": run.command, "finished": run.finished}
    files.write(folder / STATE, RUN, json.dumps(told))


def brought(dump: Path, folder: Path) -> Path:
    """The dump inside the folder: a second name of the same file where that works, else a copy.

    Raises InputError when it cannot be written.
    """
    name = "captured.pt" if dump.name in OWN or dump.name.startswith(".") else dump.name
    target = folder / name
    if dump.resolve().parent == folder.resolve():
        return dump
    temporary = folder / f".sdpa-repro-{os.getpid()}.tmp"
    try:
        if target.is_file() and file_hash(target) == file_hash(dump):
            return target
        try:
            os.link(dump.resolve(), temporary)
        except OSError:
            shutil.copyfile(dump, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}; choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
