"""What a diagnosis is called, what it is about, and when two commands are the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa_repro.environment import preload_records, software
from sdpa_repro.errors import InputError
from sdpa_repro.version import VERSION

EMBEDDED = "embedded-model"
LONGEST = 80
HASHED = 64 << 20
"""Bytes up to which a file that a command names is read; of larger ones size and time of change must do."""


def name_of(dump: Path | None, words: Sequence[str], model: str | None) -> str:
    """The folder's name: after the dump, the script or the model; the embedded model without any of them."""
    if dump is not None:
        return _safe(dump.stem)
    if words:
        return _safe(_script_name(words))
    return _safe(model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]) if model else EMBEDDED


def _script_name(words: Sequence[str]) -> str:
    """Of `torchrun … train.py` the script, of `-m package.module` the module, of `-c …` that it is a command."""
    script = next((word for word in words if word.endswith((".py", ".pyw"))), None)
    if script is not None:
        return Path(script).stem
    if words[0] == "-m" and len(words) > 1:
        return words[1]
    return "command" if words[0].startswith("-") else Path(words[0]).name


def _safe(text: str) -> str:
    """A folder's name on every file system; never hidden, never empty."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("._-")[:LONGEST] or "call"


def subject_of(dump: Path | None, words: Sequence[str], model: str | None, *, demo: bool = False) -> str:
    """A hash of what is diagnosed: the dump's bytes, the script, the model. Raises InputError for an unreadable dump.

    Runs about one subject share a folder, those about different ones never do.
    """
    if dump is not None:
        return key_of(["dump", file_hash(dump)])
    if words:
        return key_of(["script", str(Path.cwd()), _script_name(words)])
    return key_of(["demo" if demo else "model", model])


def command_key(words: Sequence[str], values: Mapping[str, Any]) -> str:
    """A hash of everything a command's result may depend on, as far as the command names it.

    words: the script and its arguments. values: the options. Counted besides: the contents of files and folders among
    both, the preloads, this program's version, torch, transformers, the GPU and its driver.
    """
    named = [*words, *(each for value in values.values() for each in (value if _many(value) else [value]))]
    files = {str(name): fingerprint(name) for name in named if isinstance(name, (str, Path)) and name}
    return key_of([list(words), dict(values), files, surroundings(values.get("preload") or ())])


def surroundings(preload: Sequence[str | Path]) -> dict[str, Any]:
    """What surrounds every stage: versions, the GPU, the preloads by hash. Raises InputError for a missing preload."""
    place = {name: value for name, value in software().items() if name != "platform"}
    return {"sdpa_repro": VERSION, "preload": preload_records([Path(path) for path in preload]), **place}


def key_of(value: Any) -> str:
    """The sha256 of plain data; what JSON lacks counts by its text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """The sha256 of a file. Raises InputError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {str(path)[:200]}: {reason}: check the path and its access rights") from error
    return digest.hexdigest()


def fingerprint(name: str | Path) -> Any:
    """What tells whether a file, or the files of a folder, changed; None for what is neither."""
    try:
        path = Path(name)
        if path.is_file():
            found = path.stat()
            small = found.st_size <= HASHED
            return file_hash(path) if small else [found.st_size, found.st_mtime_ns]
        if path.is_dir():
            with os.scandir(path) as listed:
                inside = sorted((each.name, each.stat()) for each in listed if each.is_file())
            return [[name, found.st_size, found.st_mtime_ns] for name, found in inside]
    except (OSError, ValueError):
        pass
    return None


def _many(value: Any) -> bool:
    return isinstance(value, (list, tuple))
