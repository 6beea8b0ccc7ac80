"""`sdpa-repro diagnose`: capture, replay, explain and publish in one go; and the demo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import capture as capturing
from sdpa_repro.cli import explain as explaining
from sdpa_repro.cli import issue as issuing
from sdpa_repro.cli import output
from sdpa_repro.cli import replay as replaying
from sdpa_repro.cli.model_options import given, model_options
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.explaining.explain import Explanation
    from sdpa_repro.replaying.replay import Replay


@click.command(name="diagnose", short_help="Capture, replay, explain and write the issue in one go.")
@click.argument("words", metavar="[DUMP | -- SCRIPT.py ARGS...]", nargs=-1, type=click.UNPROCESSED)
@model_options
@click.option(
    "--out", "-o", default="dumps", show_default=True, type=click.Path(path_type=Path), help="Folder for dumps."
)
@capturing.selection_options
@click.option("--preload", multiple=True, type=click.Path(path_type=Path), help="Python file to run first; repeatable.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds for explaining and for reducing.")
@click.option("--no-issue", is_flag=True, help="Stop after explaining: write no script and no issue.")
@click.option("--demo", is_flag=True, help="The embedded model with a known bug; succeeds when that is found.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; a script's stdout goes to stderr.")
def command(words: tuple[str, ...], demo: bool, **values: Any) -> None:
    """Find out what is wrong with a model's attention: capture its calls, replay the worst, explain it, and write a
    script and an issue about the smallest call that still fails.

    \b
    sdpa-repro diagnose --model ID --image cat.png --pad 7
    sdpa-repro diagnose -- script.py ARGS
    sdpa-repro diagnose dumps/x.pt

    Exit status: 0 nothing wrong (with --demo: the expected bug was found), 1 a divergence (with --demo: not found),
    2 bad usage or input, 3 wrong live but clean on replay; of a script its own status when that is not 0.
    """
    if demo:
        if words or given(**values) or values["preload"]:
            raise InputError("--demo brings its own model, padding and fault: leave the other options out")
        raise SystemExit(_demo(values))
    dump = Path(words[0]) if len(words) == 1 and words[0].endswith(".pt") else None
    if dump is not None:
        if given(**values):
            raise InputError(f"{dump} is a dump: leave the model options out")
        raise SystemExit(_report(None, dump, values))
    report = capturing.run_capture(words, {**values, "no_prove": True})
    from sdpa_repro.capturing.report import exit_status
    from sdpa_repro.diagnosing import dump_to_replay

    status = exit_status(report)
    dump = dump_to_replay(report)
    if dump is None or status == 130:
        _print_capture(report)
        raise SystemExit(status)
    found = _report(report, dump, values)
    raise SystemExit(status if status not in (0, 1) else found)


def _demo(values: Mapping[str, Any]) -> int:
    """The embedded model, padded and unpadded, with the known bug; 0 when exactly that is found."""
    from sdpa_repro.diagnosing import DEMO_ISSUE, DEMO_PAD, demo_found, demo_plan, dump_to_replay

    plan = demo_plan()
    if not values["as_json"]:
        output.answer(plan.words)
        output.line()
    wanted = {**values, "pad": DEMO_PAD, "device": plan.device, "preload": plan.preload, "no_prove": True}
    report = capturing.run_capture((), wanted, unpadded=True)
    dump = dump_to_replay(report) if report["wrong"] else None
    result: Replay | None = None
    following: list[object] = []
    if dump is None:
        _print_capture(report)
    else:
        explained, following = _finish(report, dump, wanted)
        result = explained.replay
        if plan.preload and following[:1] == ["python"]:  # without the planted fault the script finds nothing
            following = ["cat", Path(str(following[-1])).with_name("issue.md")]
    found = demo_found(result, plan)
    if not values["as_json"]:
        output.line(
            f"demo: {'found' if found else 'NOT FOUND'}: {DEMO_ISSUE}"
            + (", as planted" if plan.preload else ", for real")
            + ("" if found else "; expected FLASH_ATTENTION or EFFICIENT_ATTENTION wrong in query row 288")
        )
        if following:
            output.next_command(output.shell(*following))
    return 0 if found else 1


def _report(report: Mapping[str, Any] | None, dump: Path, values: Mapping[str, Any]) -> int:
    """Replay and explain one dump, print everything; the exit status."""
    result, following = _finish(report, dump, values)
    if not values["as_json"]:
        output.next_command(output.shell(*following))
    return result.replay.exit_status


def _finish(
    report: Mapping[str, Any] | None, dump: Path, values: Mapping[str, Any]
) -> tuple[Explanation, list[object]]:
    """Replay, explain and publish, and print what was found as it is found, the answer first.

    Returns the explanation and the words of the next command.
    """
    from sdpa_repro.explaining.explain import explain
    from sdpa_repro.publishing.publish import publish

    options = {"device": values["device"], "preload": values["preload"], "budget": values["budget"]}
    result = explain(dump, progress=output.progress, **options)
    if not values["as_json"]:
        _print(report, dump, result)
    published = None
    if result.replay.verdict.value == "backend_wrong" and not values["no_issue"]:
        published = publish(dump, force=True, progress=output.progress, **options)
    if values["as_json"]:
        files = published.document() if published else None
        output.document("diagnose", {"capture": report, "dump": str(dump), "issue": files, **result.document()})
        return result, []
    output.line()
    if published is not None and published.script is not None:
        output.line(output.clean(published.sentence))
        issuing.print_files(published)
        return result, ["python", "-I", published.script]
    again: list[object] = [word for path in values["preload"] for word in ("--preload", path)]
    return result, ["sdpa-repro", *explaining.next_words(result, again)]


def _print(report: Mapping[str, Any] | None, dump: Path, result: Explanation) -> None:
    """The answer, then what was captured, replayed and explained."""
    output.answer(output.clean(explaining.answer(result)))
    if report is not None:
        output.line()
        _print_calls(report)
    output.line()
    output.line(f"replay of {output.clean(str(dump))}")
    replaying.print_cells(result.replay)
    if result.backend is not None:
        explaining.print_sections(result)


def _print_capture(report: Mapping[str, Any]) -> None:
    """A capture after which there is nothing to replay."""
    capturing.print_report(dict(report))


def _print_calls(report: Mapping[str, Any]) -> None:
    """What padding did to the next token, and the table of calls."""
    for run in report.get("prefills", ()):
        output.line(output.clean(run))
    rows, colours = capturing.call_rows(dict(report))
    if rows:
        output.table(capturing.HEADERS, rows, styles=colours)
