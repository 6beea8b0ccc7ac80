"""What is known about the failure of one dump's call, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdpa_repro.errors import INTERRUPTED
from sdpa_repro.explaining.answers import Conditions
from sdpa_repro.explaining.hurried import LATER, NO_ANSWER
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.explaining.length_result import LengthRule
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.cells import SWALLOWED
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.verdict import Status

TOO_LITTLE = 2
"""Exit status when the budget was too small for an answer."""

MORE = 4
"""A budget of so many times what was spent in vain is proposed."""

FAILS: Mapping[Status | None, str] = MappingProxyType(
    {Status.CRASHED: "crashes", Status.TIMEOUT: "hangs", Status.NONFINITE: "gives NaN or Inf"}
)
"""What a backend does that fails otherwise than with wrong numbers."""


@dataclass(frozen=True)
class Explanation:
    """What is known about the failure of one dump's call. Parts that were not worked out are None.

    `backend` is None, and everything else empty, when the call does not fail here.
    """

    path: Path
    backend: str | None
    replay: Replay
    """Of the shorter call where `judged` is False and there is one."""
    conditions: Conditions | None = None
    hypothesis: Hypothesis | None = None
    length_rule: LengthRule | None = None
    poison: Poison | None = None
    seconds: float = 0.0
    complete: bool = True
    interrupted: bool = False
    """Whether Ctrl-C cut it short."""
    stand_in: tuple[int, int] | None = None
    """L and S of the shorter call, failing in the same way, that was explained for want of time."""
    judged: bool = True
    """Whether it was seen that the dumped call itself fails, or does not."""
    left_out: tuple[str, ...] = ()
    """Backends of the replay, then parts, that there was no time for."""

    @property
    def exit_status(self) -> int:
        """That of the replay; 130 after Ctrl-C; 2 when time ran out before any call like it was seen to fail."""
        if self.interrupted:
            return INTERRUPTED
        return TOO_LITTLE if self.larger_budget and self.backend is None else self.replay.exit_status

    @property
    def larger_budget(self) -> int | None:
        """Seconds to try next, when those given were too few to judge the dumped call; else None."""
        return None if self.judged else 10 * ceil(MORE * self.seconds / 10)

    @property
    def known(self) -> tuple[Match, ...]:
        """Upstream issues that fit, the best fit first."""
        return self.replay.known

    @property
    def cause(self) -> str:
        """One sentence: what the backend does, and for which lengths; what is not known is not said."""
        if self.backend is None and not self.judged:
            return f"{NO_ANSWER}, such as --budget {self.larger_budget}"
        return f"{self._cause}{self._elsewhere}"

    @property
    def seen(self) -> str:
        """What the replay saw."""
        return f"{self.replay.sentence}{self._elsewhere}"

    @property
    def _elsewhere(self) -> str:
        """That it was not seen on the dumped call, where that is so."""
        if self.judged or self.stand_in is None:
            return ""
        rows, keys = self.stand_in
        return f"; seen on a shorter call (L = {rows}, S = {keys}), since this one did not come to an end in time"

    @property
    def _cause(self) -> str:
        """The cause, of the call that was replayed."""
        if self.backend is None:
            missing = f"; {LATER}: {', '.join(self.left_out)}" if self.left_out else ""
            return self.replay.sentence + missing
        what = self.hypothesis.sentence if self.hypothesis else None
        rule = self.length_rule.rule if self.length_rule else None
        if what is None and rule is None:
            return self.replay.sentence
        subject = f"{self.backend}: {what}" if what else f"{self.backend} {self._fails}"
        return f"{subject}, when {rule}" if rule else subject

    @property
    def _fails(self) -> str:
        """What the backend does, in words."""
        cell = next((cell for cell in self.replay.cells if self.backend in (cell.backend, cell.kernel)), None)
        if cell is not None and cell.reason == SWALLOWED:
            return SWALLOWED
        return FAILS.get(cell.status if cell is not None else None, "is wrong")

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable."""
        found = self.conditions.document() if self.conditions else {}
        return {
            "file": self.path.name,
            "backend": self.backend,
            "sentence": self.cause,
            "verdict": self.replay.verdict.value,
            "needed": found.get("needed", []),
            "not_needed": found.get("not_needed", []),
            "not_tested": found.get("not_tested", []),
            "alternatives": found.get("alternatives", []),
            "why": found.get("why", {}),
            "workarounds": found.get("workarounds", []),
            "length_rule": self.length_rule.document() if self.length_rule else None,
            "hypothesis": _hypothesis_document(self.hypothesis),
            "poison": self.poison.document() if self.poison else None,
            "known": self.replay.document()["known"],
            "replay": self.replay.document(),
            "seconds": self.seconds,
            "complete": self.complete,
            "judged": self.judged,
            "stand_in": None if self.stand_in is None else list(self.stand_in),
            "left_out": list(self.left_out),
            "preloaded": [dict(record) for record in self.replay.preloaded],
            "environment": dict(self.replay.environment),
        }


def _hypothesis_document(found: Hypothesis | None) -> dict[str, Any] | None:
    if found is None or found.id is None:
        return None
    return {"id": found.id, "sentence": found.sentence, "tied": list(found.tied), "sets": found.sets}
