"""`sdpa-repro issue`: a script and an issue that are ready to post."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog

if TYPE_CHECKING:
    from sdpa_repro.publishing.published import Published


@click.command(
    name="issue",
    short_help="Write a script and an issue for a failing dump, and run the script.",
    epilog=epilog(
        {
            0: "there is nothing to report",
            1: "a backend fails and the script shows it",
            3: "the script does not show it here, or it was wrong live only",
        },
        "sdpa-repro issue dumps/L05-self_attn-call5-289x289.pt -o report",
        "sdpa-repro issue x.pt -o report --force --test      again, with a unit test",
    ),
)
@click.argument("path", metavar="DUMP", type=PATH, shell_complete=dumps)
@click.option("-o", "folder", metavar="DIR", type=PATH, help="Folder.  [default: DUMP.issue]")
@click.option("--no-reduce", "reduced", flag_value=False, default=True, help="Take the call as it is.")
@click.option("--no-explain", "explained", flag_value=False, default=True, help="Leave conditions and lengths out.")
@click.option("--include-values", is_flag=True, help="Captured values may be written into the script, if few.")
@click.option("--test", is_flag=True, help="Also write test_repro.py, a unit test.")
@click.option(
    "--results",
    multiple=True,
    metavar="FILE.json",
    type=PATH,
    help="Results of `versions` for the table of versions tried; repeatable.",
)
@click.option("--template", metavar="FILE", type=PATH, help="Jinja template for another tracker.")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--device", help="Where to run: cpu, cuda, … Default: as for replay.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds to reduce and to explain.")
@click.option("--force", is_flag=True, help="Replace files of an earlier run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, folder: Path | None, as_json: bool, **options: Any) -> None:
    """Reduce and explain the call in DUMP, write repro.py and issue.md, and run repro.py in a fresh process.

    The script imports torch alone. Captured values stay out of it without --include-values.
    """
    from sdpa_repro.dump import load
    from sdpa_repro.publishing.publish import publish

    load(path)  # of a file that is no dump this error is all that is said
    result = publish(path, folder, progress=output.progress, **options)
    if as_json:
        output.document("issue", result.document())
    else:
        _print(result, path, options["preload"])
    raise SystemExit(result.exit_status)


def _print(result: Published, path: Path, preload: tuple[Path, ...]) -> None:
    """The answer, the files, what to do with them."""
    again = [word for file in preload for word in ("--preload", str(file))]
    output.answer(output.clean(result.sentence))
    if result.script is None:
        output.next_command(output.shell("sdpa-repro", "replay", path, *again))
        return
    output.line()
    print_files(result)
    output.next_command(try_script(result.script, again))


def try_script(script: Path, preloads: Sequence[str]) -> str:
    """The command that runs the script; with files preloaded (`--preload FILE …`) where it fails with them alone."""
    if preloads:
        return output.shell("sdpa-repro", "versions", script, *preloads)
    return output.shell("python", "-I", script)


def print_files(result: Published) -> None:
    """The files that were written, the title, and what to mind before posting them."""
    for name, file in (
        ("script", result.script),
        ("issue", result.issue),
        ("test", result.test),
        ("dump", result.dump),
    ):
        if file is not None:
            output.line(f"{name:7} {output.clean(str(file))}")
    output.line(f"title   {output.clean(result.title)}")
    if result.replay.preloaded:
        names = ", ".join(record["name"] for record in result.replay.preloaded)
        output.line(output.clean(f"preloaded: {names}: if that file plants a fault, do not post this"))
    for note in result.notes:
        output.line(output.clean(f"note: {note}"))
    if not result.closed:
        output.line("note: not every tensor has a closed form: the files hold captured values; read before posting")
