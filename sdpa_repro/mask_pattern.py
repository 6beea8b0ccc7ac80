"""The rule behind a mask of one batch and head: causal, padding, window, bidirectional blocks, block-diagonal.

A pattern is found from what one pass over the mask collects (per row: first and last visible key and their
number; per key: whether any row sees it), so memory is O(L + S). Every rule tried here says "row i sees the
keys of one interval, without the keys hidden from all rows". A row that stays inside its interval, misses
nothing that is not hidden from all, and has the right number of entries is equal to the rule, so a pattern
that fits is exact, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdpa_repro.mask_scan import RowScan
from sdpa_repro.visibility import ranges_text, true_ranges

Range = tuple[int, int]
"""First and last index, both included."""

MAX_BLOCKS = 256


@dataclass(frozen=True)
class Document:
    """Rows that see one range of keys: a block of a block-diagonal mask. Both ranges inclusive."""

    rows: Range
    keys: Range


@dataclass(frozen=True)
class Pattern:
    """A mask of one batch and head as a rule. `kind` is "arbitrary" when no rule fits, and then only facts are given.

    Row i sees key j when i - before <= j <= i + after (None: no limit), or both lie in one of `blocks`
    (row i at position i + after), and when j lies in the keys of the document of row i (if there are documents),
    and j is not in `hidden_keys`. Rows in `open_rows` see every key, rows in `empty_rows` none, against the rule.
    """

    rows: int
    keys: int
    kind: str
    before: int | None = None
    after: int | None = None
    blocks: tuple[Range, ...] = ()
    documents: tuple[Document, ...] = ()
    hidden_keys: tuple[Range, ...] = ()
    open_rows: tuple[Range, ...] = ()
    empty_rows: tuple[Range, ...] = ()

    @property
    def is_diagonal(self) -> bool:
        """Whether the documents' key ranges do not overlap."""
        return all(a.keys[1] < b.keys[0] for a, b in zip(self.documents, self.documents[1:], strict=False))

    def visible(self, first: int, last: int) -> Tensor:
        """Rebuild the rows [first, last) of the mask from the rule, bool (rows, S). Not for "arbitrary"."""
        low, high = self.interval()
        key = torch.arange(self.keys)
        visible = (key >= low[first:last, None]) & (key < high[first:last, None])
        for start, stop in self.hidden_keys:
            visible[:, start : stop + 1] = False
        for ranges, value in ((self.open_rows, True), (self.empty_rows, False)):
            for start, stop in ranges:
                visible[max(start - first, 0) : max(stop + 1 - first, 0)] = value
        return visible

    def interval(self) -> tuple[Tensor, Tensor]:
        """[low, high) of the keys each row sees, hidden keys and exceptional rows not yet taken out; int64 (L,)."""
        row = torch.arange(self.rows)
        low = torch.zeros_like(row) if self.before is None else (row - self.before).clamp(0, self.keys)
        high = torch.full_like(row, self.keys) if self.after is None else (row + self.after + 1).clamp(0, self.keys)
        shift = self.after or 0
        for start, stop in self.blocks:
            inside = slice(max(start - shift, 0), max(stop + 1 - shift, 0))
            low[inside] = low[inside].clamp(max=start)
            high[inside] = high[inside].clamp(min=stop + 1)
        for document in self.documents:
            inside = slice(document.rows[0], document.rows[1] + 1)
            low[inside] = low[inside].clamp(min=document.keys[0])
            high[inside] = high[inside].clamp(max=document.keys[1] + 1)
        return low, torch.maximum(low, high)

    def words(self) -> list[str]:
        """The rule in words, the kind of mask first; what is certain when there is no rule."""
        words = _base_words(self)
        if self.blocks:
            words.append(f"image block{'s' * (len(self.blocks) > 1)} {ranges_text(self.blocks)} (bidirectional)")
        if self.documents:
            words.append(_document_words(self))
        words += _hidden_words(self)
        if self.open_rows:
            words.append(f"rows {ranges_text(self.open_rows)} see every key")
        return words


def _base_words(pattern: Pattern) -> list[str]:
    before, after = pattern.before, pattern.after
    if pattern.kind == "arbitrary":
        return ["arbitrary"] if after is None else ["arbitrary", "no row sees a later key"]
    if after is None and before is None:
        if pattern.documents:
            return ["block-diagonal" if pattern.is_diagonal else "block-wise"]
        return [] if pattern.hidden_keys else ["every row sees every key"]
    if after is None:
        return [f"band (row i sees keys from i - {before} on)"]
    if after not in (0, pattern.keys - pattern.rows):
        limits = f"up to i {after:+d}" if before is None else f"from i {-before:+d} to i {after:+d}"
        return [f"{'causal, shifted' if before is None else 'band'} (row i sees keys {limits})"]
    base = "causal" if after == 0 else f"causal, aligned to the bottom right (row i sees keys up to i {after:+d})"
    return [base] if before is None else [base, f"sliding window {before + after + 1}"]


def _document_words(pattern: Pattern) -> str:
    documents = pattern.documents
    shown = documents[:8]
    if all(document.rows == document.keys for document in documents):
        text = ", ".join(ranges_text([document.keys]) for document in shown)
    else:
        text = ", ".join(f"rows {ranges_text([d.rows])} with keys {ranges_text([d.keys])}" for d in shown)
    more = f" and {len(documents) - len(shown)} more" if len(documents) > len(shown) else ""
    return f"{len(documents)} blocks{' on the diagonal' * pattern.is_diagonal}: {text}{more}"


def _hidden_words(pattern: Pattern) -> list[str]:
    words, middle = [], []
    for start, stop in pattern.hidden_keys:
        if start == 0 and stop == pattern.keys - 1:
            words.append("every key hidden from every row")
        elif start == 0:
            words.append(f"left padding {stop + 1}")
        elif stop == pattern.keys - 1:
            words.append(f"right padding {stop - start + 1}")
        else:
            middle.append((start, stop))
    if middle:
        words.append(f"keys {ranges_text(middle)} hidden from every row")
    return words


def find_pattern(scan: RowScan, *, causal_flag: bool = False) -> Pattern:
    """The simplest rule that reproduces the scanned mask exactly, or an "arbitrary" pattern with what is certain.

    With `causal_flag` (the call says it is causal) the causal rules are tried first, so that L = 1 is called causal.
    """
    rows, keys = scan.count.numel(), scan.seen.numel()
    if not (scan.count > 0).any():
        return Pattern(rows, keys, "all_masked", hidden_keys=((0, keys - 1),))
    fits: list[Pattern] = []
    for open_rows in (0, scan.full_start):
        seen = scan.seen_later if open_rows else scan.seen
        for candidate in _candidates(scan, open_rows, causal_flag):
            fitted = _fit(candidate, scan, seen, open_rows)
            if fitted is not None and not fitted.empty_rows:
                return _named(fitted)
            fits += [fitted] if fitted is not None else []
    if fits:
        return _named(min(fits, key=lambda pattern: sum(b - a + 1 for a, b in pattern.empty_rows)))
    within = bool((scan.last <= torch.arange(rows))[scan.count > 0].all())
    hidden = tuple(true_ranges(~scan.seen))
    return Pattern(rows, keys, "arbitrary", after=0 if within else None, hidden_keys=hidden)


def _candidates(scan: RowScan, open_rows: int, causal_flag: bool) -> Iterator[Pattern]:
    """Rules worth trying, simplest first; each is checked afterwards."""
    rows, keys = scan.count.numel(), scan.seen.numel()
    plain = Pattern(rows, keys, "")
    live = (scan.count > 0) & (torch.arange(rows) >= open_rows)
    row = torch.arange(rows)[live]
    if not row.numel():
        return
    first, last = scan.first[live], scan.last[live]
    ahead = last - row
    offsets: list[int | None] = [0, keys - rows, int(ahead.mode().values), int(ahead.max()), int(ahead.min())]
    offsets = [*offsets, None] if causal_flag else [None, *offsets]
    offsets = list(dict.fromkeys(offsets))
    seen = scan.seen_later if open_rows else scan.seen
    for with_blocks in (False, True):
        for base in (replace(plain, after=after) for after in offsets):
            blocks = _blocks(row, last, base.after) if with_blocks else ()
            if with_blocks and not blocks:
                continue
            yield (base := replace(base, blocks=blocks))
            before = _window(row, first, seen, base)
            if before is not None:
                yield replace(base, before=before)
    for after in offsets:
        documents = _documents(row, first, last, split_by_last=after is None)
        if documents:
            yield replace(plain, after=after, documents=documents)


def _blocks(row: Tensor, last: Tensor, after: int | None) -> tuple[Range, ...]:
    """Ranges of positions that see ahead of the causal limit: runs of rows that end at the same later key.

    None unless they are apart and every block ends at a query row, else any growing reach would pass for blocks.
    """
    if after is None or after < 0:
        return ()
    ahead = last > row + after
    if not ahead.any():
        return ()
    position, stop = (row + after)[ahead], last[ahead]
    change = torch.ones_like(stop, dtype=torch.bool)
    change[1:] = stop[1:] != stop[:-1]
    if int(change.sum()) > MAX_BLOCKS:
        return ()
    starts, stops = position[change], stop[change]
    if bool((starts[1:] <= stops[:-1]).any()) or int(stops[-1]) > int(row[-1]) + after:
        return ()
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _window(row: Tensor, first: Tensor, seen: Tensor, base: Pattern) -> int | None:
    """How far back rows see, from rows whose first key cannot be explained by hidden keys or a block."""
    cut = first > 0
    cut &= seen[(first - 1).clamp(min=0)]
    for start, stop in base.blocks:
        position = row + (base.after or 0)
        cut &= (position < start) | (position > stop)
    back = (row - first)[cut]
    return int(back.mode().values) if back.numel() else None


def _documents(row: Tensor, first: Tensor, last: Tensor, *, split_by_last: bool) -> tuple[Document, ...]:
    """Runs of rows that start at the same key (and end at the same one), with the keys they reach."""
    change = torch.ones_like(first, dtype=torch.bool)
    change[1:] = first[1:] != first[:-1]
    if split_by_last:
        change[1:] |= last[1:] != last[:-1]
    starts = change.nonzero().flatten().tolist()
    if not 1 < len(starts) <= min(MAX_BLOCKS, row.numel() // 2):
        return ()
    found = []
    for start, stop in zip(starts, [*starts[1:], row.numel()], strict=True):
        rows = (int(row[start]), int(row[stop - 1]))
        found.append(Document(rows, (int(first[start]), int(last[start:stop].max()))))
    return tuple(found)


def _fit(candidate: Pattern, scan: RowScan, seen: Tensor, open_rows: int) -> Pattern | None:
    """The candidate with hidden keys and exceptional rows filled in, when it is exactly the scanned mask."""
    low, high = candidate.interval()
    total = torch.nn.functional.pad(seen.long().cumsum(0), (1, 0))
    expected = total[high] - total[low]
    live = scan.count > 0
    inside = (scan.first >= low) & (scan.last < high) & (scan.count == expected)
    if not inside[open_rows:][live[open_rows:]].all():
        return None
    exempt = ~live & (expected > 0)
    exempt[:open_rows] = False
    reach = slice(int(low.min()), int(high.max()))  # keys beyond every row's interval need no mention
    hidden = torch.zeros_like(seen)
    hidden[reach] = ~seen[reach]
    return replace(
        candidate,
        hidden_keys=tuple(true_ranges(hidden)),
        open_rows=((0, open_rows - 1),) if open_rows else (),
        empty_rows=tuple(true_ranges(exempt)),
    )


def _named(pattern: Pattern) -> Pattern:
    """The pattern with its kind: what the rule is called in one word."""
    if pattern.documents:
        kind = "block_diagonal"
    elif pattern.blocks:
        kind = "bidirectional_blocks"
    elif pattern.after is None:
        kind = "band" if pattern.before is not None else "padding" if pattern.hidden_keys else "full"
    elif pattern.before is None:
        kind = "causal"
    else:
        kind = "sliding_window" if pattern.after in (0, pattern.keys - pattern.rows) else "band"
    return replace(pattern, kind=kind)
