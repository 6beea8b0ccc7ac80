"""Which lengths to try: near the failing one, small ones, where kernels switch, and as many others as are cheap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.length_probe import Axis, Probe, near_first, sample, work
from sdpa_repro.explaining.length_ranks import Pair, Shared
from sdpa_repro.explaining.length_result import KEYS, ROWS, TOGETHER, Sweep
from sdpa_repro.explaining.rules import LARGEST_MODULUS

DENSE = 353
"""Up to here every length is tried with L and S tied: two periods of a tile of 176."""

MARGIN = 64
"""Lengths tried beyond the failing one."""

WINDOW = 40
"""Lengths tried on either side of the failing one when L or S is varied alone."""

SAMPLED = 40
"""Other lengths tried when L or S is varied alone."""

WORK: Mapping[str, float] = MappingProxyType({"cpu": 5e10})
"""Multiply-adds a sweep may spend beyond its most telling lengths, by device type; others take `FAST`."""

FAST = 2e12

ALWAYS_TRIED = 24
"""The most telling lengths of a sweep, tried whatever they cost."""

COSTLY_FAILURES = 12
"""Crashes and hangs after which a sweep stops: each costs a fresh worker, or the whole timeout."""

ENOUGH_FAILURES = 3
"""A sweep with fewer failing lengths is extended by up to 256 lengths, the largest modulus."""

BESIDE_DIAGONAL = 2
"""Lengths on either side of L = S tried when L or S is varied alone."""


@dataclass(frozen=True)
class Field:
    """Where to look: around the lengths of `base`, from `low` to `high` (None: a range that suits them)."""

    base: AttentionCall
    low: int
    high: int | None
    seed: int

    @property
    def rows(self) -> int:
        """L of the failing call."""
        return int(self.base.query.shape[-2])

    @property
    def keys(self) -> int:
        """S of the failing call."""
        return int(self.base.key.shape[-2])

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """L and S together, L alone, S alone."""
        return tuple(Axis(vary, self.rows, self.keys) for vary in (TOGETHER, ROWS, KEYS))  # type: ignore[return-value]

    def range(self, axis: Axis) -> tuple[int, int]:
        """First and last number of a sweep; both lengths stay within the limits."""
        apart = axis.keys - axis.rows if axis.vary == TOGETHER else 0
        low = max(self.low, self.low - apart)
        if self.high is not None:
            return low, min(self.high, self.high - apart)
        return low, max(axis.origin + MARGIN, DENSE)


def try_lengths(probe: Probe, field: Field, axis: Axis) -> None:
    """Try the lengths on one line; further out where too few of them fail to tell a residue. Raises OutOfTimeError."""
    low, high = field.range(axis)
    together = axis.vary == TOGETHER
    telling = list(near_first(axis.origin, low, high, WINDOW))
    others: Sequence[int] = range(low, high + 1)
    if not together and field.high is None:
        others = sample([*_where_together_fails(probe, field, axis, low, high)], SAMPLED, field.seed)
        others = [*others, *sample(range(low, high + 1), SAMPLED, field.seed + 1)]
    budget = WORK.get(field.base.query.device.type, FAST) / (2 if together else 6)
    first, rest = telling[:ALWAYS_TRIED], telling[ALWAYS_TRIED:]
    rest = [*_beside_diagonal(axis, low, high), *rest]
    numbers = [*first, *_affordable(probe, field, axis, rest, budget), *_affordable(probe, field, axis, others, budget)]
    _ask_all(probe, axis, [axis.origin, *numbers])
    if field.high is None and so_far(probe, axis).decides:
        around = (axis.origin + sign * step for step in range(1, LARGEST_MODULUS + 1) for sign in (-1, 1))
        beyond = [number for number in around if number >= low]
        _ask_all(probe, axis, _affordable(probe, field, axis, beyond, 2 * budget), failures=ENOUGH_FAILURES)


def so_far(probe: Probe, axis: Axis) -> Sweep:
    """What is known on a line."""

    def numbers(pairs: Iterable[Pair]) -> tuple[int, ...]:
        return tuple(sorted(number for pair in pairs if (number := axis.number(pair)) is not None))

    return Sweep(axis, numbers(probe.pairs(True)), numbers(probe.pairs(False)), numbers(probe.untested))


def _ask_all(probe: Probe, axis: Axis, numbers: Iterable[int], *, failures: int | None = None) -> None:
    """Ask in turn, until enough failures are known or they cost too much."""
    costly, left = probe.costly, iter(numbers)
    while batch := list(islice(left, probe.trial.round if isinstance(probe.trial, Shared) else 1)):
        probe.prepare([axis.at(number) for number in dict.fromkeys(batch)])
        for number in batch:
            enough = failures is not None and len(so_far(probe, axis).fails) >= failures
            if enough or probe.costly - costly >= COSTLY_FAILURES:
                return
            probe.ask(*axis.at(number))


def _affordable(probe: Probe, field: Field, axis: Axis, numbers: Iterable[int], budget: float) -> Iterator[int]:
    """The numbers in turn, tried ones left out, as long as their work fits into the budget."""
    for number in numbers:
        pair = axis.at(number)
        if pair not in probe.outcomes and pair not in probe.untested:
            budget -= work(field.base, *pair)
            if budget < 0:
                return
            yield number


def _where_together_fails(probe: Probe, field: Field, axis: Axis, low: int, high: int) -> Iterator[int]:
    """The lengths that fail with L and S tied, and those beside them."""
    for rows, keys in probe.pairs(True):
        if field.axes[0].number((rows, keys)) is not None:
            number = keys if axis.vary == KEYS else rows
            yield from (near for near in (number - 1, number, number + 1) if low <= near <= high)


def _beside_diagonal(axis: Axis, low: int, high: int) -> Iterator[int]:
    """Where L and S are equal or nearly so, for lines that cross L = S."""
    if axis.vary != TOGETHER:
        middle = axis.rows if axis.vary == KEYS else axis.keys
        near = range(middle - BESIDE_DIAGONAL, middle + BESIDE_DIAGONAL + 1)
        yield from (number for number in near if low <= number <= high)
