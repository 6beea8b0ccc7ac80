"""Trial lengths split over the ranks of torchrun: rank 0 decides what to try, and every rank tries a share of it.

All ranks go through the same search with the same outcomes, those that rank 0 knows, so that a kernel whose failures
come and go cannot lead them apart. Only rank 0 has a deadline and a user; when it stops, it tells the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sdpa_repro import ranks
from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.lengths import Resize
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.replaying.trial import Result, Trial, without_output

Pair = tuple[int, int]
"""L and S."""

Outcome = tuple[Result | None, str]
"""What became of a trial, without its output, and a word on it; None and the reason when it could not be made."""

AHEAD = 8
"""Lengths that each rank tries in one round."""


def attempt(trial: Trial, resize: Resize, pair: Pair) -> Outcome:
    """Make the call of these lengths and try it, in this process or by all ranks when the trial is `Shared`."""
    if isinstance(trial, Shared):
        return trial.at(resize, pair)
    try:
        result = trial(resize(*pair))
    except (InputError, RuntimeError, ValueError) as error:
        return None, str(error).partition("\n")[0] or type(error).__name__
    return without_output(result), result.reason or result.status.value


@dataclass(frozen=True)
class Shared:
    """A trial that all ranks make together: each makes the same calls of these methods in the same order."""

    trial: Trial
    ready: dict[tuple[Resize, Pair], Outcome] = field(default_factory=dict)
    round: int = field(default_factory=lambda: AHEAD * ranks.world())
    """Lengths to prepare at a time."""

    def __call__(self, call: AttentionCall) -> Result:
        """One trial on rank 0; every rank gets its result, without the output. Raises OutOfTimeError."""
        result: Result = self._told(lambda: without_output(self.trial(call)))
        return result

    def at(self, resize: Resize, pair: Pair) -> Outcome:
        """The outcome at one pair, prepared or made now on rank 0. Raises OutOfTimeError."""
        ready = self.ready.pop((resize, pair), None)
        if ready is not None:
            return ready
        outcome: Outcome = self._told(lambda: attempt(self.trial, resize, pair))
        return outcome

    def prepare(self, resize: Resize, pairs: Sequence[Pair]) -> None:
        """Let each rank try its share of the pairs, for `at` to be asked about. Raises OutOfTimeError."""
        shares = ranks.of_all([(pair, attempt(self.trial, resize, pair)) for pair in ranks.mine(pairs)])
        if shares[0] is None:
            raise OutOfTimeError
        self.ready.update({(resize, pair): outcome for share in shares for pair, outcome in share})

    def stop(self) -> None:
        """On rank 0: let the others leave the search. Nothing on other ranks, or when they are gone."""
        if ranks.is_first():
            with suppress(RuntimeError):
                ranks.of_all(None)

    def _told(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on rank 0, on every rank."""
        told: Any = ranks.of_all((make(),) if ranks.is_first() else None)[0]
        if told is None:
            raise OutOfTimeError
        return told[0]
