"""Walk the stages of a prefill: an unpadded and a padded run of one prompt side by side, until they part.

    table = compare_stages(prefill, padded(prefill, prefill.length), padded(prefill, 289))
    table.first

Each layer of the unpadded run is given the input that the padded run had there. So a difference shows where it
arises and not in everything behind it, and the noise of one layer is enough to judge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sdpa_repro.capturing.prefill import Prefill, forward
from sdpa_repro.capturing.recorder import listening
from sdpa_repro.capturing.records import Options
from sdpa_repro.capturing.session import Session
from sdpa_repro.locating import structure
from sdpa_repro.locating.calls import Check, Silent
from sdpa_repro.locating.noise import rounding
from sdpa_repro.locating.perturbing import shaken
from sdpa_repro.locating.recording import Recording, record
from sdpa_repro.locating.table import Level, Outcome, Stage, StageTable
from sdpa_repro.locating.walking import Key, Pair, compared, source, walk, wrong_on_valid

__all__ = ["Level", "Outcome", "Stage", "StageTable", "compare_stages"]

DRAWS = 3
"""Shaken runs that the noise is measured with."""
PATIENT = 27
"""So many before a layer is accused: a router of experts that is near a tie jumps in some runs and not in others."""

Inputs = Mapping[str, Tensor]


def compare_stages(
    prefill: Prefill,
    plain_inputs: Inputs,
    padded_inputs: Inputs,
    *,
    row: int = 0,
    out: Path | None = None,
    preloaded: Sequence[Mapping[str, str]] = (),
    progress: Callable[[str], None] = lambda sentence: None,
) -> StageTable:
    """Compare every stage of two runs on the valid tokens of one row.

    plain_inputs, padded_inputs: batches as `padded` makes them; `row` counts in each that has more rows than one.
    Both run once with their SDPA calls checked live, the unpadded one once more on the padded one's layer inputs,
    and `DRAWS` times shaken to measure the noise, `PATIENT` times before a layer is accused. out: folder for a dump of
    the first call that is wrong on a valid token; none is written when None. Raises InputError for a folder that cannot
    be written to.
    """
    with listening(Silent()):
        return _compare(prefill, (plain_inputs, padded_inputs), row, out, preloaded, progress)


def _compare(
    prefill: Prefill,
    inputs: tuple[Inputs, Inputs],
    row: int,
    out: Path | None,
    preloaded: Sequence[Mapping[str, str]],
    progress: Callable[[str], None],
) -> StageTable:
    """The recordings, the walk, and a closer look at the first stage that differs."""
    progress("recording the unpadded and the padded run")
    direct, padded = (record(prefill, each, row=row, check=True) for each in inputs)
    progress("running each layer of the unpadded run on the padded run's input, and measuring the noise")
    pair = _pair(prefill, inputs[0], padded, row, range(DRAWS))
    pair = replace(pair, plain=replace(pair.plain, checks=direct.checks, logits=direct.logits))
    stages = walk(pair)
    if _accused(stages):
        progress("a layer seems wrong: measuring its noise more often")
        pair = replace(pair, noise=_noise(pair, inputs[0], row, range(DRAWS, PATIENT)))
        stages = walk(pair)
    table = StageTable(
        tuple(stages),
        length=len(direct.valid),
        total=padded.total,
        padding_side=prefill.padding_side,
        row=row,
        rows=inputs[1]["input_ids"].shape[0],
        problems=tuple(dict.fromkeys([*direct.problems, *padded.problems])),
        calls=tuple({"run": word, **check.document()} for word, run in pair.runs for check in run.checks),
    )
    if table.first is None:
        return table
    if table.first.level is Level.BACKEND:
        return _guilty(table, table.first, pair, inputs, out, preloaded)
    if table.first.level is Level.MODEL:
        return _narrowed(table, table.first, pair, inputs, row)
    return table


def _accused(stages: Sequence[Stage]) -> bool:
    """Whether the first stage that differs is part of a layer and judged by its noise."""
    first = next((stage for stage in stages if stage.status is Outcome.DIFFERS), None)
    return first is not None and first.level is Level.MODEL


def _pair(
    prefill: Prefill, inputs: Inputs, padded: Recording, row: int, seeds: range, inside: Recording | None = None
) -> Pair:
    """The unpadded run on the padded run's layer inputs, with its noise. inside: the padded run inside one layer."""
    layer = inside.values[0].layer if inside is not None else None
    plain = record(prefill, inputs, row=row, inside=layer, feed=padded)
    pair = Pair(prefill, plain, padded, {})
    pair = replace(pair, noise=_noise(pair, inputs, row, seeds, layer))
    return replace(pair, padded=inside) if inside is not None else pair


def _noise(pair: Pair, inputs: Inputs, row: int, seeds: range, inside: str | None = None) -> dict[Key, Tensor]:
    """The noise of a pair, widened by runs shaken with more seeds."""

    def runs() -> Iterator[Recording]:
        for seed in seeds:
            with shaken(pair.prefill.model, seed):
                yield record(pair.prefill, inputs, row=row, inside=inside, feed=pair.padded)

    noise = dict(pair.noise)
    for key, moved in rounding(pair.plain, runs()).items():
        noise[key] = moved.maximum(noise[key]) if key in noise else moved
    return noise


def _narrowed(table: StageTable, first: Stage, pair: Pair, inputs: tuple[Inputs, Inputs], row: int) -> StageTable:
    """Run again inside the layer whose result differs, to name the module that makes it."""
    model = pair.prefill.model
    layers = [path for stack in structure.stacks(model) for path in stack.layers]
    layer = next((path for path in layers if f"{first.module}.".startswith(f"{path}.")), None)
    if layer is None:
        return table
    inside = record(pair.prefill, inputs[1], row=row, inside=layer)
    closer = _pair(pair.prefill, inputs[0], pair.padded, row, range(PATIENT), inside)
    for key, before, after in closer.matched("inside", layer):
        if compared(closer, key, before, after).differs:
            named = replace(first, module=after.point, file=source(model, after.point))
            return replace(table, stages=tuple(named if each is first else each for each in table.stages))
    return table


def _guilty(
    table: StageTable,
    first: Stage,
    pair: Pair,
    inputs: tuple[Inputs, Inputs],
    out: Path | None,
    preloaded: Sequence[Mapping[str, str]],
) -> StageTable:
    """Name the kernel and the run of the call that is wrong, and dump it: the padded run's when both are."""
    calls = [_wrong_call(run, first.module) for _, run in pair.runs]
    wrong = tuple(word for (word, _), call in zip(pair.runs, calls, strict=True) if call is not None)
    last = 1 if calls[1] is not None else 0
    check, run = calls[last], pair.runs[last][1]
    if check is None:
        return table
    dump = _dump(pair.prefill, run, inputs[last], check, out, preloaded) if out is not None else None
    return replace(table, dump=dump, backend=check.kernel, wrong_runs=wrong)


def _wrong_call(run: Recording, module: str) -> Check | None:
    return next((each for each in run.checks if each.module == module and wrong_on_valid(run, each)), None)


def _dump(
    prefill: Prefill,
    run: Recording,
    inputs: Inputs,
    check: Check,
    out: Path,
    preloaded: Sequence[Mapping[str, str]],
) -> Path | None:
    """Run once more and keep this one call."""
    origin: dict[str, Any] = {
        "model": prefill.name,
        "total_length": run.total,
        "padding": {"tokens": run.total - len(run.valid), "side": prefill.padding_side},
    }
    session = Session(out, Options(call=check.index), origin=origin, preloaded=preloaded)
    try:
        with listening(session):
            forward(prefill, inputs)
    finally:
        session.close()
    return session.dumps[0] if session.dumps else None
