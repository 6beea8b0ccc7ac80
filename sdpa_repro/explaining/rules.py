"""The simplest rule over L and S that separates failing from passing lengths.

A rule is a conjunction of clauses: a residue of L or S (any modulus up to 256: tiles of 48, 80, 112 and 176
exist), a bound, or a comparison of L with S. Every candidate clause holds at all failing lengths, so a rule is
right when its clauses together exclude all passing ones; among those the one with the shortest description is
taken, and its bounds are moved out as far as the passing lengths let them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import eq, ge, gt, le, lt, ne
from types import MappingProxyType

LARGEST_MODULUS = 256

LARGEST_SET = 4
"""Residues that one clause may list."""

EXCEPTION_COST = 0.7
"""What a passing length that the rule says fails costs, in clauses, where exceptions are allowed."""

Lengths = tuple[int, int]
"""L and S."""

_COMPARE: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
)


@dataclass(frozen=True)
class Clause:
    """One condition on "L" or "S": `variable op number`, of the residue when there is a modulus.

    op: a comparison, "in" (residues listed in `numbers`) or "from" (a range of residues, first and last).
    With `against_s` the number is S itself.
    """

    variable: str
    op: str
    numbers: tuple[int, ...] = ()
    modulus: int = 0
    against_s: bool = False

    def __str__(self) -> str:
        name = f"{self.variable} % {self.modulus}" if self.modulus else self.variable
        if self.op == "from":
            return f"{self.numbers[0]} <= {name} <= {self.numbers[1]}"
        if self.op == "in":
            return f"{name} in ({', '.join(map(str, self.numbers))})"
        return f"{name} {self.op} {'S' if self.against_s else self.numbers[0]}"

    def holds(self, rows: int, keys: int) -> bool:
        """Whether the clause is true at L = `rows`, S = `keys`."""
        number = rows if self.variable == "L" else keys
        if self.modulus:
            number %= self.modulus
        if self.op == "in":
            return number in self.numbers
        if self.op == "from":
            return self.numbers[0] <= number <= self.numbers[1]
        return _COMPARE[self.op](number, keys if self.against_s else self.numbers[0])

    @property
    def cost(self) -> float:
        """Length of the description; ties go to L and to small moduli."""
        own = 0.01 * (self.variable == "S") + 0.2 * self.against_s + 0.02 * (self.op in ("<=", ">="))
        if not self.modulus:
            return 1.0 + own
        shape = {"==": 0.0, "!=": 0.2, "in": 0.75 * (len(self.numbers) - 1), "from": 1.0}.get(self.op, 0.6)
        return 2.0 + own + shape + math.log2(self.modulus) / 64

    @property
    def is_bound(self) -> bool:
        """A limit on a length, such as L >= 128."""
        return not self.modulus and not self.against_s and self.op in ("<=", ">=", "<", ">")


@dataclass(frozen=True)
class Rule:
    """Clauses that must all hold for a length to fail."""

    clauses: tuple[Clause, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.clauses))

    def fails(self, rows: int, keys: int) -> bool:
        """What the rule says about L = `rows`, S = `keys`."""
        return all(clause.holds(rows, keys) for clause in self.clauses)

    @property
    def over(self) -> str:
        """Which lengths its clauses are about: "L", "S" or "L and S"."""
        names = {clause.variable for clause in self.clauses}
        if any(clause.against_s for clause in self.clauses):
            names.add("S")
        return " and ".join(sorted(names))


def fit(fails: Sequence[Lengths], passes: Sequence[Lengths], *, exceptions: int = 0) -> Rule | None:
    """The simplest rule that holds at every failing length and at no passing one; None when there is none.

    exceptions: so many passing lengths may be called failing, at a price.
    """
    if not fails or not passes:
        return None
    everyone = (1 << len(passes)) - 1
    plain = [(clause, _excluded(clause, passes)) for clause in _plain_clauses(fails)]
    plain = [(clause, mask) for clause, mask in plain if mask]
    residues = {name: _useful(_residue_clauses(fails, axis), passes) for axis, name in enumerate("LS")}
    best: tuple[float, tuple[Clause, ...]] = (math.inf, ())
    for few in _subsets(plain):
        covered = _union(few)
        cost = sum(clause.cost for clause, _ in few)
        most = 3 if not few else 4 - len(few)
        for chosen in _residue_choices(residues, most, everyone & ~covered, exceptions):
            missed = (everyone & ~covered & ~_union(chosen)).bit_count()
            total = cost + sum(clause.cost for clause, _ in chosen) + EXCEPTION_COST * missed
            if missed <= exceptions and (few or chosen) and total < best[0] - 1e-9:
                best = (total, tuple(clause for clause, _ in (*chosen, *few)))
    return Rule(_loosened(best[1], fails, passes)) if best[1] else None


Known = tuple[Clause, int]
"""A clause and the passing lengths it excludes, as bits."""


def _union(chosen: Sequence[Known]) -> int:
    bits = 0
    for _, mask in chosen:
        bits |= mask
    return bits


def _subsets(plain: Sequence[Known]) -> Iterator[tuple[Known, ...]]:
    for size in range(4):
        yield from combinations(plain, size)


def _residue_choices(
    residues: Mapping[str, Sequence[Known]], most: int, left: int, exceptions: int
) -> Iterator[tuple[Known, ...]]:
    """No residue, one, or one of each length, of those that exclude all (but `exceptions`) of what is left."""
    yield ()
    if most < 2:
        return
    found = False
    for known in (*residues["L"], *residues["S"]):
        if (left & ~known[1]).bit_count() <= exceptions:
            found = True
            yield (known,)
    if not found or exceptions:
        for one in residues["L"]:
            rest = left & ~one[1]
            for other in residues["S"]:
                if (rest & ~other[1]).bit_count() <= exceptions:
                    yield (one, other)


def _excluded(clause: Clause, passes: Sequence[Lengths]) -> int:
    bits = 0
    for index, (rows, keys) in enumerate(passes):
        if not clause.holds(rows, keys):
            bits |= 1 << index
    return bits


def _useful(clauses: Iterator[Clause], passes: Sequence[Lengths]) -> list[Known]:
    """Clauses that exclude something no cheaper clause excludes as well."""
    kept: list[Known] = []
    for clause in sorted(clauses, key=lambda clause: clause.cost):
        mask = _excluded(clause, passes)
        if mask and all(mask & ~other for _, other in kept):
            kept.append((clause, mask))
    return kept


def _plain_clauses(fails: Sequence[Lengths]) -> Iterator[Clause]:
    """Bounds, single values and comparisons that hold at every failing length."""
    for axis, name in enumerate("LS"):
        values = [point[axis] for point in fails]
        if min(values) == max(values):
            yield Clause(name, "==", (values[0],))
        yield Clause(name, ">=", (min(values),))
        yield Clause(name, "<=", (max(values),))
    for op in ("==", "<", ">", "<=", ">=", "!="):
        if all(_COMPARE[op](rows, keys) for rows, keys in fails):
            yield Clause("L", op, against_s=True)


def _residue_clauses(fails: Sequence[Lengths], axis: int) -> Iterator[Clause]:
    """Residues of one length that hold at every failing length, for all moduli."""
    name, values = "LS"[axis], {point[axis] for point in fails}
    if len(values) < 2:
        return
    for modulus in range(2, LARGEST_MODULUS + 1):
        found = sorted({value % modulus for value in values})
        if len(found) == 1:
            yield Clause(name, "==", (found[0],), modulus)
        elif len(found) == modulus - 1:
            missing = set(range(modulus)) - set(found)
            yield Clause(name, "!=", (missing.pop(),), modulus)
        elif len(values) >= 2 * len(found) and len(found) <= LARGEST_SET:
            yield Clause(name, "in", tuple(found), modulus)
        elif found[0] > 0 and 2 * len(found) >= modulus:
            yield Clause(name, "!=", (0,), modulus)
        if len(found) > 2 and len(values) >= 2 * len(found):
            yield from _residue_ranges(name, found, modulus)


def _residue_ranges(name: str, found: Sequence[int], modulus: int) -> Iterator[Clause]:
    if found[-1] - found[0] == len(found) - 1 and len(found) < modulus:  # nothing missing in between
        if found[0] == 0:
            yield Clause(name, "<=", (found[-1],), modulus)
        elif found[-1] == modulus - 1:
            yield Clause(name, ">=", (found[0],), modulus)
        else:
            yield Clause(name, "from", (found[0], found[-1]), modulus)


def gap(rule: Rule, clause: Clause, fails: Sequence[Lengths], passes: Sequence[Lengths]) -> tuple[int, int]:
    """For a bound: the nearest number that it alone excludes, and the nearest failing one.

    What lies between has not been tried, or other clauses of the rule exclude it. When it excludes nothing alone, both
    are the failing one.
    """
    axis = "LS".index(clause.variable)
    others = [other for other in rule.clauses if other is not clause]
    alone = [
        point[axis] for point in passes if not clause.holds(*point) and all(other.holds(*point) for other in others)
    ]
    values = [point[axis] for point in fails]
    low = clause.op in (">", ">=")
    inside = min(values) if low else max(values)
    alone = [number for number in alone if (number < inside if low else number > inside)]
    return (max(alone) if low else min(alone)) if alone else inside, inside


def _loosened(clauses: tuple[Clause, ...], fails: Sequence[Lengths], passes: Sequence[Lengths]) -> tuple[Clause, ...]:
    """Bounds as far out as the passing lengths let them, and written with the rounder number."""
    loose = list(clauses)
    for index, clause in enumerate(loose):
        if clause.is_bound:
            outside, inside = gap(Rule(tuple(loose)), clause, fails, passes)
            loose[index] = _bound(clause, outside, inside)
    return tuple(loose)


def _bound(clause: Clause, outside: int, inside: int) -> Clause:
    """The bound between a number that passes and the next one that fails."""
    if outside == inside:
        return clause
    low = clause.op == ">="
    tight = outside + 1 if low else outside - 1
    if tight == 1 and not low:
        return replace(clause, op="==", numbers=(1,))
    strict = outside == 1 or abs(inside - outside) > 1 or (outside & -outside) > (tight & -tight)
    op, number = (">" if low else "<", outside) if strict else (clause.op, tight)
    return replace(clause, op=op, numbers=(number,))
