"""Find the first stage where a padded and an unpadded run of a prompt part."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sdpa_repro import ranks
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.prefill import Prefill, of_model, padded, totals
from sdpa_repro.environment import software
from sdpa_repro.errors import InputError
from sdpa_repro.locating.deciding import LengthRule, decide
from sdpa_repro.locating.greedy import Continuation, continuations
from sdpa_repro.locating.grid import Point, grid
from sdpa_repro.locating.lengthening import batched, companions
from sdpa_repro.locating.running import Path as Way
from sdpa_repro.locating.stages import Level, StageTable, compare_stages
from sdpa_repro.locating.sweep import Sweep
from sdpa_repro.locating.sweeping import sweep
from sdpa_repro.locating.verdict import Verdict, conclude

__all__ = ["Located", "locate", "locate_prefill"]

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Located:
    """Where a padded and an unpadded run part. Parts that were not worked out are None or empty.

    complete: False after Ctrl-C.
    """

    prefill: Prefill
    sweep: Sweep
    length_rule: LengthRule | None = None
    stages: StageTable | None = None
    verdict: Verdict | None = None
    greedy: tuple[Continuation, ...] = ()
    notes: tuple[str, ...] = ()
    preloaded: tuple[Mapping[str, str], ...] = ()
    complete: bool = True

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.verdict is not None:
            return self.verdict.sentence
        wrong = self.sweep.totals_wrong
        what = f"{len(wrong)} of them beyond noise" if wrong else "none of them beyond noise"
        return f"stopped after {len(self.sweep.alone(Way.DEFAULT))} total lengths, {what}: the stages were not compared"

    @property
    def exit_status(self) -> int:
        """0 nothing beyond noise, 1 something differs, 130 stopped by Ctrl-C.

        Logits that moved further than rounding usually moves them are no finding by themselves where every layer and
        every SDPA call at the worst padding was judged and is right.
        """
        if not self.complete:
            return 130
        cleared = self.stages is not None and self.stages.whole
        found = self.verdict is not None and self.verdict.found
        return int(found or bool(self.sweep.accusation) or (self.sweep.any_flagged and not cleared))

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable."""
        verdict = self.verdict.document() if self.verdict is not None else {}
        table = self.stages.document() if self.stages is not None else {}
        return {
            "level": verdict.get("level"),
            "module": verdict.get("module"),
            "stage": verdict.get("stage"),
            "sentence": self.sentence,
            "file": verdict.get("file"),
            "invariant": verdict.get("invariant"),
            "where": verdict.get("where"),
            "poisoned": self.sweep.poisoned or bool(verdict.get("poisoned")),
            "eager": verdict.get("eager"),
            "dump": verdict.get("dump"),
            "model": self.prefill.name,
            "prompt": self.prefill.length,
            "padding_side": self.prefill.padding_side,
            "baseline": self.sweep.baseline.value,
            "noise": self.sweep.noise if math.isfinite(self.sweep.noise) else None,
            "totals_wrong": list(self.sweep.totals_wrong),
            "sweep": self.sweep.document(),
            "length_rule": self.length_rule.document() if self.length_rule is not None else None,
            "stages": table.get("stages", []),
            "calls": table.get("calls", []),
            "greedy": [each.document() for each in self.greedy],
            "notes": list(self.notes),
            "complete": self.complete,
            "preloaded": [dict(each) for each in self.preloaded],
            "environment": software(self.prefill.device),
        }


def locate(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    pads: Sequence[int] | None = None,
    padding_side: str | None = None,
    lengths: bool = True,
    greedy: int = 0,
    out: str | os.PathLike[str] | None = None,
    progress: Say | None = None,
) -> Located:
    """Compare padded runs of a prompt with the unpadded one and say at which stage they part.

    model: a transformers model in evaluation mode. inputs: what its processor returned, input_ids (B, L). pads: tokens
    of padding to try, by default those that give the total length every residue modulo 64 once. padding_side: by
    default left for decoders, right for encoder-decoder models. lengths, greedy, out: see `locate_prefill`. Raises
    InputError for inputs that cannot be padded so.

        found = sdpa_repro.locate(model, processor(text=prompt, images=image, return_tensors="pt"))
        print(found.sentence)
    """
    prefill = of_model(model, inputs, padding_side=padding_side)
    if pads is None:
        pads = [total - prefill.length for total in totals(prefill, PrefillOptions())]
    elif any(pad < 0 for pad in pads):
        raise InputError("padding cannot be negative")
    for pad in pads:
        totals(prefill, PrefillOptions(pad=pad))
    return locate_prefill(prefill, pads, lengths=lengths, greedy=greedy, out=out, progress=progress)


def locate_prefill(
    prefill: Prefill,
    pads: Sequence[int],
    *,
    lengths: bool = True,
    greedy: int = 0,
    out: str | os.PathLike[str] | None = None,
    preloaded: Sequence[Mapping[str, str]] = (),
    progress: Say | None = None,
) -> Located:
    """The sweep, the rule over lengths, the stages at the worst padding, and the verdict.

    lengths: vary prompt and padding independently for the rule. greedy: tokens to continue with. out: folder for a
    dump of the call that is wrong, None for no dump. After Ctrl-C the result is what there is. Under torchrun the
    paddings and lengths are split over the ranks, and every rank returns the result.
    """
    say = progress or (lambda sentence: None)
    found = sweep(prefill, pads, progress=say)
    notes = [*prefill.notes, *found.notes]
    if found.complete and found.worst is None:
        notes.append(
            "nothing was padded: only the unpadded run was looked at; give a padding that the model has room for"
        )
    done: dict[str, Any] = {"preloaded": tuple(preloaded)}
    complete = found.complete
    if complete:
        try:
            done |= _looked_into(prefill, found, Path(out) if out is not None else None, preloaded, say)
            notes += [f"could not be looked at: {problem}" for problem in done["stages"].problems]
            if lengths:
                done["length_rule"] = _length_rule(prefill, found, done["stages"], say)
            if greedy:
                done["greedy"] = _greedy(prefill, found, greedy, notes, say)
        except KeyboardInterrupt:
            if ranks.world() > 1:
                raise
            complete = False
    return Located(prefill, found, notes=tuple(notes), complete=complete, **done)


def _looked_into(
    prefill: Prefill, found: Sweep, out: Path | None, preloaded: Sequence[Mapping[str, str]], say: Say
) -> dict[str, Any]:
    """Stages and verdict of the worst run: of a batch of several prompts those of the first row that differs."""
    folder = out if ranks.is_first() else None
    for plain, other, row in _worst_inputs(prefill, found):
        total = other["input_ids"].shape[1]
        place = f", row {row}" if len(other["input_ids"]) > 1 else ""
        say(f"comparing the stages unpadded and at total length {total}{place}")
        table = compare_stages(prefill, plain, other, row=row, out=folder, preloaded=preloaded, progress=say)
        if table.first is not None:
            break
    return {"stages": table, "verdict": conclude(found, table)}


def _worst_inputs(prefill: Prefill, found: Sweep) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor], int]]:
    """The inputs of an unpadded and of the worst run, and the row to compare."""
    worst, beside = found.worst, found.beside
    if beside is not None and (worst is None or not worst.exact):
        pad = beside.pad if beside.place == "padded" else beside.prompt - prefill.length
        rows = [prefill, *(companions(prefill, pad, beside.companions + 1) or [])]
        row = 0 if beside.place == "padded" else 1
        yield padded(rows[row], rows[row].length), batched(rows, prefill.length + pad), row
        return
    plain, other = (padded(prefill, prefill.length + pad) for pad in (0, worst.pad if worst is not None else 0))
    for row in range(plain["input_ids"].shape[0]):
        yield plain, other, row


def _length_rule(prefill: Prefill, found: Sweep, table: StageTable, say: Say) -> LengthRule:
    """The rule over the sweep's lengths and those of the grid.

    Logits alone count unless a call is wrong, which shows without them, or nothing at all is.
    """
    exact = table.whole and (table.first is None or table.first.level is Level.BACKEND)
    points = [Point(row.prompt, row.pad, row.why * (row.exact or not exact)) for row in found.alone(Way.DEFAULT)]
    more, unreachable = grid(prefill, found, noise=math.inf if exact else found.noise, progress=say)
    return decide([*points, *more], unreachable)


def _greedy(prefill: Prefill, found: Sweep, count: int, notes: list[str], say: Say) -> tuple[Continuation, ...]:
    """Continuations at the worst padding, or a note why there are none."""
    try:
        return continuations(prefill, found.worst.pad if found.worst is not None else 0, count, progress=say)
    except InputError as error:
        notes.append(str(error))
        return ()
