"""Which row of the mask a broken kernel used for a query row: every row is tried, then rules over all wrong rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.believed import Believed, Counterfactual, by_definition
from sdpa_repro.replaying.reference import four_dims, rows_of

ALL_ROWS = 2048
"""Up to this many mask rows each is tried; beyond, those that a plausible slip would reach."""

CHUNK = 512
"""Mask rows tried together."""

POWERS = tuple(1 << k for k in range(3, 33))
"""Where offsets wrap, and the tiles whose first row may be used for all."""

MOST = 64
"""Rules kept, the plainest first: mask rows that are all alike allow one for each."""

OFFSET_BITS = (29, 30, 31, 32)
"""Element offsets into the mask that overflow: 2^31 and 2^32 bytes of 2- and 4-byte elements, or elements."""


@dataclass(frozen=True)
class Rule:
    """query row r → mask row `at(r)`, with the words for it."""

    id: str
    parameters: tuple[str | int, ...]
    clause: str
    at: Callable[[Tensor], Tensor]


Matches = Callable[[int, int, Tensor, Believed], Tensor]
"""(batch, head, rows, prediction) → bool (n,): the output of these rows is the prediction, to noise."""


def has_rows(flat: AttentionCall) -> bool:
    """Whether the mask (B, H, L, S) differs from row to row in memory, so that a row can be mistaken."""
    mask = flat.attn_mask
    return mask is not None and mask.shape[2] > 1 and mask.stride(2) != 0


def mask_row_rules(call: AttentionCall, wrong: list[tuple[int, int, int]], matches: Matches) -> list[Rule]:
    """Rules under which the first and the last of some wrong rows (batch, head, row) used another row's mask.

    They are to be tested on all wrong rows (`with_rule`): two rows suggest a rule and prove nothing.
    """
    flat = four_dims(call)
    if not has_rows(flat) or not wrong:
        return []
    first, last = min(wrong, key=lambda place: place[2]), max(wrong, key=lambda place: place[2])
    rows = flat.query.shape[2]
    places = [first] if first[2] == last[2] else [first, last]
    used = [(place[2], set(_used_rows(flat, place, matches))) for place in places]
    if not all(found for _, found in used):
        return []
    rules = [rule for rule in _rules(used, rows) if all(int(rule.at(torch.tensor(r))) in found for r, found in used)]
    different: dict[tuple[int, ...], Rule] = {}
    for rule in rules:  # rules that name the same mask row for every wrong row say the same; the plainest is kept
        reached = rule.at(torch.tensor(sorted({row for _, _, row in wrong})))
        if int(reached.min()) >= 0 and int(reached.max()) < rows:
            different.setdefault(tuple(reached.tolist()), rule)
    return list(different.values())[:MOST]


def with_rule(call: AttentionCall, rule: Rule) -> Counterfactual:
    """The counterfactual in which each query row uses the mask row of `rule`."""
    flat = four_dims(call)

    def compute(batch: int, head: int, rows: Tensor) -> Believed | None:
        source = rule.at(rows)
        if not has_rows(flat) or int(source.min()) < 0 or int(source.max()) >= flat.query.shape[2]:
            return None
        return _with_mask_rows(flat, batch, head, rows, source)

    return Counterfactual(rule.id, (rule.id, *rule.parameters), rule.clause, compute)


def _with_mask_rows(flat: AttentionCall, batch: int, head: int, rows: Tensor, source: Tensor) -> Believed | None:
    """Attention of query `rows` with the mask rows `source`, both int64 (n,); a causal flag stays the row's own."""
    right = rows_of(replace(flat, attn_mask=None), batch, head, rows)
    assert flat.attn_mask is not None
    mask = flat.attn_mask[batch, head, source][None, None]
    if right.attn_mask is not None:
        causal = right.attn_mask
        mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
    return by_definition(replace(right, attn_mask=mask))


def _used_rows(flat: AttentionCall, place: tuple[int, int, int], matches: Matches) -> Iterator[int]:
    """The mask rows with which the output of one query row comes out."""
    batch, head, row = place
    count = flat.query.shape[2]
    tried = torch.arange(count) if count <= ALL_ROWS else torch.tensor(sorted(set(_plausible(row, count))))
    for part in tried.to(flat.query.device).split(CHUNK):
        same = torch.full_like(part, row)
        believed = _with_mask_rows(flat, batch, head, same, part)
        if believed is not None:
            yield from part[matches(batch, head, same, believed)].tolist()


def _plausible(row: int, count: int) -> Iterable[int]:
    """Mask rows that a slip would reach from `row`: the ends, neighbours, tile starts, wrapped offsets."""
    near = {*range(64), *range(count - 64, count), *range(row - 16, row + 17)}
    for power in POWERS:
        near |= {row - power, row + power, row % power, row // power * power, power, power - 1}
    return (candidate for candidate in near if 0 <= candidate < count)


def _rules(used: list[tuple[int, set[int]]], rows: int) -> Iterator[Rule]:
    """Rules that the first place allows, the plainest first; constants alone when only one query row is wrong."""
    row, found = used[0]
    yield from map(_constant, sorted(found))
    if len(used) == 1:
        return
    yield from (_shift(other - row, row) for other in sorted(found, key=lambda other: (abs(other - row), other)))
    for power in (power for power in POWERS if power < rows):
        yield _modulo(power)
        yield _tile(power)


def _constant(other: int) -> Rule:
    return Rule("mask_row", ("constant", other), f"computed with mask row {other}", lambda r: torch.full_like(r, other))


def _shift(distance: int, first: int) -> Rule:
    """Mask row r + distance; back by a power of two, and only from that row on, is an offset that wraps."""
    sign = "-" if distance < 0 else "+"
    clause = f"computed with mask row r {sign} {abs(distance)} for query row r"
    if -distance in POWERS and first >= -distance:
        clause = f"{clause}: the offset wraps at {-distance} rows"
        return Rule("offset_wrapped", ("shift", distance), clause, lambda r: r + distance)
    return Rule("mask_row", ("shift", distance), clause, lambda r: r + distance)


def _modulo(power: int) -> Rule:
    clause = f"computed with mask row r % {power} for query row r: the offset wraps at {power} rows"
    return Rule("offset_wrapped", ("modulo", power), clause, lambda r: r % power)


def _tile(power: int) -> Rule:
    clause = f"computed with the mask of the first row of their tile of {power} rows"
    return Rule("mask_row", ("tile", power), clause, lambda r: r // power * power)


def wrapped_offsets(call: AttentionCall, bits: Iterable[int] = OFFSET_BITS) -> list[Counterfactual]:
    """The mask read at an element offset modulo 2^bits, from a dense (L, S) plane or one with padded rows.

    Source: pytorch#187227 (memory-efficient kernel, L·S > 2^32). Only for masks that reach so far.
    """
    flat = four_dims(call)
    if not has_rows(flat):
        return []
    rows, keys = flat.query.shape[2], flat.key.shape[2]
    found = []
    for bit in bits:
        for width in sorted({keys, -(-keys // 8) * 8, -(-keys // 16) * 16}):
            if rows * width > 1 << bit:
                clause = f"computed with attn_mask read at an offset that wraps at 2^{bit} elements"
                compute = _wrapped(flat, 1 << bit, width)
                found.append(Counterfactual("offset_wrapped", ("offset_wrapped", "bits", bit, width), clause, compute))
    return found


def _wrapped(flat: AttentionCall, limit: int, width: int) -> Callable[[int, int, Tensor], Believed | None]:
    def compute(batch: int, head: int, rows: Tensor) -> Believed | None:
        assert flat.attn_mask is not None
        keys = flat.key.shape[2]
        offset = (rows[:, None] * width + torch.arange(keys, device=rows.device)) % limit
        row, key = offset // width, offset % width
        mask = flat.attn_mask[batch, head, row, key.clamp(max=keys - 1)]
        mask = mask.masked_fill(key >= keys, True if mask.dtype == torch.bool else 0.0)
        right = rows_of(replace(flat, attn_mask=None, is_causal=False), batch, head, rows)
        return by_definition(replace(right, attn_mask=mask[None, None]))

    return compute
