"""Reduce one call: the passes in order, then the table of what was needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.errors import InputError
from sdpa_repro.recipe import Recipe
from sdpa_repro.reducing.candidate import Candidate
from sdpa_repro.reducing.layout import apart, layout, loose
from sdpa_repro.reducing.mask import mask
from sdpa_repro.reducing.reducer import Clues, Pass, Search, Stopped, begin, fixpoint, improve
from sdpa_repro.reducing.report import Row, described, rows
from sdpa_repro.reducing.shape import batch, heads, lengths, trade, two_heads, widths
from sdpa_repro.reducing.values import flags, values
from sdpa_repro.replaying.reference import four_dims, rows_of
from sdpa_repro.replaying.trial import Result, Trial
from sdpa_repro.visibility import bias_rows

PASSES: tuple[tuple[Pass, frozenset[str]], ...] = (
    (apart, frozenset({"layout"})),
    (batch, frozenset({"B"})),
    (heads, frozenset({"H"})),
    (lengths, frozenset({"L", "S"})),
    (widths, frozenset({"E"})),
    (mask, frozenset({"mask"})),
    (values, frozenset({"values"})),
    (layout, frozenset({"layout"})),
    (flags, frozenset({"flags"})),
    (trade, frozenset({"L", "S", "E"})),
)
"""The passes in order, and the names that freeze each."""

FREEZABLE = ("B", "H", "L", "S", "E", "mask", "values", "layout", "dtype", "flags")


@dataclass(frozen=True)
class Reduction:
    """The smallest call that still fails, and how it was found.

    `recipes` has the closed form of each tensor that has one; the others hold captured values. `result` has the
    output. `stopped` is "time" or "interrupted" when the search did not end: the call fails, but may not be the
    smallest; "table" when it ended, but rows of the table are missing.
    """

    call: AttentionCall
    recipes: Mapping[str, Recipe]
    rows: tuple[Row, ...]
    before: Mapping[str, int | str]
    after: Mapping[str, int | str]
    first: Result
    result: Result
    calls: int
    seconds: float
    stopped: str

    @property
    def complete(self) -> bool:
        """Whether the search and its table came to their end."""
        return not self.stopped

    @property
    def closed(self) -> bool:
        """Whether every tensor has a closed form, so that a script needs no data."""
        return not self.captured

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the tensors that hold captured values."""
        tensors = self.call.tensors
        return tuple(name for name in tensors if name not in self.recipes and not is_rule(tensors[name]))

    @property
    def shape(self) -> str:
        """B×H×L×E of the reduced call, for people."""
        return _shape(self.after)

    @property
    def shape_before(self) -> str:
        """B×H×L×E of the call it came from."""
        return _shape(self.before)

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable (DESIGN section 9)."""
        return {
            "from": dict(self.before),
            "to": dict(self.after),
            "needed": [row.name for row in self.rows if row.needed],
            "not_needed": [row.name for row in self.rows if row.needed is False],
            "neighbour": {row.name: row.neighbour for row in self.rows if row.neighbour},
            "rows": [
                {"name": r.name, "from": r.before, "to": r.after, "needed": r.needed, "neighbour": r.neighbour}
                for r in self.rows
            ],
            "status": self.result.status.value,
            "ratio": self.result.ratio,
            "closed": self.closed,
            "calls": self.calls,
            "seconds": round(self.seconds, 1),
            "complete": self.complete,
        }


def reduce(
    call: AttentionCall,
    trial: Trial,
    *,
    deadline: float | None = None,
    freeze: Collection[str] = (),
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    first: Result | None = None,
) -> Reduction:
    """The smallest call that `trial` still finds failing in the same way.

    deadline: `time.monotonic()` after which the best call so far is returned; Ctrl-C does the same. freeze: names
    of `FREEZABLE` that are left as they are. first: how the call fails, where trying it once more takes too long; the
    lengths then come down before anything else. The result depends on the call, the trial and `seed` alone.
    Raises InputError when the call does not fail, or is one that no backend has to take.
    """
    started = time.monotonic()
    check_freeze(freeze)
    search = begin(_four(call), trial, deadline=deadline, progress=progress, seen=first)
    start, told, stopped = search.best, list[Row](), ""
    searched = False
    try:
        clues = _clues(start.call, search.first, seed, frozenset(freeze))
        if search.told and not {"L", "S"} <= set(freeze):
            improve(search, lengths, clues)
        _loosen(search, freeze)
        fixpoint(search, _passes(search.best, freeze), clues)
        plainer = two_heads(search.best) if not {"H", "layout"} & set(freeze) else None
        if plainer is not None and search.fails(plainer):
            search.keep(plainer)
        searched = True
        for row in rows(search, start):
            told.append(row)
    except (Stopped, KeyboardInterrupt) as stop:
        stopped = "table" if searched else "time" if isinstance(stop, Stopped) else "interrupted"
    return _reduction(search, start, told, stopped, time.monotonic() - started)


def check_freeze(names: Collection[str]) -> None:
    """Raise InputError for a name that is not in `FREEZABLE`."""
    unknown = [name for name in names if name not in FREEZABLE]
    if unknown:
        raise InputError(f"cannot freeze {unknown[0]!r}: choose from {', '.join(FREEZABLE)}")


def _four(call: AttentionCall) -> Candidate:
    """The call with four dimensions: missing ones added in front, a mask's too, as views."""
    if call.query.dim() < 4 and call.query.dim() == call.key.dim() == call.value.dim():
        missing = (None,) * (4 - call.query.dim())
        call = replace(call, query=call.query[missing], key=call.key[missing], value=call.value[missing])
    if call.query.dim() != 4 or call.key.dim() != 4 or call.value.dim() != 4:
        raise InputError(f"a call with {call.query.dim()} dimensions cannot be reduced: give one with (B, H, L, E)")
    return Candidate(call)


def _loosen(search: Search, freeze: Collection[str]) -> None:
    """Find out whether strides of dimensions of size 1 matter; if not, they are never looked at again."""
    if "layout" in freeze:
        search.best = replace(search.best, exact=True)
        return
    free = loose(search.best)
    if search.fails(free):
        search.best = free
    else:
        search.best = replace(search.best, exact=True)


def _passes(candidate: Candidate, freeze: Collection[str]) -> Sequence[Pass]:
    frozen = set(freeze)
    return [apply for apply, names in PASSES if not (frozen >= names if apply is lengths else frozen & names)]


def _clues(call: AttentionCall, first: Result, seed: int, frozen: frozenset[str]) -> Clues:
    """Where the call is wrong, and the extreme scores of that row."""
    place = first.checked.rows[0] if first.checked is not None and first.checked.rows else (0, 0, 0)
    low, high = _scores(call, *place)
    return Clues(*place, seed=seed, low=low, high=high, frozen=frozen)


def _scores(call: AttentionCall, batch: int, head: int, row: int) -> tuple[float, float]:
    """The lowest and highest score of the visible keys of one row, the additive mask included; 0 when there is none."""
    with torch.no_grad():
        one = rows_of(four_dims(call), batch, head, torch.tensor([row], device=call.query.device))
        scores = (one.query.double() @ one.key.double().mT * one.softmax_scale)[0, 0, 0]
        if one.attn_mask is not None and one.attn_mask.dtype.is_floating_point:
            scores = scores + one.attn_mask.double().expand(1, 1, 1, -1)[0, 0, 0]
        seen = scores[bias_rows(call, batch, head, row, row + 1)[0]]
    seen = seen[seen.isfinite()]
    found = (float(seen.min()), float(seen.max())) if seen.numel() else (0.0, 0.0)
    return tuple(0.0 if math.isnan(value) else value for value in found)  # type: ignore[return-value]


def _shape(told: Mapping[str, int | str]) -> str:
    text = f"{told['B']}×{told['H']}×{told['L']}×{told['E']}"
    pairs = (("Hkv", "H"), ("S", "L"), ("Ev", "E"))
    return ", ".join([text, *(f"{name} = {told[name]}" for name, usual in pairs if told[name] != told[usual])])


def _reduction(search: Search, start: Candidate, told: Sequence[Row], stopped: str, seconds: float) -> Reduction:
    best = search.best
    return Reduction(
        call=best.call,
        recipes=best.recipes,
        rows=tuple(told),
        before=described(start),
        after=described(best),
        first=search.first,
        result=search.result_of_best(),
        calls=search.calls,
        seconds=seconds,
        stopped=stopped,
    )
