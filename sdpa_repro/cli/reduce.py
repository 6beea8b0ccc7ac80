"""`sdpa-repro reduce`: the smallest call that still fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog

if TYPE_CHECKING:
    from sdpa_repro.reducing.dump_reducer import ReducedDump
    from sdpa_repro.reducing.reduction import Reduction

BUDGET = 300.0
NEEDED = {True: "yes", False: "no", None: ""}
HEADERS = ("", "from", "to", "needed", "nearest passing neighbour")


@click.command(
    name="reduce",
    short_help="Make a failing call as small as it gets, without any captured data.",
    epilog=epilog(
        {
            0: "the call does not fail here",
            1: "a failing call was written",
            3: "it failed only at capture, or only in this process",
            2: "bad usage or bad input, or a budget too small for an answer",
            130: "interrupted; the smallest call so far is written",
        },
        "sdpa-repro reduce dumps/L05-self_attn-call5-289x289.pt -o small.pt",
        "sdpa-repro reduce x.pt --freeze L,S --budget 60",
    ),
)
@click.argument("path", metavar="DUMP", type=PATH, shell_complete=dumps)
@click.option("-o", "--output", "target", type=PATH, help="Default: DUMP.min.pt.")
@click.option("--force", is_flag=True, help="Replace the file that -o names.")
@click.option("--backend", help="Backend whose failure to keep.  [default: the one that replay finds wrong]")
@click.option("--device", help="Where to run: cpu, cuda, … Default: as for replay.")
@click.option(
    "--budget",
    default=BUDGET,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for replay and search; the smallest call found by then is kept.",
)
@click.option(
    "--freeze",
    multiple=True,
    metavar="NAMES",
    help="What to leave as it is: B, H, L, S, E, mask, values, layout, flags; several with commas.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="For values that are drawn.")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, target: Path | None, as_json: bool, freeze: tuple[str, ...], **options: Any) -> None:
    """Shrink the failing call in DUMP while the same failure stays, and write the small one.

    Tensors get closed forms (zeros, counts, seeded values), so that the result holds no captured data and a script
    can rebuild it. Ctrl-C keeps the smallest call found so far.
    """
    from sdpa_repro.reducing.dump_reducer import reduce_dump

    names = [name.strip() for group in freeze for name in group.split(",") if name.strip()]
    result = reduce_dump(path, target, freeze=names, progress=output.progress, **options)
    if as_json:
        output.document("reduce", result.document())
    else:
        _print(result, options["preload"])
    raise SystemExit(result.exit_status)


def _print(result: ReducedDump, preload: tuple[Path, ...]) -> None:
    """The answer, the table, the tensors as a script writes them, the next command."""
    output.answer(output.clean(result.sentence))
    again = [word for path in preload for word in ("--preload", str(path))]
    found = result.reduction
    if found is None or result.output is None:
        output.next_command(output.shell("sdpa-repro", "show", result.path))
        return
    output.line()
    rows = [[row.name, row.before, row.after, NEEDED[row.needed], row.neighbour] for row in found.rows]
    if rows:
        output.table(HEADERS, rows)
        output.line()
    for text in _tensors(found):
        output.line(f"  {text}")
    output.line()
    if not found.complete:
        smaller = "" if found.stopped == "table" else "there may be a smaller call, and "
        output.line(f"stopped before the end: {smaller}rows of the table are missing")
    holds = f"the captured values of {', '.join(found.captured)}" if found.captured else "no captured values"
    output.line(f"{found.calls} calls in {found.seconds:.1f} s; wrote {output.clean(str(result.output))} with {holds}")
    if result.replay.preloaded:
        output.line(f"preloaded: {', '.join(output.clean(record['name']) for record in result.replay.preloaded)}")
    output.next_command(output.shell("sdpa-repro", _next(), result.output, *again))


def _tensors(found: Reduction) -> list[str]:
    """The line of a script for each tensor in closed form, and what the others are."""
    from sdpa_repro.recipe import line

    said = []
    for name, tensor in found.call.tensors.items():
        if name in found.recipes:
            said += line(found.recipes[name], name).splitlines()
        elif name in found.captured:
            said.append(f"{name}: {tuple(tensor.shape)} with captured values")
        else:
            variant = getattr(tensor, "variant", None)
            rule = getattr(variant, "name", "").lower()
            said.append(f"{name} = torch.nn.attention.bias.causal_{rule}{tuple(tensor.shape[-2:])}")
    return said


def _next() -> str:
    from sdpa_repro.cli import VERBS

    return "issue" if "issue" in VERBS else "replay"
