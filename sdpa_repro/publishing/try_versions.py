"""One script or dump in several environments: this one, releases that are built for it, other machines' results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro.environment import preload_records, software
from sdpa_repro.errors import InputError
from sdpa_repro.publishing.environments import Interpreter, built, check_index, check_version, existing, here
from sdpa_repro.publishing.version_results import read_results
from sdpa_repro.publishing.version_row import Outcome, Row, machine_of
from sdpa_repro.publishing.version_runs import Subject, run_in, subject
from sdpa_repro.publishing.version_table import backends, merged, sentence

SECONDS = 300.0
"""For one run of a script, or one backend of a dump."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Versions:
    """What every environment gave: this environment, interpreters, releases that were built, files."""

    subject: Subject
    rows: tuple[Row, ...]
    preloaded: tuple[Mapping[str, str], ...] = ()
    asked: tuple[str, ...] = ()
    """Names of the rows that were asked for one by one: releases, interpreters."""

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        return sentence(self.rows, self.subject.path.name)

    @property
    def exit_status(self) -> int:
        """1 when it fails in some environment, else 2 when it ran in none or not in one that was asked for, else 0."""
        if any(row.outcome.bad for row in self.rows):
            return 1
        if any(row.name in self.asked and row.outcome is not Outcome.PASSES for row in self.rows):
            return 2
        return 0 if any(row.outcome is Outcome.PASSES for row in self.rows) else 2

    def document(self) -> dict[str, Any]:
        """As plain JSON types; `version_results` reads it back on another machine."""
        return {
            "sentence": self.sentence,
            "subject": self.subject.document(),
            "backends": backends(self.rows),
            "rows": [row.document() for row in self.rows],
            "preloaded": [dict(record) for record in self.preloaded],
            "environment": machine_of(software()),
        }


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: `partial` holds the environments that were done."""

    def __init__(self, partial: Versions) -> None:
        super().__init__()
        self.partial = partial


def versions(
    path: str | Path,
    *,
    torch: Sequence[str] = (),
    python: Sequence[str | Path] = (),
    index_url: str | None = None,
    with_here: bool = True,
    results: Sequence[str | Path] = (),
    preload: Sequence[str | Path] = (),
    timeout: float = SECONDS,
    device: str | None = None,
    progress: Progress | None = None,
) -> Versions:
    """Run a script or a dump in this environment and in others, and merge results of other machines.

    torch: releases, each built in an isolated environment that is kept; one that cannot be had is a row that says
    why. python: interpreters that exist. results: files of other runs of the same file. timeout: seconds for a
    script, for each backend of a dump. device: where a dump is replayed.
    Raises InputError for bad input of any kind before anything runs, `Interrupted` on Ctrl-C.
    """
    say = progress or (lambda text: None)
    what = subject(path)
    _check(torch, index_url, what, device, with_here or bool(torch or python or results))
    records = tuple(preload_records(preload))
    others = _from_files(results, what)
    existing_ones = [existing(given) for given in python]
    done: list[Row] = []
    try:
        for interpreter in _interpreters(torch, existing_ones, index_url, with_here, say):
            if interpreter.python is not None:
                say(f"{interpreter.name}: running {what.path.name}")
            row = run_in(interpreter, what, preload=preload, timeout=timeout, device=device)
            done.append(row)
            say(f"{row.name}: {row.outcome.value}" + (f" ({row.reason})" if row.reason else ""))
    except KeyboardInterrupt:
        raise Interrupted(Versions(what, tuple(merged(done, others)), records)) from None
    return Versions(what, tuple(merged(done, others)), records, _asked(torch, existing_ones))


def _asked(torch: Sequence[str], existing_ones: Sequence[Interpreter]) -> tuple[str, ...]:
    return (*(f"torch {version}" for version in torch), *(one.name for one in existing_ones))


def _check(torch: Sequence[str], index_url: str | None, what: Subject, device: str | None, anything: bool) -> None:
    """Raise InputError for what is wrong with the request."""
    for version in torch:
        check_version(version)
    check_index(index_url)
    if device is not None and what.text is not None:
        raise InputError("--device is for a dump: a script says itself where it runs")
    if not anything:
        raise InputError("nothing to do: leave --no-here out, or give --torch, --python or --results")


def _from_files(results: Sequence[str | Path], what: Subject) -> list[Row]:
    """The rows of other machines; results of another file would say nothing about this one."""
    rows = []
    for path in results:
        digest, found = read_results(path)
        if digest != what.sha256:
            raise InputError(
                f"{Path(path).name} holds results of another file than {what.path.name}: run this very file there"
            )
        rows += found
    return rows


def _interpreters(
    torch: Sequence[str], existing_ones: Sequence[Interpreter], index_url: str | None, with_here: bool, say: Progress
) -> Iterator[Interpreter]:
    """One after the other, those that exist first; each is built only when the one before was run."""
    if with_here:
        yield here()
    yield from existing_ones
    for version in dict.fromkeys(torch):
        yield built(version, index_url=index_url, progress=say)
