"""The records of a session in bounded memory: the first calls, the worst of the others, and counts of all.

A generation makes hundreds of calls a token; a record of each would outgrow the model's own state.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from sdpa_repro.capturing.records import CallRecord

FIRST = 1000
"""Records kept whatever they say: those of the first calls."""

WORST = 1000
"""Further records kept, the most severe ones."""


class Ledger:
    """Records by call index. Not safe to use from several threads without a lock."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self._first: dict[int, CallRecord] = {}
        self._worst: dict[int, CallRecord] = {}
        self._order: list[tuple[tuple[int, float], int]] = []
        """A heap of the severity and the negated index of `_worst`: the least severe, latest first."""

    def __len__(self) -> int:
        """Number of records that were added, also of those that are no longer kept."""
        return self.statuses.total()

    @property
    def wrong(self) -> int:
        """How many of all records are of wrong calls."""
        return self.statuses["diverges"] + self.statuses["nonfinite"]

    def add(self, record: CallRecord) -> None:
        """Count a record and keep it while there is room or it is among the worst."""
        self.statuses[record.status] += 1
        if len(self._first) < FIRST:
            self._first[record.index] = record
            return
        self._worst[record.index] = record
        heapq.heappush(self._order, (record.severity, -record.index))
        if len(self._worst) > WORST:
            _, index = heapq.heappop(self._order)
            del self._worst[-index]

    def amend(self, record: CallRecord) -> None:
        """Put a record in the place of one of the same call and status, if that one is kept."""
        for kept in (self._first, self._worst):
            if record.index in kept:
                kept[record.index] = record

    def listed(self, besides: Iterable[CallRecord] = ()) -> list[CallRecord]:
        """The records that are kept, and those of other calls among `besides`, by index."""
        found = {record.index: record for record in besides} | self._first | self._worst
        return [found[index] for index in sorted(found)]
