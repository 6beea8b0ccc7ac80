"""Lengths that fail and pass, laid out so that equal residues stand under each other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sdpa_repro.explaining.length_result import LengthRule, Sweep

USUAL_PERIOD = 32
NARROW, WIDE = 20, 64
"""Columns of a strip: a multiple of the rule's modulus in between where there is one."""

MOST_LINES = 40
"""Lines of one strip; those without a failing length go first."""

_MODULUS = re.compile(r"% (\d+)")


@dataclass(frozen=True)
class Line:
    """Lengths `start` … `start + period - 1`. fails, passes, untested: columns, counted from 0."""

    start: int
    fails: tuple[int, ...]
    passes: tuple[int, ...]
    untested: tuple[int, ...]


@dataclass(frozen=True)
class Strip:
    """One sweep as lines of `period` lengths. variable: "L" or "S". residues: columns that hold a failing length.

    origin: the failing call's own length. left_out: lines not drawn, `failing_out` of them with a failing length.
    """

    words: str
    variable: str
    period: int
    lines: tuple[Line, ...]
    origin: int
    residues: tuple[int, ...]
    left_out: int = 0
    failing_out: int = 0

    @property
    def label(self) -> str:
        """For those who cannot see it."""
        return f"{self.words}. Each line holds {self.period} lengths."


def strips(rule: LengthRule | None) -> list[Strip]:
    """The sweeps that tried more than one length; those in which the length decides first."""
    if rule is None:
        return []
    told = [sweep for sweep in rule.sweeps if len(sweep.fails) + len(sweep.passes) > 1]
    return [strip(sweep, rule) for sweep in sorted(told, key=lambda sweep: not sweep.decides)]


def moduli(rule: str | None) -> list[int]:
    """The numbers that a rule takes remainders by, in its order."""
    return [int(text) for text in _MODULUS.findall(rule or "")]


def period_of(rule: str | None) -> int:
    """Columns for a rule: its largest modulus, doubled until it is wide enough; `USUAL_PERIOD` without one."""
    fitting = [modulus for modulus in moduli(rule) if 2 <= modulus <= 4 * WIDE]
    if not fitting:
        return USUAL_PERIOD
    period = max(fitting)
    return period if period >= NARROW else period * -(-NARROW // period)


def strip(sweep: Sweep, rule: LengthRule) -> Strip:
    """Lay one sweep out."""
    period = period_of(rule.rule)
    lines: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for index, numbers in enumerate((sweep.fails, sweep.passes, sweep.untested)):
        for number in numbers:
            lines.setdefault(number // period, ([], [], []))[index].append(number % period)
    wanted = _chosen(lines, sweep.axis.origin // period)
    return Strip(
        words=sweep.words(rule.fitted),
        variable="S" if sweep.axis.vary == "S" else "L",
        period=period,
        lines=tuple(Line(line * period, *map(_sorted, lines[line])) for line in wanted),
        origin=sweep.axis.origin,
        residues=_sorted({number % period for number in sweep.fails}),
        left_out=len(lines) - len(wanted),
        failing_out=sum(bool(fails) for line, (fails, _, _) in lines.items() if line not in wanted),
    )


def _chosen(lines: dict[int, tuple[list[int], list[int], list[int]]], origin: int) -> list[int]:
    """Lines to draw, in order: those with failing lengths and those near the call's own length before others."""
    by_worth = sorted(lines, key=lambda line: (not lines[line][0], abs(line - origin)))
    return sorted(by_worth[:MOST_LINES])


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(numbers))
