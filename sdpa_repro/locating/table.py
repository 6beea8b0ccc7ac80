"""The stages of a prefill, side by side for an unpadded and a padded run: what was seen and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

UNPADDED, PADDED = "unpadded", "padded"
"""The two runs."""


class Outcome(str, Enum):
    """What a comparison of one stage says."""

    EQUAL = "equal"
    WITHIN_NOISE = "within noise"
    DIFFERS = "differs"
    NOT_AVAILABLE = "not available"


class Level(str, Enum):
    """Where a fix belongs."""

    MULTIMODAL = "multimodal preparation"
    POSITIONS = "positions"
    MASK = "mask or block ids"
    BACKEND = "SDPA backend"
    MODEL = "the model's own path"
    NOTHING = "nothing beyond dtype noise"


@dataclass(frozen=True)
class Stage:
    """One stage of the walk.

    level: where a fix belongs when this stage is the first that differs. moved: the largest difference between
    the two runs on valid tokens (a count of tokens for ids and masks); noise: the largest difference that
    rounding alone makes there; both None when there is nothing to say. where: the first place that differs, in
    words. module: path of the module to look at; file: its source, from its package on. detail: what was
    compared, or why it was not.
    """

    name: str
    status: Outcome
    level: Level
    moved: float | None = None
    noise: float | None = None
    where: str = ""
    module: str = ""
    file: str = ""
    detail: str = ""

    def document(self) -> dict[str, Any]:
        """The stage as plain values."""
        return {**asdict(self), "status": self.status.value, "level": self.level.value}


@dataclass(frozen=True)
class StageTable:
    """All stages in the order of the forward pass.

    length, total: tokens of the prompt, and with padding. row, rows: which row was looked at, of how many in the batch.
    calls: the live check of every SDPA call, each with "run" ("unpadded" or "padded"). For a first stage that is an
    SDPA call: wrong_runs are the runs whose call is wrong, backend is the kernel, dump the call on disk (the padded
    run's if that is wrong). problems: what could not be looked at, and why.
    """

    stages: tuple[Stage, ...]
    length: int
    total: int
    padding_side: str
    calls: tuple[Mapping[str, Any], ...] = ()
    dump: Path | None = None
    backend: str = ""
    wrong_runs: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    row: int = 0
    rows: int = 1

    @property
    def poisoned(self) -> bool:
        """Whether the unpadded run is itself wrong, so that it is no baseline."""
        return UNPADDED in self.wrong_runs

    @property
    def first(self) -> Stage | None:
        """The first stage that differs beyond noise, None when none does."""
        return next((stage for stage in self.stages if stage.status is Outcome.DIFFERS), None)

    @property
    def whole(self) -> bool:
        """Whether there are SDPA calls, and every layer and every call in it was judged."""
        inside = [stage for stage in self.stages if stage.level in (Level.BACKEND, Level.MODEL)]
        calls = any(stage.level is Level.BACKEND for stage in inside)
        return calls and not any(stage.status is Outcome.NOT_AVAILABLE for stage in inside)

    def document(self) -> dict[str, Any]:
        """The table as plain values."""
        first = self.first
        return {
            "stages": [stage.document() for stage in self.stages],
            "first": first.name if first is not None else None,
            "length": self.length,
            "total": self.total,
            "padding_side": self.padding_side,
            "calls": [dict(call) for call in self.calls],
            "dump": str(self.dump) if self.dump is not None else None,
            "backend": self.backend,
            "poisoned": self.poisoned,
            "wrong_runs": list(self.wrong_runs),
            "problems": list(self.problems),
            "row": self.row,
            "rows": self.rows,
        }
