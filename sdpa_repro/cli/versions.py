"""`sdpa-repro versions`: a script or a dump under other releases of torch and on other machines, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.errors import INTERRUPTED

if TYPE_CHECKING:
    from sdpa_repro.publishing.try_versions import Versions

COLOURS = {"fails": "red", "crashed": "red", "no answer": "red", "passes": "green"}


@click.command(
    name="versions",
    short_help="Run a script or a dump under other releases of torch: one table.",
    epilog=epilog(
        {
            0: "it fails in no environment",
            1: "it fails in some",
            2: "bad usage, nothing could be run, or not in an environment that was asked for",
        },
        "sdpa-repro versions report/repro.py --torch 2.13.0 --torch 2.14.1 --issue report",
        "sdpa-repro versions report/repro.py -o h100.json      on another machine",
        "sdpa-repro versions report/repro.py --results h100.json --issue report",
    ),
)
@click.argument("path", metavar="FILE", type=PATH)
@click.option("--torch", multiple=True, metavar="RELEASE", help="Build an environment with it (kept); repeatable.")
@click.option("--python", multiple=True, metavar="PATH", help="A Python that exists and has torch; repeatable.")
@click.option("--index-url", metavar="URL", help="Where pip or uv takes torch from, for example a CPU index.")
@click.option("--no-here", "with_here", flag_value=False, default=True, help="Leave this environment out.")
@click.option(
    "--results",
    multiple=True,
    metavar="FILE.json",
    type=PATH,
    help="Add what -o wrote on another machine; repeatable.",
)
@click.option("-o", "target", metavar="FILE.json", type=PATH, help="Write the results there.")
@click.option("--issue", metavar="DIR", type=PATH, help="Put the table into DIR/issue.md.")
@click.option(
    "--timeout",
    default=300.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for a script, for each backend of a dump.",
)
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--device", help="Where to replay a dump: cpu, cuda, … Default: as for replay.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, target: Path | None, issue: Path | None, as_json: bool, **options: Any) -> None:
    """Run FILE, a script such as repro.py or a dump, in this environment and in others.

    A script runs with `python -I` in an empty folder. A dump is replayed by this program's own source, for which
    the other Python needs torch and numpy only. What cannot be had is a row that says why.
    """
    from sdpa_repro.publishing.try_versions import Interrupted, versions
    from sdpa_repro.publishing.version_results import check_target

    if target is not None:
        check_target(target)
    found_issue = _issue(path, issue, options)
    try:
        result = versions(path, progress=output.progress, **options)
    except Interrupted as stop:
        if not stop.partial.rows:
            raise
        _tell(stop.partial, target, None, as_json, options)
        raise SystemExit(INTERRUPTED) from None
    _tell(result, target, found_issue, as_json, options)
    raise SystemExit(result.exit_status)


def _issue(path: Path, given: Path | None, options: dict[str, Any]) -> Path | None:
    """The issue to update, checked before anything runs; None when none was named."""
    from sdpa_repro.publishing.issue_table import check_issue, check_preloads, issue_beside
    from sdpa_repro.publishing.version_runs import subject

    if given is None:
        return None
    text = subject(path).text
    if text is None:
        raise click.UsageError("--issue is for a script: an issue shows what the script in it gave")
    found = issue_beside(path, given)
    assert found is not None
    check_preloads(found, check_issue(found, text), _planted(options))
    return found


def _planted(options: dict[str, Any]) -> bool:
    """Whether files run first; where nothing is run, what the results of other runs say."""
    from sdpa_repro.publishing.version_results import read_results

    if options["with_here"] or options["torch"] or options["python"]:
        return bool(options["preload"])
    return any(row.planted for name in options["results"] for row in read_results(name)[1])


def _tell(
    result: Versions, target: Path | None, found_issue: Path | None, as_json: bool, options: dict[str, Any]
) -> None:
    """Write the files that were asked for, and print the answer."""
    from sdpa_repro.publishing.issue_table import update_issue
    from sdpa_repro.publishing.version_results import write_results

    if target is not None:
        write_results(result.document(), target)
    if found_issue is not None:
        update_issue(found_issue, result.subject.text or "", result.rows)
    if as_json:
        output.document("versions", result.document())
        return
    _print(result)
    if target is not None:
        output.line(f"results {output.clean(str(target))}")
    if found_issue is not None:
        output.line(f"issue   {output.clean(str(found_issue))}: its table of versions is this one")
    output.next_command(_next(result, target, found_issue, options))


def _print(result: Versions) -> None:
    """The sentence and the table; preloaded files by name."""
    from sdpa_repro.publishing.version_table import cells, headers

    output.answer(output.clean(result.sentence))
    output.line()
    styles = [COLOURS.get(row.outcome.value) for row in result.rows]
    output.table(headers(result.rows), cells(result.rows), styles=styles)
    if result.preloaded:
        names = ", ".join(record["name"] for record in result.preloaded)
        output.line(output.clean(f"preloaded: {names}: if that file plants a fault, this is no finding about torch"))


def _next(result: Versions, target: Path | None, updated: Path | None, options: dict[str, Any]) -> str:
    """Post it, put it into the issue, or write one."""
    from sdpa_repro.publishing.issue_table import fits, issue_beside

    path = result.subject.path
    if result.subject.text is None:
        again = _repeated("--preload", options["preload"])
        return output.shell("sdpa-repro", "issue" if result.exit_status == 1 else "replay", path, *again)
    if updated is not None:
        return output.shell("cat", updated)
    beside = issue_beside(path)
    if beside is None:
        return output.shell("python", "-I", path)
    if not fits(beside, result.subject.text, any(row.planted for row in result.rows) or bool(options["preload"])):
        return output.shell("cat", beside)
    words: list[object] = ["sdpa-repro", "versions", path, "--issue", path.parent]
    if target is not None:
        return output.shell(*words, "--no-here", "--results", target)
    words += [] if options["with_here"] else ["--no-here"]
    words += ["--index-url", options["index_url"]] if options["index_url"] else []
    for name in ("torch", "python", "results", "preload"):
        words += _repeated(f"--{name}", options[name])
    return output.shell(*words)


def _repeated(option: str, values: Sequence[object]) -> list[object]:
    return [word for value in values for word in (option, value)]
