"""`sdpa-repro verify`: what has to hold for a prompt however it is padded and batched, as a checklist."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.cli.model_options import NAMES, build_options, model_options, model_words
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.capturing.options import PrefillOptions
    from sdpa_repro.capturing.prefill import Prefill
    from sdpa_repro.locating.invariants import Item
    from sdpa_repro.locating.verify import Verified

HEADERS = ("invariant", "is", "points", "broken at", "how, where first")
COLOURS = {"broken": "red", "holds": None}
LISTED = 4
"""Most points of a broken item in the table."""


@click.command(
    name="verify",
    short_help="Check what has to hold for a prompt however it is padded and batched.",
    epilog=epilog(
        {0: "all hold", 1: "one is broken", 130: "interrupted; what was checked by then is printed"},
        "sdpa-repro verify                               the embedded tiny model",
        "sdpa-repro verify --model ID --image cat.png    a model",
        "sdpa-repro verify --model ID --write-test test_padding.py    a test for the model's repository",
    ),
)
@model_options
@click.option("--pads", type=click.IntRange(min=1), metavar="N", help="Try paddings 0 to N.  [default: around 32s]")
@click.option("--no-batches", is_flag=True, help="Do not put the prompt beside longer rows.")
@click.option("--no-caches", is_flag=True, help="Do not compare the masks of a dynamic and a static cache.")
@click.option(
    "--write-test",
    type=PATH,
    metavar="FILE",
    help="Instead: write a fast test of a tiny model of this architecture, and run it.",
)
@click.option("--force", is_flag=True, help="Overwrite the test file.")
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, preload: tuple[Path, ...], **values: Any) -> None:
    """Check that padding and batching leave a prompt's image features, positions, block ids, masks, logits and greedy
    output as they are, at total lengths around multiples of 32, and that a static cache meets the masks of a dynamic
    one.
    """
    options = build_options(**{name: values.get(name) for name in NAMES})
    _check(options, values)
    if values["write_test"] is not None:
        raise SystemExit(_write(options, values["write_test"], values["force"], as_json))
    found = _verified(options, preload, values)
    if as_json:
        output.document("verify", found.document())
    else:
        _print(found)
        alone = {**values, "pad": None, "total_length": None}
        output.next_command(_next(found, model_words(alone), preload))
    raise SystemExit(found.exit_status)


def _check(options: PrefillOptions, values: Mapping[str, Any]) -> None:
    """Options that contradict each other."""
    from sdpa_repro import ranks

    if options.tp_plan or ranks.world() > 1:
        raise InputError("verify runs the whole model in one process: start it without torchrun and --tp-plan")
    alone = options.pad is not None or options.total_length is not None
    if alone and values["pads"] is not None:
        raise InputError("--pads tries many paddings, --pad and --total-length only one: give one of them")
    if values["force"] and values["write_test"] is None:
        raise InputError("--force is for --write-test: leave it out")


def _write(options: PrefillOptions, path: Path, force: bool, as_json: bool) -> int:
    """Write the test, run it, and say how it went."""
    from sdpa_repro.locating.written_test import write_test

    _check_target(path)
    written = write_test(options, path, force=force, progress=output.progress)
    if as_json:
        output.document("verify-test", written.document())
        return written.exit_status
    output.answer(output.clean(written.sentence))
    for text in written.output.splitlines() if written.exit_status else ():
        output.line(output.clean(text))
    output.next_command(output.shell("python", "-m", "pytest", "-q", path))
    return written.exit_status


def _check_target(path: Path) -> None:
    """Before a model is built and run: the test can be written. Raises InputError."""
    folder = path.absolute().parent
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: {folder} is read-only; name a file in another folder")
    if path.is_file() and not os.access(path, os.W_OK):
        raise InputError(f"cannot write {path}: it is read-only; give another name")


def _verified(options: PrefillOptions, preload: Sequence[Path], values: Mapping[str, Any]) -> Verified:
    """Load the model and check everything."""
    from sdpa_repro.capturing.model_run import machine, subject
    from sdpa_repro.capturing.prefill import prepare
    from sdpa_repro.environment import preload as run_preloads
    from sdpa_repro.locating.verify import BATCHES, verify_prefill

    preloaded = run_preloads(list(preload))
    for text in machine(options.device):
        output.progress(text)
    prefill = prepare(options, output.progress)
    for text in [*subject(prefill), *prefill.notes]:
        output.progress(output.clean(text))
    return verify_prefill(
        prefill,
        _pads(prefill, options, values["pads"]),
        batches=() if values["no_batches"] else BATCHES,
        caches=not values["no_caches"],
        preloaded=preloaded,
        progress=output.progress,
    )


def _pads(prefill: Prefill, options: PrefillOptions, most: int | None) -> list[int]:
    """The paddings that the options ask for."""
    from sdpa_repro.capturing.prefill import totals
    from sdpa_repro.locating.verify import around_tiles

    if most is not None:
        return list(range(most + 1))
    if options.pad is not None or options.total_length is not None:
        return [total - prefill.length for total in totals(prefill, options)]
    return around_tiles(prefill)


def _print(found: Verified) -> None:
    """The answer, the checklist, and what it was made with."""
    output.answer(output.clean(found.sentence + output.preloaded(found.preloaded)))
    output.line()
    styles = ["yellow" if item.follows else COLOURS.get(item.status.value, "yellow") for item in found.items]
    output.table(HEADERS, [cells(item) for item in found.items], styles=styles)
    if found.noise is not None:
        output.line(f"noise: logits may move by {found.noise:.3g} (root mean square over the vocabulary)")
    if found.caches is not None and found.caches.different:
        output.line(output.clean(f"caches: {found.caches.sentence}"))
    for note in found.notes:
        output.line(output.clean(f"note: {note}"))
    if not found.complete:
        output.line("stopped before the end: what is missing was not checked")


def cells(item: Item) -> list[str]:
    """One line of the checklist."""
    first = item.first
    if first is None:
        return [item.name, item.status.value, str(item.checked) if item.checked else "", "", item.reason]
    points = [f"{each.point.total}{f' (batch {each.point.batch})' * (each.point.batch > 1)}" for each in item.findings]
    listed = ", ".join(points[:LISTED]) + (f", … ({len(points)})" if len(points) > LISTED else "")
    status = f"broken, follows from {item.follows}" if item.follows else item.status.value
    return [item.name, status, str(item.checked), listed, first.how]


def _next(found: Verified, given: Sequence[object], preload: Sequence[Path]) -> str:
    """Find the stage of what is broken; write a test when nothing is, or only transformers' own masks are."""
    from sdpa_repro.locating.invariants import CACHES

    again = [word for each in preload for word in ("--preload", each)]
    broken = [item for item in found.broken if item.name != CACHES]
    first = broken[0].first if broken else None
    if first is not None:
        return output.shell("sdpa-repro", "locate", *given, "--total-length", first.point.total, *again)
    return output.shell("sdpa-repro", "verify", *given, "--write-test", "test_padding.py")
