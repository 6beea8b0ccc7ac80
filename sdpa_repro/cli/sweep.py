"""`sdpa-repro sweep`: a dump's call at many lengths, head_dims, dtypes and layouts, on one or many GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.explaining.grid import Grid, Row

LONGEST = 1_000_000
"""No attention call is longer; more digits than that are a slip."""

REASONS = 5
"""Most reasons listed for cells that could not be tested."""

HEADERS = ("backend", "dtype", "head_dim", "layout", "fails", "passes", "fails when", "worst", "not tested")


@click.command(
    name="sweep",
    short_help="Try a dump's call at many lengths, head_dims, dtypes and layouts.",
    epilog=epilog(
        {0: "no cell fails", 1: "a cell fails", 2: "bad usage or input, or nothing could be tested"},
        "sdpa-repro sweep x.pt",
        "sdpa-repro sweep x.pt --lengths 1:300 --head-dim 64,128,256 --layout as-dumped,dense",
        "torchrun --nproc-per-node 8 -m sdpa_repro sweep x.pt --lengths 1:8192",
    ),
)
@click.argument("path", metavar="DUMP", type=PATH, shell_complete=dumps)
@click.option("--lengths", metavar="LIST", help="Such as 1:300 or 64,65,289.  [default: around the dumped length]")
@click.option(
    "--vary",
    type=click.Choice(["both", "L", "S"]),
    default="both",
    show_default=True,
    help="What the lengths are: query rows and keys together (S - L stays), or one of them alone.",
)
@click.option("--head-dim", "head_dims", metavar="LIST", help="Such as 64,128,256.  [default: as dumped]")
@click.option("--dtype", "dtypes", metavar="LIST", help="captured, bfloat16, float16, float32.  [default: captured]")
@click.option(
    "--layout",
    "layouts",
    metavar="LIST",
    help="as-dumped, dense, dense-query, dense-key-value, one-head.  [default: as-dumped]",
)
@click.option("--backend", "backends", metavar="LIST", help="Backends, or all.  [default: the one that ran]")
@click.option("--device", help="Where to run: cpu, cuda, … Default: as for replay; under torchrun a GPU each rank.")
@click.option(
    "--timeout", default=30.0, show_default=True, type=click.FloatRange(min=0, min_open=True), help="Seconds."
)
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds; what is known then is printed.")
@click.option("--in-process", is_flag=True, help="Faster for short calls, but a crash ends the sweep.")
@click.option("--seed", default=0, show_default=True, type=int, help="For the values that are added.")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, as_json: bool, **options: Any) -> None:
    """Try the call in DUMP at every length in every combination, each cell against the reference.

    Ctrl-C prints what is known by then.
    """
    from sdpa_repro import ranks
    from sdpa_repro.explaining.grid import sweep
    from sdpa_repro.explaining.length_result import KEYS, ROWS, TOGETHER

    if options["device"] is None:
        ranks.keep_to_one_gpu()
    found = sweep(
        path,
        lengths=numbers("--lengths", options["lengths"]),
        vary={"both": TOGETHER, "L": ROWS, "S": KEYS}[options["vary"]],
        head_dims=numbers("--head-dim", options["head_dims"]),
        dtypes=words(options["dtypes"]),
        layouts=words(options["layouts"]),
        backends=words(options["backends"]),
        device=options["device"],
        timeout=options["timeout"],
        budget=options["budget"],
        seed=options["seed"],
        preload=options["preload"],
        apart=not options["in_process"],
        progress=output.progress if ranks.is_first() else None,
    )
    if ranks.is_first():
        said = hint(found)
        if as_json:
            output.document("sweep", {**found.document(), "hint": said})
        else:
            print_grid(found, options["preload"], said)
    raise SystemExit(found.exit_status if ranks.is_first() else 0)


def words(text: str | None) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def numbers(option: str, text: str | None) -> tuple[int, ...]:
    """The numbers of a list such as "1:300" or "64,65,280:300", in order. Raises InputError for anything else."""
    return tuple(sorted({number for part in words(text) for number in _span(option, part)}))


def _span(option: str, part: str) -> Iterator[int]:
    first, colon, last = part.partition(":")
    ends = (first, last if colon else first)
    if not all(end.isascii() and end.isdigit() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]) <= LONGEST:
        raise InputError(f"{option} {part!r}: give numbers from 1 on and ranges, smallest first, such as 64,65,280:300")
    yield from range(int(ends[0]), int(ends[1]) + 1)


def hint(found: Grid) -> str:
    """What the dump itself says where no cell fails although its call was wrong live; else "".

    The status stays that of the cells: their lengths, and with those most values, are not the captured ones.
    """
    from sdpa_repro.dump import load
    from sdpa_repro.replaying.conclusion import Live

    if found.failing:
        return ""
    dump = load(found.path)
    if not Live.of(dump.live, dump.context, dump.origin).wrong:
        return ""
    loaded = {record["sha256"] for record in found.preloaded}
    planted = ", ".join(record["name"] for record in dump.preloaded if record["sha256"] not in loaded)
    if planted:
        return f"the dumped call was wrong live with {planted} preloaded: add --preload to see it again"
    return "the dumped call was wrong live, and no length tried here is"


def print_grid(found: Grid, preload: tuple[Path, ...], said: str = "") -> None:
    """The answer, the hint, a row for each form of the call, what a reader must know, the next command."""
    from sdpa_repro.visibility import ranges, ranges_text

    output.answer(output.clean(found.sentence))
    if said:
        output.line(output.clean(said))
    output.line()
    styles = ["red" if row.fails else "green" if row.passes else None for row in found.rows]
    output.table(HEADERS, [_row(row) for row in found.rows], styles=styles)
    output.line()
    untested = sum((Counter(row.untested) for row in found.rows), Counter())
    for reason, count in untested.most_common(REASONS):
        output.line(output.clean(f"not tested, {count}: {reason}"))
    tied = {"L": f"L at S = {found.axis.keys}", "S": f"S at L = {found.axis.rows}"}
    varied = tied.get(found.axis.vary, f"L, with S = L{found.axis.keys - found.axis.rows:+d}")
    output.line(f"lengths: {varied.removesuffix('+0')} in {ranges_text(ranges(found.lengths))}")
    output.line(f"device: {found.device}; torch {found.environment.get('torch')}; ranks: {found.ranks}")
    again: list[object] = [word for file in preload for word in ("--preload", file)]
    elsewhere = ["replay", found.path, *again] if said else ["show", found.path]
    verb = ["explain", found.path, *again] if found.failing else elsewhere
    output.next_command(output.shell("sdpa-repro", *verb))


def _row(row: Row) -> list[str]:
    worst = row.worst
    return [
        row.kind.backend.value,
        row.kind.dtype,
        str(row.kind.head_dim),
        row.kind.layout,
        str(len(row.fails)),
        str(len(row.passes)),
        row.where,
        "" if worst is None else f"{worst.ratio:.3g} x at {worst.number}" if worst.ratio else worst.status,
        str(sum(row.untested.values()) or ""),
    ]
