"""`sdpa-repro guard`: run a script with its attention kept right on a torch that has a known bug."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH
from sdpa_repro.cli.epilog import epilog


@click.command(
    name="guard",
    short_help="Run a script and change the attention calls that would meet a known bug.",
    epilog=epilog(
        {0: "the script's own status, whatever it is"},
        'sdpa-repro guard -- generate.py --prompt "a cat"',
        "sdpa-repro guard --rule result.json -- -m my_server",
    ),
)
@click.argument("words", metavar="-- SCRIPT.py ARGS... | -- -m MODULE ARGS...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--rule",
    type=PATH,
    help="Result of explain --json, or result.json of diagnose, to decide.  [default: the known issues]",
)
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; the script's stdout goes to stderr.")
def command(words: tuple[str, ...], rule: Path | None, preload: tuple[Path, ...], as_json: bool) -> None:
    """Run a script, unchanged, with the guard in it and in its child processes.

    Only the calls of scaled_dot_product_attention that meet a known bug of this torch are changed, exactly: they get
    contiguous key and value, or MATH. The summary goes to stderr.
    """
    from sdpa_repro.environment import software
    from sdpa_repro.guarding.script import run_guarded

    run = run_guarded(words, rule=rule, preload=preload, stdout=sys.stderr.fileno() if as_json else None)
    document = run.document()
    if run.preloaded:
        names = ", ".join(record["name"] for record in run.preloaded)
        output.progress(f"guard: preloaded {output.clean(names)}: bugs may be planted by it")
    for text in document["not_guarded"]:
        output.warn(f"not guarded: {output.clean(text)}")
    for reason, count in document["passed"].items():
        output.warn(f"{count} calls could not be looked at: {output.clean(reason)}")
    output.progress(f"guard: {output.clean(run.sentence)}")
    if as_json:
        output.document("guard", {**document, "environment": software()})
    raise SystemExit(run.status)
