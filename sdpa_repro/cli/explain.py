"""`sdpa-repro explain`: why a dump's call fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.explaining.explain import Explanation


BUDGET = 300.0


@click.command(
    name="explain",
    short_help="Say which conditions a failure needs, for which lengths, and why.",
    epilog=epilog(
        {
            0: "the call does not fail here",
            1: "it fails, or a shorter call for want of time; explained as far as possible",
            2: "bad usage or bad input, or a budget too small for an answer",
            3: "wrong live but clean here",
            130: "interrupted; what was known by then is printed",
        },
        "sdpa-repro explain dumps/L05-self_attn-call5-289x289.pt",
        "torchrun --nproc-per-node 8 -m sdpa_repro explain x.pt    lengths split over 8 GPUs",
    ),
)
@click.argument("path", metavar="DUMP", type=PATH, shell_complete=dumps)
@click.option("--device", help="Where to run: cpu, cuda, … Default: as for replay.")
@click.option("--backend", help="Backend to explain.  [default: the one that replay finds wrong]")
@click.option("--lengths", metavar="A:B", help="Range of L and S to try.  [default: chosen from the failing length]")
@click.option(
    "--budget",
    default=BUDGET,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds; what is known then is printed. Of long calls a shorter one that fails alike may be explained.",
)
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, lengths: str | None, as_json: bool, **options: Any) -> None:
    """Explain why the call in DUMP fails: conditions, lengths, what was computed instead, known issues."""
    from sdpa_repro import ranks
    from sdpa_repro.explaining.assisting import assist
    from sdpa_repro.explaining.explain import explain

    span = _range(lengths)
    if options["device"] is None:
        ranks.keep_to_one_gpu()
    if not ranks.is_first():
        assist(path, preload=options["preload"], lengths=span)
        raise SystemExit(0)
    result = explain(path, lengths=span, progress=output.progress, over_ranks=True, **options)
    if as_json:
        output.document("explain", result.document())
    else:
        _print(result, options["preload"])
    raise SystemExit(result.exit_status)


def _range(text: str | None) -> tuple[int, int] | None:
    """A:B as two numbers."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise InputError(f"--lengths {text!r}: give two numbers, smallest first, such as 1:400")
    return int(first), int(last)


def _print(result: Explanation, preload: tuple[Path, ...]) -> None:
    """The cause first, then each part, then what to do."""
    output.answer(output.clean(answer(result)))
    if result.backend is not None:
        output.line()
        output.line(output.clean(f"seen: {result.seen}"))
        print_sections(result)
    again: list[object] = [word for path in preload for word in ("--preload", path)]
    output.next_command(output.shell("sdpa-repro", *next_words(result, again)))


def print_sections(result: Explanation) -> None:
    """Each part under its title."""
    for title, lines in sections(result):
        output.line()
        output.line(title)
        for text in lines:
            output.line(f"  {output.clean(text)}")
    output.line()
    for text in limits(result):
        output.line(output.clean(text))


def limits(result: Explanation) -> list[str]:
    """What there was no time for, or that cannot be looked into, and what was looked at instead."""
    from sdpa_repro.replaying.verdict import Status

    said = []
    raised = [cell for cell in result.replay.cells if cell.status is Status.ERROR]
    if any(result.backend in (cell.backend, cell.kernel) for cell in raised):
        said.append("an exception is not explained further")
    if result.stand_in is not None:
        rows, keys = result.stand_in
        alike = ", where it fails in the same way" if result.judged else ""
        said.append(f"explained at L = {rows}, S = {keys}{alike}, for want of time")
    missing = f"left out: {', '.join(result.left_out)}" if result.left_out else ""
    said += [text for text in ("" if result.complete else "stopped before the end", missing) if text]
    return said


def answer(result: Explanation) -> str:
    """The first line: cause and known issue."""
    from sdpa_repro.known_issues import sentence

    cause = result.cause
    known = result.known
    if result.backend is None or not known or "known:" in cause:
        return cause
    device = result.replay.device.partition(":")[0]
    return f"{cause}; known: {sentence(known[0], result.backend, device)}"


def sections(result: Explanation) -> list[tuple[str, list[str]]]:
    """Title and lines of each part that was worked out."""
    from sdpa_repro.publishing.scope import workaround_note

    found: list[tuple[str, list[str]]] = []
    if result.conditions:
        found.append(("conditions", result.conditions.words()))
    if result.length_rule:
        found.append(("lengths", result.length_rule.words()))
    if result.hypothesis:
        near = [
            f"near miss: {miss.words} ({miss.matched} of {miss.wrong_rows} wrong rows; {miss.reason})"
            for miss in result.hypothesis.near[:3]
        ]
        said = result.hypothesis.sentence
        found.append(("what it computed", [said] if said else ["none of the known kinds of mistake fits", *near]))
    if result.poison:
        found.append(("memory", [result.poison.words]))
    if result.known:
        lines = [f"{match.issue} ({match.match}): {match.title}" for match in result.known]
        found.append(("known issues", lines))
    if result.conditions and result.conditions.workarounds:
        lines = []
        for help_ in result.conditions.workarounds:
            lines += [f"{help_.told}{workaround_note(help_.line, {}, reduced=False)}:", f"    {help_.line}"]
        found.append(("workarounds", lines))
    if result.replay.preloaded:
        names = ", ".join(record["name"] for record in result.replay.preloaded)
        found.append(("preloaded", [f"{names}: this failure may be planted by it"]))
    return found


def next_words(result: Explanation, again: list[object]) -> list[object]:
    """The words that carry on from here; `again` repeats the preloads for verbs that run the call."""
    from sdpa_repro.cli import VERBS

    if result.larger_budget is not None:
        return ["explain", result.path, "--budget", result.larger_budget, *again]
    verb = next((verb for verb in ("issue", "reduce") if verb in VERBS), None)
    return [verb, result.path, *again] if verb and result.backend is not None else ["show", result.path]
