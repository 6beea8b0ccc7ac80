"""The fit finds the rule a predicate was written from, in its shortest form, and none where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sdpa_repro.explaining.rules import Clause, Rule, fit

Predicate = Callable[[int, int], bool]


def lines_through(rows: int, keys: int, longest: int = 353) -> set[tuple[int, int]]:
    """L and S together, L alone and S alone, through one pair of lengths."""
    apart = keys - rows
    together = {(number, number + apart) for number in range(1, longest + 1) if number + apart > 0}
    alone = {(number, keys) for number in range(1, longest + 1)} | {(rows, number) for number in range(1, longest + 1)}
    return together | alone


def fitted(predicate: Predicate, rows: int, keys: int, exceptions: int = 0) -> Rule | None:
    points = sorted(lines_through(rows, keys))
    fails = [point for point in points if predicate(*point)]
    return fit(fails, [point for point in points if not predicate(*point)], exceptions=exceptions)


@pytest.mark.parametrize(
    ("rule", "rows", "keys", "over"),
    [
        ("L % 32 == 1 and L > 1", 289, 289, "L"),
        ("L % 64 == 1", 65, 65, "L"),
        ("S % 32 == 1", 33, 33, "S"),
        ("L % 48 == 5", 53, 53, "L"),
        ("L % 80 == 3", 83, 83, "L"),
        ("L % 112 == 7", 119, 119, "L"),
        ("L % 176 == 9", 185, 185, "L"),
        ("L <= 8", 5, 5, "L"),
        ("L < 128", 100, 100, "L"),
        ("L >= 128", 289, 289, "L"),
        ("L > 256", 289, 289, "L"),
        ("S >= 65", 100, 100, "S"),
        ("L % 128 == 64", 192, 192, "L"),
        ("L == 1 and S > 1", 1, 33, "L and S"),
        ("L == 289", 289, 289, "L"),
        ("L == 289 and S == 289", 289, 289, "L and S"),
        ("L % 8 != 0", 33, 33, "L"),
        ("L % 16 in (1, 6)", 33, 33, "L"),
        ("1 <= L % 64 <= 16", 33, 40, "L"),
        ("L % 64 >= 48", 63, 63, "L"),
        ("L > S", 33, 30, "L and S"),
        ("L <= S", 33, 40, "L and S"),
        ("L % 32 == 1 and S % 48 == 0", 33, 48, "L and S"),
        ("S % 32 == 1 and L >= S", 97, 97, "L and S"),
    ],
)
def test_a_rule_is_found_as_it_was_written(rule: str, rows: int, keys: int, over: str) -> None:
    predicate = eval(f"lambda L, S: {rule}")
    found = fitted(predicate, rows, keys)
    assert str(found) == rule.replace("S >= 65", "S > 64")
    assert found is not None
    assert found.over == over
    assert all(found.fails(*point) == predicate(*point) for point in lines_through(rows, keys))


def test_two_residues_half_a_period_apart_are_one_of_half_the_modulus() -> None:
    assert str(fitted(lambda rows, keys: rows % 32 in (1, 17), 33, 33)) == "L % 16 == 1"


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_random_failures_have_no_rule(share: float, seed: int) -> None:
    draw = random.Random(seed)
    failing = {point for point in sorted(lines_through(33, 33)) if draw.random() < share} | {(33, 33)}
    assert fitted(lambda rows, keys: (rows, keys) in failing, 33, 33) is None


def test_failures_without_passes_and_the_reverse_have_no_rule() -> None:
    assert fit([(1, 1), (2, 2)], []) is None
    assert fit([], [(1, 1), (2, 2)]) is None


def test_a_few_exceptions_are_allowed_at_a_price() -> None:
    def predicate(rows: int, keys: int) -> bool:
        return rows % 32 == 1 and (rows, keys) not in ((97, 97), (161, 33))

    assert fitted(predicate, 33, 33) is None
    assert str(fitted(predicate, 33, 33, exceptions=5)) == "L % 32 == 1"


def test_a_bound_between_lengths_that_were_tried_says_what_is_known() -> None:
    assert str(fit([(n, n) for n in (300, 400)], [(n, 300) for n in (100, 200)])) == "L > 200"
    assert str(fit([(n, n) for n in (3, 4)], [(n, 4) for n in (5, 6)])) == "L <= 4"


def test_clauses_read_as_python() -> None:
    clauses = [Clause("L", "in", (1, 5), 16), Clause("S", "from", (2, 4), 8), Clause("L", "<", against_s=True)]
    text = str(Rule(tuple(clauses)))
    assert text == "L % 16 in (1, 5) and 2 <= S % 8 <= 4 and L < S"
    for rows in range(1, 40):
        for keys in range(1, 40):
            assert eval(text, {"L": rows, "S": keys}) == Rule(tuple(clauses)).fails(rows, keys)
