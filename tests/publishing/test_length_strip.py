"""Lengths laid out: equal residues stand in one column."""

from __future__ import annotations

import pytest

from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.explaining.length_result import LengthRule, Sweep
from sdpa_repro.publishing import length_strip
from sdpa_repro.publishing.length_strip import period_of, strips
from tests.publishing.sections import length_rule


def test_failing_lengths_of_one_residue_stand_in_one_column() -> None:
    (strip,) = strips(length_rule())
    assert strip.period == 32
    assert strip.residues == (1,)
    assert [line.start for line in strip.lines] == [0, 32, 64, 96, 128]
    assert [line.fails for line in strip.lines] == [(), (1,), (1,), (1,), ()]
    drawn = sum(len(line.fails) + len(line.passes) for line in strip.lines)
    assert drawn == 127
    assert strip.origin == 65


@pytest.mark.parametrize(
    ("rule", "period"),
    [
        (None, 32),
        ("L > 5", 32),
        ("L % 64 == 1", 64),
        ("L % 48 == 1 and S % 16 == 0", 48),
        ("L % 7 == 3", 21),
        ("L % 1000 == 3", 32),
        ("L % 176 == 1", 176),
    ],
)
def test_a_line_holds_a_multiple_of_the_modulus(rule: str | None, period: int) -> None:
    assert period_of(rule) == period


def test_sweeps_that_decide_come_first_and_single_lengths_are_left_out() -> None:
    same = Sweep(Axis("L and S", 9, 9), (2, 3, 9), (), ())
    split = Sweep(Axis("S", 9, 9), (9,), (8,), (1,))
    alone = Sweep(Axis("L", 9, 9), (9,), (), ())
    rule = LengthRule(None, "S", 4, 1, 0, 0, None, None, (same, alone, split), why="none")
    found = strips(rule)
    assert [strip.variable for strip in found] == ["S", "L"]
    assert found[0].lines[0].untested == (1,)
    assert strips(None) == []


def test_of_many_lines_those_with_failing_lengths_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_strip, "MOST_LINES", 3)
    sweep = Sweep(Axis("L", 100, 9), (100, 3000), tuple(range(1, 99)), ())
    (strip,) = strips(LengthRule(None, "L", 2, 98, 0, 0, None, None, (sweep,)))
    assert [line.start for line in strip.lines] == [64, 96, 2976]
    assert (strip.left_out, strip.failing_out) == (2, 0)


def test_lines_that_are_left_out_with_failing_lengths_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_strip, "MOST_LINES", 3)
    sweep = Sweep(Axis("L", 100, 9), tuple(range(1, 128)), (130,), ())
    (strip,) = strips(LengthRule(None, "L", 127, 1, 0, 0, None, None, (sweep,)))
    assert (strip.left_out, strip.failing_out) == (2, 1)
