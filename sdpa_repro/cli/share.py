"""`sdpa-repro share`: a dump that can be given to strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog


@click.command(
    name="share",
    short_help="Copy a dump without names and, where the failure allows, real values.",
    epilog=epilog(
        {0: "no captured value is inside", 1: "some are; the first line says which"},
        "sdpa-repro share dumps/L05-self_attn-call5-289x289.pt -o for-upstream.pt",
    ),
)
@click.argument("path", metavar="DUMP", type=PATH, shell_complete=dumps)
@click.option("-o", "target", metavar="FILE", type=PATH, help="[default: DUMP.share.pt]")
@click.option("--keep-names", is_flag=True, help="Keep the names of model and module.")
@click.option("--device", help="Where to run: cpu, cuda, … Default: as for replay.")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the new values.")
@click.option("--force", is_flag=True, help="Replace the file of an earlier run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, target: Path | None, as_json: bool, **options: Any) -> None:
    """Write a copy of DUMP for strangers: origin scrubbed, values seeded where the same failure survives that."""
    from sdpa_repro.dump import load
    from sdpa_repro.publishing.share import share

    load(path)  # of a file that is no dump this error is all that is said
    target = target if target is not None else path.with_name(f"{path.stem}.share.pt")
    result = share(path, target, progress=output.progress, **options)
    if as_json:
        output.document("share", result.document())
        raise SystemExit(result.exit_status)
    output.answer(output.clean(result.sentence))
    output.line()
    output.line("file    " + output.clean(str(result.path)))
    output.line("kept    " + output.clean(f"{', '.join(result.kept) or 'nothing'} of where it came from"))
    if result.replay.preloaded:
        names = ", ".join(record["name"] for record in result.replay.preloaded)
        output.line(output.clean(f"preloaded: {names}"))
    again = [word for file in options["preload"] for word in ("--preload", str(file))]
    output.next_command(output.shell("sdpa-repro", "replay", result.path, *again))
    raise SystemExit(result.exit_status)
