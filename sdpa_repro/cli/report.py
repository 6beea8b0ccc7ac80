"""`sdpa-repro report`: one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.publishing.report import Reported


@click.command(
    name="report",
    short_help="Write one HTML page about dumps: verdict, pictures, cause, script.",
    epilog=epilog(
        {0: "nothing wrong", 1: "a divergence, or an invalid call, in some dump", 3: "wrong live but clean here"},
        "sdpa-repro report dumps/L05-self_attn-call5-289x289.pt -o report.html",
        "sdpa-repro report dumps/*.pt --no-explain",
    ),
)
@click.argument("paths", metavar="DUMP...", nargs=-1, required=True, type=PATH, shell_complete=dumps)
@click.option(
    "-o",
    "target",
    metavar="FILE",
    default="report.html",
    show_default=True,
    type=PATH,
    help="The page.",
)
@click.option("--no-explain", "explained", flag_value=False, default=True, help="Replay and draw only: fast.")
@click.option("--no-script", "scripted", flag_value=False, default=True, help="Leave the script out.")
@click.option("--png", metavar="FILE", type=PATH, help="Also a picture, of one dump (matplotlib).")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--device", help="Where to run: cpu, cuda, … Default: as for replay.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds to explain and reduce each dump.")
@click.option("--force", is_flag=True, help="Replace FILE even when it is no report of this program.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(paths: tuple[Path, ...], target: Path, png: Path | None, as_json: bool, **options: Any) -> None:
    """Replay and explain each DUMP and write one self-contained HTML page: it opens from disk and needs no network."""
    from sdpa_repro.publishing.report import report

    if png is not None:
        from sdpa_repro.publishing.plots import check_picture

        if len(paths) > 1:
            raise InputError("--png draws one dump: give one, or leave --png out")
        check_picture(png, force=options["force"])
    result = report(paths, target, progress=output.progress, **options)
    if png is not None:
        from sdpa_repro.publishing.plots import write_picture

        write_picture(result.sections[0], png)
    if as_json:
        output.document("report", {**result.document(), "picture": str(png) if png is not None else None})
    else:
        _print(result, png)
    raise SystemExit(result.exit_status)


def _print(result: Reported, png: Path | None) -> None:
    """The answer, the files, how to look at them."""
    output.answer(output.clean(result.sentence))
    output.line()
    output.line(f"page     {output.clean(str(result.output))}")
    if png is not None:
        output.line(f"picture  {output.clean(str(png))}")
    for name, reason in result.unread.items():
        output.line(output.clean(f"not read: {name}: {reason}"))
    planted = list(dict.fromkeys(name for section in result.sections for name in section.preloaded))
    if planted:
        output.line(output.clean(f"preloaded: {', '.join(planted)}: what the page shows may be planted by it"))
    output.next_command(output.shell("python", "-m", "webbrowser", result.output.resolve().as_uri()))
