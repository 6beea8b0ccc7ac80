"""Passes that make a call smaller: batch rows, heads, lengths, widths.

Widths stay multiples of 8: the fused CUDA kernels take no other ones in half precision, and a script that came
from a CPU should run there too. L and S stay equal when they are: that is what people read and run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sdpa_repro.recipe import Kind
from sdpa_repro.reducing.candidate import INPUTS, Candidate, Sizes, formed, sized
from sdpa_repro.reducing.forms import Form, dense_strides
from sdpa_repro.reducing.reducer import Clues

STEP = 8
PERIODS = (256, 176, 128, 112, 96, 80, 64, 48, 32, 16, 8, 4, 2, 1)
"""Tile sizes of kernels, and what they are multiples of."""

SCAN, CAPTURED_SCAN = 512, 16
"""Lengths tried one by one from 1 up; with captured values only a few, since closed forms come later."""

PAIRS = 64


def batch(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """Fewer batch rows: the wrong one alone, each other one, then more. (4, H, L, E) becomes (1, H, L, E)."""
    old = candidate.sizes
    for first in dict.fromkeys([min(clues.batch, old.B - 1), *range(min(old.B, 8))]):
        yield sized(candidate, replace(old, B=1), batch=first)
    for count in range(2, min(old.B, 9)):
        yield sized(candidate, replace(old, B=count), batch=min(clues.batch, old.B - count))


def heads(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """Fewer heads, the fewest first; grouped queries keep key/value heads and groups of equal size.

    Expanded heads need two, so that a reader sees `.expand`; an `as_strided` could do with one.
    """
    old = candidate.sizes
    for count, kv in _head_counts(old):
        chosen = _window(old, count, kv, clues.head)
        yield from varied(candidate, replace(old, H=count, Hkv=kv), heads=chosen)


def _head_counts(old: Sizes) -> list[tuple[int, int]]:
    """(query heads, key/value heads) in ascending order, at most PAIRS of them."""
    if old.Hkv == old.H:
        counts = [*range(1, min(old.H, 17)), *(1 << power for power in range(5, 12))]
        return [(count, count) for count in counts if count < old.H]
    if old.Hkv == 1:
        return [(count, 1) for count in range(1, old.H)][:PAIRS]
    group = old.H // old.Hkv
    pairs = [(kv * size, kv) for kv in range(1, old.Hkv + 1) for size in range(1, group + 1)]
    return sorted(pairs)[:PAIRS]


def _window(old: Sizes, count: int, kv: int, head: int) -> list[int]:
    """Captured query heads to keep: with `head` among them, `count / kv` from each of `kv` groups."""
    head = min(head, old.H - 1)
    if old.Hkv == old.H:
        first = min(head, old.H - count)
        return list(range(first, first + count))
    group, size = old.H // old.Hkv, count // kv
    first_group = min(head // group, old.Hkv - kv)
    inside = min(head % group, group - size)
    return [(first_group + index) * group + inside + member for index in range(kv) for member in range(size)]


def lengths(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """Shorter sequences. First lengths that leave the same residues, then steps of powers of two, then all from 1 up.

    289 falls to 33 by its residue modulo 32; a fault from row 128 on is found by the steps; the rest by the scan.
    """
    old = candidate.sizes
    scan = CAPTURED_SCAN if candidate.captured else SCAN
    if old.L == old.S and not clues.frozen & {"L", "S"}:
        for length in shorter(old.L, scan):
            yield from varied(candidate, replace(old, L=length, S=length))
        return
    for rows, keys in _apart(old, scan):
        if (rows == old.L or "L" not in clues.frozen) and (keys == old.S or "S" not in clues.frozen):
            yield from varied(candidate, replace(old, L=rows, S=keys))


def _apart(old: Sizes, scan: int) -> Iterator[tuple[int, int]]:
    """L and S that differ: made equal, shortened together, then one by one."""
    yield from ((length, length) for length in sorted({old.L, old.S}))
    for length in shorter(min(old.L, old.S), 0):
        taken = min(old.L, old.S) - length
        yield old.L - taken, old.S - taken
    yield from ((length, old.S) for length in shorter(old.L, scan))
    yield from ((old.L, length) for length in shorter(old.S, scan))


def shorter(length: int, scan: int) -> list[int]:
    """Lengths below `length` in the order in which they are worth trying."""
    residues = {here for period in PERIODS for here in (length % period, length % period + period)}
    steps = [length - (1 << power) for power in range(length.bit_length(), -1, -1)]
    found = [*sorted(residues), *steps, *range(1, min(length, scan + 1))]
    return [here for here in dict.fromkeys(found) if 0 < here < length]


def widths(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """Smaller E and Ev, together while they are equal: multiples of 8, coarse ones first."""
    old = candidate.sizes
    if old.Ev == old.E:
        for width in narrower(old.E):
            yield from varied(candidate, replace(old, E=width, Ev=width))
        return
    for width in narrower(old.E):
        yield from varied(candidate, replace(old, E=width))
    for width in narrower(old.Ev):
        yield from varied(candidate, replace(old, Ev=width))


def narrower(width: int) -> list[int]:
    """Multiples of 8 below `width`: those at the edges of kernel classes first, then all in ascending order."""
    edges = [edge for base in (0, 32, 64, 128, 256) for edge in (base, base + STEP)]
    return [here for here in dict.fromkeys([*edges, *range(STEP, width, STEP)]) if 0 < here < width]


def trade(candidate: Candidate, clues: Clues) -> Iterator[Candidate]:
    """The smallest width with longer sequences: 65 rows of width 8 are fewer numbers than 33 rows of width 136."""
    old = candidate.sizes
    if candidate.captured or old.L != old.S or old.E <= STEP:
        return
    for length in range(1, SCAN):
        proposal = sized(candidate, replace(old, L=length, S=length, E=STEP, Ev=min(STEP, old.Ev)))
        if proposal.elements >= candidate.elements:
            return
        yield proposal


def two_heads(candidate: Candidate) -> Candidate | None:
    """Two heads instead of one, key and value expanded from one head; None unless one head needs `as_strided`.

    Stride 0 in a dimension of size 1 takes an `as_strided`; with two heads it is `.expand`, as models write it.
    """
    sizes, fresh = candidate.sizes, {}
    if sizes.H != 1 or sizes.Hkv != 1 or not candidate.exact or set(INPUTS) & set(candidate.captured):
        return None
    for name in INPUTS:
        tensor = candidate.call.tensors[name]
        shape = (tensor.shape[0], 2, *tensor.shape[2:])
        stride = dense_strides((tensor.shape[0], 1, *tensor.shape[2:]))
        repeated = name != "query" and tensor.stride(1) == 0
        fresh[name] = tensor.new_empty_strided(shape, (stride[0], 0, *stride[2:]) if repeated else dense_strides(shape))
    wider = replace(candidate, call=candidate.call.with_tensors(fresh), exact=False)
    return formed(wider, {name: candidate.forms[name] for name in INPUTS})


def varied(candidate: Candidate, sizes: Sizes, heads: list[int] | None = None) -> Iterator[Candidate]:
    """The candidate in other sizes: captured positions cut at either end; closed forms as they are, and with
    seeded values instead of plain ones, since a fault can be invisible at a length with plain values."""
    if sizes == candidate.sizes:
        return
    proposal = sized(candidate, sizes, heads=heads or ())
    yield proposal
    old = candidate.sizes
    if candidate.captured and (sizes.L, sizes.S) != (old.L, old.S):
        yield sized(candidate, sizes, end="head")
    plain = [name for name, form in proposal.forms.items() if name != "attn_mask" and _is_plain(form)]
    if plain:
        seeded = formed(proposal, {name: Form(Kind.RANDINT, seed="qkv".index(name[0])) for name in plain})
        if seeded is not None:
            yield seeded


def _is_plain(form: Form) -> bool:
    """Whether a form may be replaced by seeded values: nothing in it was found to matter."""
    small = form.kind is Kind.FULL and abs(form.constant) <= 1
    return form.planted is None and (small or form.kind in (Kind.ZEROS, Kind.ARANGE, Kind.EYE))
