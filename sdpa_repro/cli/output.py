"""What the command line prints: the answer, tables, the next command; one JSON document; notes on stderr.

The answer and the tables go to stdout, progress and warnings to stderr. Colour appears only on a terminal
and never with NO_COLOR set. A table is drawn by rich on a terminal and as aligned text everywhere else, so
that nothing is cut from what is piped into a file.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from sdpa_repro.version import VERSION

PROGRAM = "sdpa-repro"
SCHEMA_VERSION = 1
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_GAP = "  "
_QUIET = f"{__name__}.quiet"


def be_quiet(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Callback of `--quiet`: from now on only answers, documents, warnings and errors are printed."""
    if value:
        context.meta[_QUIET] = True


def quiet() -> bool:
    """Whether `--quiet` was given. Only the thread that runs the verb knows: ask there, before starting others."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def answer(text: str) -> None:
    """Print the first line on stdout: the answer, which `--quiet` leaves."""
    click.echo(click.style(text, bold=True) if _colour(sys.stdout) else text)


def preloaded(records: Sequence[Mapping[str, str]]) -> str:
    """What follows an answer where files were preloaded, so that no planted fault passes for a real one; else ""."""
    names = ", ".join(record["name"] for record in records)
    return f" (preloaded: {names})" if names else ""


def line(text: str = "") -> None:
    """Print one line on stdout, unless `--quiet` was given."""
    if not quiet():
        click.echo(text)


def next_command(command: str) -> None:
    """Print the last line on stdout: the command to run next, ready to paste.

    `sdpa-repro` or `python` at its beginning is written the way it can be started here (see `program`, `python`).
    """
    name, space, rest = command.partition(" ")
    start = {PROGRAM: program, "python": python}.get(name)
    line(f"next: {start() if start else name}{space}{rest}")


def program() -> str:
    """How to start this program from this shell: `sdpa-repro` when it is on PATH, else the way that works."""
    beside = Path(sys.executable).parent / PROGRAM
    found = shutil.which(PROGRAM)
    if found and Path(found).resolve() == beside.resolve():
        return PROGRAM
    return _started(beside) if beside.exists() else f"{_started(Path(sys.executable))} -m sdpa_repro"


def python() -> str:
    """How to start the Python that runs this, which has torch: `python` when that is the one on PATH, else its path."""
    found = shutil.which("python")
    here = Path(sys.executable)
    return "python" if found and Path(found).parent == here.parent else _started(here)


def _started(path: Path) -> str:
    """A program's path for a shell, from the current folder where it lies in there."""
    try:
        path = path.relative_to(Path.cwd())
    except ValueError:
        return shell(path)
    return shell(path if len(path.parts) > 1 else f"./{path}")


def progress(text: str) -> None:
    """Tell on stderr what is going on, unless `--quiet` was given."""
    if not quiet():
        _note(text)


def warn(text: str) -> None:
    """Tell on stderr what may be wrong with what is printed."""
    label = click.style("warning:", fg="yellow") if _colour(sys.stderr) else "warning:"
    _note(f"{label} {text}")


def _note(text: str) -> None:
    """A line on stderr. A full disk behind it stops no work; a reader that went away (`2>&1 | head`) does."""
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def document(schema: str, body: Mapping[str, Any]) -> None:
    """Print the one JSON document of a `--json` run on stdout.

    Numbers that JSON lacks (NaN, infinities) become the strings "nan", "inf" and "-inf".
    """
    click.echo(document_text(schema, body))


def document_text(schema: str, body: Mapping[str, Any]) -> str:
    """The document that `document` prints."""
    head = {"schema": {"name": schema, "version": SCHEMA_VERSION}, "sdpa_repro": VERSION}
    return json.dumps({**head, **_plain(body)}, indent=1, allow_nan=False)


_RICH_GAP, _RICH_EDGES = 3, 2
"""Columns between two cells of a table on a terminal, and at its sides, at most."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str | None] | None = None) -> None:
    """Print a table on stdout; `styles` gives a colour per row (for example "red"), used on a terminal only.

    With `--quiet` nothing is printed.
    """
    if quiet():
        return
    cells = [[clean(str(cell)) for cell in row] for row in rows]
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else None
    if width is not None and sum(_words(headers, cells)) > _room(headers, width):
        for text in _listed(headers, cells, width):
            line(text)
        return
    if width is not None and _colour(sys.stdout) and _rich_table(headers, cells, styles, width):
        return
    for text in aligned(headers, cells, width):
        line(text)


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The table as lines of aligned text; numbers to the right.

    With a `width` the widest columns wrap until a line fits; without one (output into a file) nothing does.
    """
    columns = range(len(headers))
    filled = [[row[column] if column < len(row) else "" for column in columns] for row in rows]
    sizes = _sizes(headers, filled)
    if width is not None:
        sizes = _shrunk(sizes, _words(headers, filled), width - len(_GAP) * (len(sizes) - 1))
    right = [bool(filled) and all(_is_number(row[column]) for row in filled) for column in columns]
    lines = _text_row(headers, sizes, right)
    lines.append(_GAP.join("-" * size for size in sizes))
    for row in filled:
        lines.extend(_text_row(row, sizes, right))
    return lines


def shell(*words: object) -> str:
    """The words as a POSIX shell command line, quoted so that it can be pasted; a path is never taken for an option."""
    texts = [f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words]
    return " ".join(map(shlex.quote, texts))


def clean(text: str) -> str:
    """Text from a dump or a model as one harmless line: no escape sequences or control characters.

    Also dropped: marks that reorder or hide text on screen (Unicode category C). Spaces are kept as one.
    """
    text = re.sub(r"\s+", " ", _CONTROL.sub("", text))
    return "".join(letter for letter in text if unicodedata.category(letter)[0] != "C").strip()


def _colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that wants colour (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _listed(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The rows of a table that is too wide even with a word a line: each as "header cell" by "header cell"."""
    lines = []
    for row in rows:
        pairs = [f"{name} {cell}".strip() for name, cell in zip(headers, row, strict=False) if cell]
        text = pairs[0] if pairs else ""
        for pair in pairs[1:]:
            if _cells(text) + len(_GAP) + _cells(pair) > width:
                lines.append(text)
                text = _GAP + pair
            else:
                text += _GAP + pair
        lines.append(text)
    return lines


def _rich_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str | None] | None, width: int
) -> bool:
    """Draw with rich; False where it is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    sizes = _shrunk(_sizes(headers, rows), _words(headers, rows), _room(headers, width))
    for column, name in enumerate(headers):
        numbers = bool(rows) and all(_is_number(row[column]) for row in rows if column < len(row))
        drawn.add_column(Text(name), width=sizes[column], justify="right" if numbers else "left", overflow="fold")
    for index, row in enumerate(rows):
        style = styles[index] if styles is not None and index < len(styles) else None
        drawn.add_row(*(Text(cell) for cell in row), style=style)
    Console(highlight=False).print(drawn)
    return True


def _room(headers: Sequence[str], width: int) -> int:
    """What a terminal of `width` columns leaves for the cells of a row."""
    return width - _RICH_GAP * (len(headers) - 1) - _RICH_EDGES


def _shrunk(sizes: list[int], least: list[int], room: int) -> list[int]:
    """Column widths that add up to `room`: the widest gives first, below its longest word (down to 8) only in need."""
    sizes = list(sizes)
    while sum(sizes) > room:
        spare = [column for column, size in enumerate(sizes) if size > least[column]]
        spare = spare or [column for column, size in enumerate(sizes) if size > 8]
        if not spare:
            break
        sizes[max(spare, key=lambda column: sizes[column])] -= 1
    return sizes


def _sizes(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The widest cell of each column."""
    return [max(map(_cells, column)) for column in _columns(headers, rows)]


def _words(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The longest word of each column."""
    return [max(_cells(word) for cell in column for word in cell.split(" ")) for column in _columns(headers, rows)]


def _columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[name, *(row[at] for row in rows if at < len(row))] for at, name in enumerate(headers)]


def _text_row(cells: Sequence[str], sizes: Sequence[int], right: Sequence[bool]) -> list[str]:
    """One row as one or more lines, each cell wrapped to its column's width."""
    wrapped = [_wrapped(cell, size) for cell, size in zip(cells, sizes, strict=True)]
    lines = []
    for index in range(max((len(parts) for parts in wrapped), default=0)):
        texts = [
            _padded(parts[index] if index < len(parts) else "", size, to_right)
            for parts, size, to_right in zip(wrapped, sizes, right, strict=True)
        ]
        lines.append(_GAP.join(texts).rstrip())
    return lines


def _wrapped(text: str, size: int) -> list[str]:
    """Break at spaces where there are any, inside a word that is longer than the column otherwise."""
    parts = [""]
    for word in text.split(" "):
        joined = f"{parts[-1]} {word}" if parts[-1] else word
        if _cells(joined) <= size:
            parts[-1] = joined
            continue
        if parts[-1]:
            parts.append("")
        for letter in word:
            if _cells(parts[-1] + letter) > size and parts[-1]:
                parts.append("")
            parts[-1] += letter
    return parts


def _padded(text: str, size: int, to_right: bool) -> str:
    blank = " " * max(0, size - _cells(text))
    return blank + text if to_right else text + blank


def _cells(text: str) -> int:
    """Columns that the text takes on a terminal: two for wide letters, none for combining marks."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _is_number(text: str) -> bool:
    """Whether a cell holds a number (or nothing), so that its column is set to the right."""
    text = text.strip().removesuffix("×").removesuffix("%").removesuffix("s").strip()
    if text in ("", "-", "–", "—"):
        return True
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def _plain(value: Any) -> Any:
    """What `json.dumps` takes: tuples as lists, non-finite numbers and unknown objects as strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
