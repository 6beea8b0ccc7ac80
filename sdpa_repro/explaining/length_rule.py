"""Which lengths fail: L and S varied together, one by one and apart, and the simplest rule that says it all."""

from __future__ import annotations

from dataclasses import replace

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.length_probe import Probe, Progress, base_call
from sdpa_repro.explaining.length_ranks import Shared
from sdpa_repro.explaining.length_result import LengthRule, Sweep
from sdpa_repro.explaining.length_search import Search
from sdpa_repro.explaining.length_sweeps import Field
from sdpa_repro.explaining.lengths import resizer
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.replaying.trial import Trial

__all__ = ["LengthRule", "Sweep", "length_rule"]


def length_rule(
    call: AttentionCall,
    trial: Trial,
    *,
    low: int = 1,
    high: int | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> LengthRule:
    """Find which lengths fail like `call` does, and whether L, S or both decide.

    low, high: the range of L and S. By default 1 to 64 beyond the failing length, at least to 353, and up to 256 more
    where only few lengths fail; of large lengths only the most telling ones (`length_sweeps.WORK`). trial: a `Shared`
    one is made by all ranks, which have to search together, with the same answer. deadline: a value of
    `time.monotonic()` after which what is known is returned, marked incomplete; Ctrl-C does the same. Otherwise the
    answer depends on the trial and the seed alone, not on the speed of the machine.
    """
    probe = Probe(trial, (), deadline, progress)
    search = Search(probe, Field(call, max(1, low), high, seed))
    try:
        base, mask, result = base_call(call, trial, seed)
        if result is None:
            return search.answer(why="the call does not fail again with a mask made for its own lengths")
        probe.resizes = (
            resizer(base, seed=seed, mask=mask),
            *(resizer(base, seed=seed + look, mask="random") for look in (1, 2, 3)),
            resizer(call, seed=seed + 4, mask="random"),
        )
        search.field = replace(search.field, base=base)
        probe.outcomes[call.query.shape[-2], call.key.shape[-2]] = True
        search.run()
        whole = resizer(call, seed=seed, mask=mask)
        if base is not call and not search.holds_with(whole):  # with fewer heads other lengths fail
            probe = Probe(trial, (whole, probe.resizes[-1]), deadline, progress)
            search = Search(probe, Field(call, max(1, low), high, seed))
            search.run()
    except (OutOfTimeError, KeyboardInterrupt):
        if isinstance(trial, Shared):
            trial.stop()
        return search.answer(complete=False)
    return search.answer()
