"""The ranks of torchrun beside the first one: rank 0 explains, the others try a share of the lengths for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro import environment, ranks
from sdpa_repro.dump import load
from sdpa_repro.explaining.length_ranks import Shared
from sdpa_repro.explaining.length_rule import length_rule
from sdpa_repro.explaining.lengths import with_lengths
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.trial import Trial, in_process, isolated


@dataclass(frozen=True)
class Plan:
    """What rank 0 has found out that the others need: which backend, where, under which switches."""

    backend: Backend
    device: str
    context: Mapping[str, Any]
    apart: bool
    """Whether trials need a process of their own, since the backend crashes."""
    shorter: tuple[int, int, str] | None = None
    """L, S and kind of mask of the call that is explained in place of the dumped one."""


@dataclass
class Helpers:
    """The other ranks as rank 0 sees them: sent home at the end of the block when there was nothing to share."""

    wanted: bool
    asked: bool = False

    def share(self, plan: Plan, trial: Trial) -> Trial:
        """The trial, made by all ranks from here on; the same trial when there are no others."""
        if not self.wanted:
            return trial
        self.asked = True
        ranks.of_all(plan)
        return Shared(trial)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.wanted and not self.asked:
            with suppress(RuntimeError):
                ranks.of_all(None)


def assist(
    path: str | Path, *, preload: Sequence[str | Path] = (), lengths: tuple[int, int] | None = None, seed: int = 0
) -> None:
    """On every rank but the first, while that runs `explain` of the same dump with the same options.

    Returns when rank 0 has no more lengths to try. Raises InputError for a dump or preload file that cannot be read.
    """
    nothing: Any = None
    plan = ranks.of_all(nothing)[0]
    if not isinstance(plan, Plan):
        return
    dump = load(path, plan.device)
    if not plan.apart:
        environment.preload([Path(file) for file in preload])
    alone = nullcontext(in_process(plan.backend, plan.context))
    low, high = lengths or (1, None)
    with isolated(plan.backend, plan.context, preload=preload) if plan.apart else alone as trial:
        call = prepared(dump, None)
        if plan.shorter is not None:
            rows, keys, mask = plan.shorter
            call = with_lengths(call, rows, keys, mask=mask)
        length_rule(call, Shared(trial), low=low, high=high, seed=seed)
