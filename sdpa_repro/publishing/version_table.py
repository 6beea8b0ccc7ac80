"""Rows of several environments as one table, for a terminal and for an issue, and the sentence about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_repro.publishing.version_row import BAD_WORDS, COLUMNS, Outcome, Row

NAMED = 6
"""Environments that a sentence lists by name."""

SHORT = {"not run": "", "not comparable": "n/c"}


def merged(own: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """The rows of both, without those of `others` that one with the same machine, script and files says again."""
    rows = list(own)
    for row in others:
        same = [one for one in rows if one.machine and one.machine == row.machine and one.planted == row.planted]
        if not same or row.outcome is not same[0].outcome or row.results != same[0].results:
            rows.append(row)
    return rows


def backends(rows: Sequence[Row]) -> list[str]:
    """Backends that took the call, or tried to, in at least one environment."""
    said = {name for row in rows for name, word in row.results.items() if word not in ("declined", "not run")}
    return [name for name in COLUMNS if name in said]


def headers(rows: Sequence[Row]) -> list[str]:
    """Titles of the columns of `cells`."""
    return ["environment", "torch", "where", *backends(rows), "result", "why"]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A row of texts for each environment."""
    names = backends(rows)
    return [
        [
            row.name,
            row.torch,
            row.where,
            *(SHORT.get(word, word) for word in (row.results.get(name, "not run") for name in names)),
            row.outcome.value,
            _why(row, rows),
        ]
        for row in rows
    ]


def untried(row: Row, rows: Sequence[Row]) -> list[str]:
    """Backends that fail in another row and declined the call in this one, which passes without them."""
    guilty = {name for one in rows for name, word in one.results.items() if word in BAD_WORDS and name != "default"}
    return [name for name in COLUMNS if name in guilty and row.results.get(name) == "declined"]


def _why(row: Row, rows: Sequence[Row]) -> str:
    declined = untried(row, rows) if row.outcome is Outcome.PASSES else []
    note = f"{', '.join(declined)} declined the call" if declined else ""
    planted = f"planted: {', '.join(row.planted)}" if row.planted else ""
    return "; ".join(filter(None, (row.reason, note, planted)))


def sentence(rows: Sequence[Row], name: str) -> str:
    """Where it fails, where it passes, and what could not be run."""
    bad = [row for row in rows if row.outcome.bad]
    clean = [row for row in rows if row.outcome is Outcome.PASSES]
    rest = [row for row in rows if not row.outcome.bad and row.outcome is not Outcome.PASSES]
    tried = len(bad) + len(clean)
    if not tried:
        text = f"{name} could be run in none of {_count(len(rows))}"
    elif bad:
        text = f"{name} fails in {len(bad)} of {_count(tried)} ({_named(bad)})"
        text += f", passes in {len(clean)} ({_named(clean)})" if clean else ""
        declined = [name for row in clean for name in untried(row, rows)]
        hollow = sum(bool(untried(row, rows)) for row in clean)
        text += f", in {hollow} of which {', '.join(dict.fromkeys(declined))} declined the call" if hollow else ""
    else:
        text = f"{name} passes in {'all of ' if tried > 1 else ''}{_count(tried)} ({_named(clean)})"
    if rest and tried:
        text += f"; {len(rest)} could not be tried ({_named(rest)})"
    planted = dict.fromkeys(name for row in rows for name in row.planted)
    return f"{text}; planted: {', '.join(planted)}" if planted else text


def _count(number: int) -> str:
    return f"{number} environment{'s' if number != 1 else ''}"


def _named(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(label(row) for row in rows))
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def label(row: Row) -> str:
    """One environment in a few words: the release, and the GPU if it ran on one."""
    if not row.torch:
        return row.name
    on_gpu = "gpu" in row.machine and row.where.startswith(row.machine["gpu"])
    return f"torch {row.torch}" + (f" on {row.machine['gpu']}" if on_gpu else "")


def issue_rows(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """Rows for `versions.table`: those that ran a backend. The text of a machine is raw: the table escapes it."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        if not row.results:
            continue
        words = f"{row.torch} ({row.where})" if row.where else row.torch
        words += f", planted: {', '.join(row.planted)}" if row.planted else ""
        found.append({"torch": words, "results": dict(row.results)})
    return found
