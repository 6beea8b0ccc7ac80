"""Results of `versions` as a file that travels between machines: written, and read with distrust."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa_repro.errors import InputError
from sdpa_repro.publishing import files
from sdpa_repro.publishing.escaping import one_line
from sdpa_repro.publishing.version_row import COLUMNS, MACHINE, WORDS, Outcome, Row
from sdpa_repro.version import VERSION

SCHEMA, SCHEMA_VERSION = "versions", 1
LARGEST = 1 << 20
"""Bytes of a file of results; a row takes less than a thousand."""

MOST_ROWS = 500
LONGEST = 200


class _Bad(ValueError):  # noqa: N818 (what is wrong, not whose fault)
    """What is wrong with the file's content."""


def head() -> dict[str, Any]:
    """The keys that every such document begins with."""
    return {"schema": {"name": SCHEMA, "version": SCHEMA_VERSION}, "sdpa_repro": VERSION}


def write_results(document: Mapping[str, Any], path: Path) -> None:
    """Write a document of `Versions.document` to a file, whole or not at all."""
    text = json.dumps({**head(), **document}, indent=1, allow_nan=False)
    files.write(path.parent, path.name, text + "\n")


def check_target(path: Path, *, force: bool = False) -> None:
    """Raise InputError where a file of results cannot go, before any work is done for it."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give a file with -o")
    files.check_writable(path.parent)
    if path.exists() and not force and not _is_results(path):
        raise InputError(f"{path} exists and holds no results of versions: give another file with -o")


def read_results(path: str | Path) -> tuple[str, list[Row]]:
    """The sha256 of what was run and the rows of a file; a row's name says which file it came from.

    Raises InputError, in one line, for a file that cannot be read or holds anything else. Unknown keys are ignored.
    """
    path = Path(path)
    try:
        return _content(_parsed(path), path.name)
    except _Bad as bad:
        raise InputError(
            f"{path} holds no results: {bad}; make such a file with sdpa-repro versions FILE -o results.json"
        ) from bad


def _is_results(path: Path) -> bool:
    try:
        read_results(path)
    except InputError:
        return False
    return True


def _parsed(path: Path) -> Any:
    """The JSON of a file of ordinary size."""
    try:
        if not path.is_file():
            raise InputError(f"--results {path}: no such file; make one with sdpa-repro versions FILE -o results.json")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"--results {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > LARGEST:
        raise _Bad(f"it has more than {LARGEST >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except _Bad:
        raise
    except (ValueError, RecursionError) as error:
        raise _Bad(f"it is no JSON ({one_line(error, 80)})") from error


def _no_constant(name: str) -> Any:
    raise _Bad(f"{name} is no JSON")


def _content(found: Any, name: str) -> tuple[str, list[Row]]:
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, dict) or schema.get("name") != SCHEMA:
        raise _Bad(f"its schema is not {SCHEMA!r}")
    if type(schema.get("version")) is not int or schema["version"] > SCHEMA_VERSION:
        raise _Bad(f"its schema has version {one_line(schema.get('version'), 20)}, this program reads {SCHEMA_VERSION}")
    subject, rows = found.get("subject"), found.get("rows")
    digest = subject.get("sha256") if isinstance(subject, dict) else None
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise _Bad("it does not say what was run (subject.sha256)")
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        raise _Bad(f"its rows are no list of at most {MOST_ROWS}")
    return digest, [_row(row, name) for row in rows]


def _row(found: Any, file: str) -> Row:
    if not isinstance(found, dict):
        raise _Bad("a row is no object")
    outcome = found.get("outcome")
    if not isinstance(outcome, str) or outcome not in [one.value for one in Outcome]:
        raise _Bad(f"a row's outcome is {one_line(outcome, 30)!r}")
    results, machine = found.get("results"), found.get("machine")
    if not isinstance(results, dict) or not isinstance(machine, dict):
        raise _Bad("a row lacks results or machine")
    for backend, word in results.items():
        if backend not in COLUMNS or word not in WORDS:
            raise _Bad(f"a row says {one_line(word, 30)!r} of {one_line(backend, 30)!r}")
    name = _text(found.get("name"))
    return Row(
        name=one_line(file if name in ("", "here") else f"{file}: {name}"),
        outcome=Outcome(outcome),
        results=dict(results),
        machine={key: _text(machine[key]) for key in MACHINE if isinstance(machine.get(key), str)},
        reason=_text(found.get("reason")),
        seconds=_seconds(found.get("seconds")),
        planted=tuple(_text(name) for name in _list(found.get("planted")) if _text(name)),
    )


def _text(value: Any) -> str:
    return one_line(value, LONGEST) if isinstance(value, str) else ""


def _seconds(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and 0 <= value < 1e9 else None


def _list(value: Any) -> Sequence[Any]:
    return value[:20] if isinstance(value, list) else ()
