"""`sdpa-repro locate`: the first stage where a padded and an unpadded run of a prompt part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.cli.model_options import NAMES, build_options, model_options, model_words
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.locating.locate import Located
    from sdpa_repro.locating.sweep import Row, Sweep

HEADERS = ("total", "mod 32", "padding", "batch", "path", "max |Δ|", "mean |Δ|", "next token", "top 5", "remark")
LISTED = 12
"""Most flagged rows of the default path in the table."""
FEW = 4
"""So many total lengths are listed one by one."""
ALONE = (
    'layers are judged one by one, each on what the padded run gave it: "within noise" after the first that differs '
    "says that such a layer adds no fault of its own, not that its values are right"
)
COLOURS = {"differs": "red", "not available": "yellow"}


@click.command(
    name="locate",
    short_help="Say at which stage a padded and an unpadded run of a prompt part.",
    epilog=epilog(
        {
            0: "nothing beyond noise",
            1: "something differs",
            130: "interrupted; what was measured by then is printed",
        },
        "sdpa-repro locate                               the embedded tiny model",
        "sdpa-repro locate --model ID --image cat.png    a model: total lengths of every residue mod 64",
        "sdpa-repro locate --model ID --pad 7            only this padding",
        "torchrun --nproc-per-node 8 -m sdpa_repro locate --model ID    split over 8 GPUs",
    ),
)
@model_options
@click.option("--pads", type=click.IntRange(min=1), metavar="N", help="Try paddings 0 to N.  [default: 0 to 63]")
@click.option("--greedy", type=click.IntRange(min=1), metavar="N", help="Also compare N greedy tokens.")
@click.option("--no-lengths", is_flag=True, help="Do not vary the prompt's length for the rule over lengths.")
@click.option("--out", "-o", default="dumps", show_default=True, type=PATH, help="Folder for the dump.")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, preload: tuple[Path, ...], **values: Any) -> None:
    """Run a prompt with many paddings, find the worst, and walk its stages from the inputs to the logits beside the
    unpadded run: says whether a fix belongs to the inputs, the positions, the mask, an SDPA backend or the model.
    """
    found = _located(preload, values)
    from sdpa_repro import ranks

    if ranks.is_first():
        if as_json:
            output.document("locate", found.document())
        else:
            _print(found, preload, values)
    raise SystemExit(found.exit_status)


def _located(preload: Sequence[Path], values: dict[str, Any]) -> Located:
    """Load the model and run everything."""
    from sdpa_repro import ranks

    options = build_options(**{name: values.get(name) for name in NAMES})
    if options.tp_plan:
        raise InputError("locate needs the whole model on each rank: leave out --tp-plan")
    alone = options.pad is not None or options.total_length is not None
    if alone and values["pads"] is not None:
        raise InputError("--pads tries many paddings, --pad and --total-length only one: give one of them")
    if options.device is None:
        ranks.keep_to_one_gpu()
    from sdpa_repro.capturing.model_run import machine, subject
    from sdpa_repro.capturing.options import PrefillOptions
    from sdpa_repro.capturing.prefill import prepare, totals
    from sdpa_repro.environment import preload as run_preloads
    from sdpa_repro.locating.locate import locate_prefill

    say = output.progress if ranks.is_first() else lambda text: None
    preloaded = run_preloads(list(preload))
    for line in machine(options.device):
        say(line)
    prefill = prepare(options, say)
    for line in [*subject(prefill), *prefill.notes]:
        say(output.clean(line))
    if values["pads"] is not None:
        pads = list(range(values["pads"] + 1))
        totals(prefill, PrefillOptions(pad=pads[-1]))
    else:
        pads = [total - prefill.length for total in totals(prefill, options)]
    return locate_prefill(
        prefill,
        pads,
        lengths=not (alone or values["no_lengths"]),
        greedy=values["greedy"] or 0,
        out=values["out"],
        preloaded=preloaded,
        progress=say,
    )


def _print(found: Located, preload: Sequence[Path], values: dict[str, Any]) -> None:
    """The verdict, the sweep, the stages, the rule, and what to run next."""
    output.answer(output.clean(found.sentence + output.preloaded(found.preloaded)))
    if found.sweep.poisoned:
        output.line(output.clean(_poisoned(found.sweep)))
    output.line()
    _print_sweep(found.sweep)
    for continuation in found.greedy:
        output.line(output.clean(continuation.sentence))
    if found.stages is not None:
        output.line()
        _print_stages(found)
    if found.length_rule is not None:
        output.line()
        for line in rule_lines(found):
            output.line("  " * line.startswith(" ") + output.clean(line))
    for note in found.notes:
        output.line(output.clean(f"note: {note}"))
    if not found.complete:
        output.line("stopped before the end: what is missing was not measured")
    output.next_command(_next(found, preload, values))


def _poisoned(sweep: Sweep) -> str:
    return (
        f"the unpadded run of {sweep.prompt} tokens is itself wrong (poisoned baseline): "
        f"the default path is compared with the unpadded {sweep.baseline.value} run"
    )


def _print_sweep(sweep: Sweep) -> None:
    """The rows worth a look, and what the others say."""
    rows = chosen_rows(sweep)
    colours = ["red" if row.flagged else "yellow" if row.reason else None for row in rows]
    output.table(HEADERS, [_cells(row) for row in rows], styles=colours)
    for line in summary(sweep):
        output.line(output.clean(line))


def chosen_rows(sweep: Sweep) -> list[Row]:
    """Rows for the table: flagged ones, all paths unpadded and at the worst padding, its neighbours, batches."""
    worst = sweep.worst
    marked = [row for row in sweep.rows if row.flagged and not row.companions][:LISTED]
    near = {0, worst.pad} if worst is not None else {0}
    beside = {worst.pad - 1, worst.pad + 1} if worst is not None else set()
    chosen = []
    for row in sweep.rows:
        default = row.path.value == "default" and row.pad in beside
        if row in marked or row.companions or row.reason or row.pad in near or default:
            chosen.append(row)
    return sorted(chosen, key=lambda row: (row.companions, row.total, row.pad))


def _cells(row: Row) -> list[str]:
    start = [str(row.total), str(row.total % 32), str(row.pad), str(row.companions + 1), row.path.value]
    if row.max_abs is None or row.mean_abs is None:
        return [*start, "", "", "", "", row.reason]
    token = f"{row.top5_plain[0]} -> {row.top5[0]}" if row.argmax_flipped else "same"
    ranking = "same" if row.top5 == row.top5_plain else " ".join(map(str, row.top5))
    why = f"WRONG: {row.why}" if row.exact else row.why
    if row.place == "companion":
        why = why or "the longer row beside it, against itself alone"
    return [*start, f"{row.max_abs:.3g}", f"{row.mean_abs:.3g}", token, ranking, why]


def summary(sweep: Sweep) -> list[str]:
    """How many total lengths are wrong, and how far the healthy ones move."""
    from sdpa_repro.locating.running import Path as Way

    rows = sweep.alone(Way.DEFAULT)
    if not rows:
        return []
    wrong = sweep.totals_wrong
    listed = ", ".join(map(str, wrong[:LISTED])) + (", …" if len(wrong) > LISTED else "")
    totals = [row.total for row in rows]
    whole = len(totals) > FEW
    span = f"{totals[0]} to {totals[-1]}" if whole else ", ".join(map(str, totals))
    lines = [f"{len(wrong)} of {len(rows)} total lengths ({span}) wrong" + (f": {listed}" if wrong else "")]
    for way in (Way.DEFAULT, Way.MATH):
        healthy = [row.max_abs for row in sweep.alone(way) if not row.flagged and row.max_abs is not None]
        if healthy:
            lines.append(f"{way.value}: the others move a logit by at most {max(healthy):.3g}")
    if not math.isfinite(sweep.noise):
        return [*lines, "noise: not measured, so logits by themselves accuse no length"]
    return [*lines, f"noise: logits may move by {sweep.noise:.3g} (root mean square over the vocabulary)"]


def _print_stages(found: Located) -> None:
    """The stages; a run of healthy layers is one line."""
    if found.stages is None:
        return
    rows, styles = [], []
    for name, stage in folded(found):
        moved = "" if stage.moved is None else f"{stage.moved:.3g}"
        noise = "" if stage.noise is None else f"{stage.noise:.3g}"
        detail = "; ".join(part for part in (stage.where, stage.detail) if part)
        rows.append([name, stage.status.value, moved, noise, stage.module if detail else "", detail])
        styles.append(COLOURS.get(stage.status.value))
    output.table(("stage", "is", "moved", "noise", "module", "where"), rows, styles=styles)
    if found.stages.first is not None:
        output.line(ALONE)


def folded(found: Located) -> list[tuple[str, Any]]:
    """The stages with their names; after the first that differs, and in healthy layers, only what is worth a line."""
    stages = list(found.stages.stages) if found.stages is not None else []
    first = found.stages.first if found.stages is not None else None
    guilty = _layer(first.name) if first is not None else None
    kept: list[tuple[str, Any]] = []
    for stage in stages:
        layer = _layer(stage.name)
        if layer and layer != guilty:
            last = kept[-1] if kept else None
            if (
                last is not None
                and _layer(last[1].name)
                and _layer(last[1].name) != guilty
                and last[1].status == stage.status
            ):
                start = last[0].partition(" to ")[0]
                kept[-1] = (f"{start} to {stage.name}", _larger(last[1], stage))
                continue
        kept.append((stage.name, stage))
    return kept


def _larger(one: Any, other: Any) -> Any:
    return other if (other.moved or 0.0) > (one.moved or 0.0) else one


def _layer(name: str) -> str:
    """ "layer 3" out of a stage's name, "" outside layers."""
    head, word, rest = name.partition("layer ")
    return f"{head}{word}{rest.split(' ')[0]}" if word else ""


def rule_lines(found: Located) -> list[str]:
    """The rule over lengths, why not another one, and what could not be tried."""
    rule = found.length_rule
    if rule is None:
        return []
    lines = [f"lengths: {rule.sentence}", *(f"  {each}" for each in rule.against)]
    reasons: dict[str, set[int]] = {}
    for each in rule.unreachable:
        reasons.setdefault(each.reason, set()).add(each.prompt)
    for reason, prompts in reasons.items():
        lines.append(f"  unreachable: prompts of {', '.join(map(str, sorted(prompts)))} tokens: {reason}")
    return lines


def _next(found: Located, preload: Sequence[Path], values: dict[str, Any]) -> str:
    """Diagnose the dump; without one see what else has to hold for the same model and prompt."""
    again = [word for each in preload for word in ("--preload", each)]
    dump = found.stages.dump if found.stages is not None else None
    if dump is not None:
        return output.shell("sdpa-repro", "diagnose", dump, *again)
    return output.shell("sdpa-repro", "verify", *model_words(values), *again)
