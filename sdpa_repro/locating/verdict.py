"""One sentence out of the stages and the sweep: where a fix belongs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sdpa_repro.locating.running import Path as Way
from sdpa_repro.locating.table import PADDED, Level, Outcome, Stage, StageTable

INVARIANTS = {
    "input_ids": "padding leaves the ids of valid tokens as they are",
    "attention_mask": "the attention mask marks every token of the prompt and no other",
    "token types": "a token keeps its type under padding",
    "pixel inputs": "padding leaves the images as they are",
    "image features": "the features of an image do not depend on padding",
    "placeholder mask": "the places of image features move with their tokens",
    "embeddings": "each image feature stands at its own placeholder and every other token has its own embedding",
    "position_ids": "the position of a valid token does not depend on padding",
    "rotary cos/sin": "the rotary embedding of a token depends on its position alone",
    "image block ids": "the tokens of one image, and only they, share a block id",
    "mask": "a valid token sees the same valid tokens with and without padding",
    "input": "a layer is given what the part before it returned",
    "query": "the query of a token depends on its hidden state and its position alone",
    "key": "the key of a token depends on its hidden state and its position alone",
    "value": "the value of a token depends on its hidden state alone",
    "SDPA": "every query row of SDPA equals softmax(query key^T * scale + mask) value",
    "output": "the result of a layer for a token depends on its input and on its attention alone",
    "logits": "the logits of a token depend on its last hidden state alone",
}
"""What has to hold at a stage, by its name or the last word of it."""


class Sweep(Protocol):
    """What the verdict asks of a sweep over pads."""

    @property
    def accusation(self) -> str:
        """A run that had a wrong call or other inputs, in words; "" when none had."""

    def wrong(self, path: Way) -> bool | None:
        """Whether the worst pad's logits moved beyond noise under a path; None when it was not run under it."""


@dataclass(frozen=True)
class Verdict:
    """Where a fix belongs.

    level: see `Level`. stage: name of the first that differs. module, file: what to look at. invariant: what has
    to hold there and does not. poisoned: the unpadded run is itself wrong. eager: whether eager and float32 runs
    are wrong too, None when they were not made. sentence: all of it in one line.
    """

    level: Level
    sentence: str
    stage: str = ""
    module: str = ""
    file: str = ""
    invariant: str = ""
    where: str = ""
    poisoned: bool = False
    eager: bool | None = None
    dump: Path | None = None

    @property
    def found(self) -> bool:
        """Whether anything differs beyond noise."""
        return self.level is not Level.NOTHING

    def document(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {
            "level": self.level.value,
            "sentence": self.sentence,
            "stage": self.stage,
            "module": self.module,
            "file": self.file,
            "invariant": self.invariant,
            "where": self.where,
            "poisoned": self.poisoned,
            "eager": self.eager,
            "dump": str(self.dump) if self.dump is not None else None,
        }


def conclude(sweep: Sweep | None, table: StageTable) -> Verdict:
    """The verdict on a padded and an unpadded run: the first stage that differs beyond noise decides the level.

    sweep: what it says about eager and float32 runs goes into the sentence, and does not change the level.
    """
    first = table.first
    eager = _eager(sweep)
    if first is None:
        return Verdict(Level.NOTHING, _nothing(table, sweep), eager=eager)
    return Verdict(
        first.level,
        _sentence(table, first, eager),
        stage=first.name,
        module=first.module,
        file=first.file,
        invariant=invariant(first.name),
        where=first.where,
        poisoned=table.poisoned,
        eager=eager,
        dump=table.dump,
    )


def invariant(stage: str) -> str:
    """What has to hold at a stage."""
    return INVARIANTS.get(stage) or INVARIANTS.get(stage.rpartition(" ")[2], "")


def _eager(sweep: Sweep | None) -> bool | None:
    """Whether the paths without an SDPA kernel are wrong too."""
    if sweep is None:
        return None
    answers = [sweep.wrong(way) for way in (Way.EAGER, Way.FLOAT32)]
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _sentence(table: StageTable, first: Stage, eager: bool | None) -> str:
    """Level, place, source, what is broken, at what length."""
    look = f" ({first.file})" if first.file else ""
    if first.level is Level.BACKEND:
        return _backend(table, first, look)
    found = "; ".join(part for part in (first.where, first.detail) if part)
    parts = [
        f'{first.level.value}: {first.module or "the inputs"}{look} breaks "{invariant(first.name)}" '
        f"{_at(table, table.total)}: {first.name}: {found}{_moved(first)}"
    ]
    if first.level is Level.MODEL:
        parts.append("inputs, positions, masks and the SDPA calls up to there are right")
        parts += ["eager attention is wrong too"] if eager else []
    return "; ".join(parts)


def _backend(table: StageTable, first: Stage, look: str) -> str:
    """Which kernel, in which rows of which layer, in which of the two runs."""
    total = table.total if PADDED in table.wrong_runs else table.length
    parts = [
        f'{first.level.value}: {table.backend} in {first.module}{look} breaks "{invariant(first.name)}" '
        f"{_at(table, total)}: {first.where}; {first.detail}",
        "everything before this call is equal or within rounding",
    ]
    if table.poisoned:
        parts.append(f"the unpadded run of {table.length} tokens is itself wrong: a poisoned baseline")
    return "; ".join(parts)


def _moved(stage: Stage) -> str:
    """By how much the values of a float stage moved, when that says anything."""
    if not stage.moved or not stage.noise:
        return ""
    return f" (moved by {stage.moved:.3g}, rounding moves it by {stage.noise:.3g})"


def _at(table: StageTable, total: int) -> str:
    """The length, and the row where there are several."""
    extra = total - table.length
    how = f"{table.length} tokens padded by {extra} on the {table.padding_side}" if extra else "unpadded"
    row = f", row {table.row} of a batch of {table.rows}" if table.rows > 1 else ""
    return f"at total length {total} ({how}{row})"


def _nothing(table: StageTable, sweep: Sweep | None) -> str:
    """What was looked at, and what was not."""
    missing = [stage.name for stage in table.stages if stage.status is Outcome.NOT_AVAILABLE]
    seen = len(table.stages) - len(missing)
    parts = [
        f"{Level.NOTHING.value}: {seen} stages {_at(table, table.total)} are equal or "
        "move by no more than rounding does"
    ]
    if missing:
        parts.append(f"not available: {', '.join(missing[:6])}{', …' if len(missing) > 6 else ''}")
    if sweep is not None and sweep.accusation:
        parts.insert(0, f"{sweep.accusation}, but not when the stages were compared")
    elif sweep is not None and sweep.wrong(Way.DEFAULT):
        parts.append("the sweep saw the logits move further than that: no single stage explains it")
    return "; ".join(parts)
