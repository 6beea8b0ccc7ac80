"""Which calls are dumped, and when: wrong ones at once, the worst healthy one at the end, within the limits.

A call that is wrong, or asked for by its number, is on the disk before the run goes on, which may end at any moment.
Where every call is wanted, healthy ones are written while the run goes on: one at a time, so that memory holds one.
What is wrong never goes without a dump because less severe calls have taken the slots or the room: they leave.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall, memory_groups
from sdpa_repro.capturing import folder
from sdpa_repro.capturing.aside import Aside, Job
from sdpa_repro.capturing.recorder import Judge, Seen, beside
from sdpa_repro.capturing.records import CallRecord, Options

Describe = Callable[[CallRecord, AttentionCall], dict[str, Any]]
"""The keywords of `dump.snapshot` for a call: context, origin, environment, live, preloaded. Asked for while
the model's own modes are in force."""


@dataclass(frozen=True)
class Kept:
    """A dump on disk."""

    record: CallRecord
    file: str
    nbytes: int


@dataclass(frozen=True)
class Candidate:
    """The worst healthy call so far, copied into memory."""

    record: CallRecord
    document: dict[str, Any]


@dataclass(frozen=True)
class Pending:
    """A dump that is being written."""

    record: CallRecord
    job: Job[tuple[str, int]]


class Keeper:
    """The dumps of one session: offered every call, it writes those that the options ask for."""

    def __init__(self, out: Path, options: Options, judge: Judge, describe: Describe) -> None:
        self.out = out
        self.options = options
        self.kept: list[Kept] = []
        self._judge = judge
        self._describe = describe
        self._candidate: Candidate | None = None
        self._ahead: Kept | None = None
        self._pending: Pending | None = None
        self._writer = Aside(lambda: None)
        self._bytes = 0

    def offer(self, record: CallRecord, seen: Seen) -> CallRecord:
        """Dump the call if it is to be dumped now; the record with `kept`, or a note on what it would take.

        Raises InputError when the dump cannot be written. Call `settle` first.
        """
        if self.options.everything:
            ahead, self._ahead = self._ahead, None
            return self._write(record, seen, ahead)
        if _urgent(record):
            return self._write(record, seen, None)
        best = self._candidate.record.severity if self._candidate is not None else (-1, 0.0)
        if self.kept or record.severity <= best:
            return record
        if viewed_bytes(seen.call, seen.output) <= self.options.max_bytes:
            self._candidate = Candidate(record, self._document(record, seen.call, seen.output, seen.here))
        return record

    def ahead(self, record: CallRecord, seen: Seen) -> None:
        """Dump a call's inputs before it runs: it may crash the process. Raises InputError."""
        self._write(record, seen, None)
        self._ahead = next((each for each in self.kept if each.record.index == record.index), None)

    def settle(self) -> CallRecord | None:
        """Wait for the dump that is being written, if any: its record with `kept`. Raises InputError."""
        pending = self._pending
        if pending is None:
            return None
        pending.job.wait()  # which Ctrl-C may end
        self._pending = None
        return self._keep(pending.record, pending.job.result(), [])

    def forked(self) -> None:
        """In a forked child: what was written, or is about to be, is the parent's."""
        self._candidate = self._pending = self._ahead = None
        self.kept, self._bytes = [], 0
        self._writer.forked()

    def finish(self) -> CallRecord | None:
        """Write the worst healthy call when nothing else was written; its record. Raises InputError."""
        candidate, self._candidate = self._candidate, None
        if candidate is None or self.kept:
            return None
        return self._save(candidate.record, candidate.document, [])

    def _write(self, record: CallRecord, seen: Seen, ahead: Kept | None) -> CallRecord:
        """Dump the call, or those of its batch rows that fit and fail, or note how much room it needs.

        `ahead` is the dump of its inputs, which this one replaces. A call that is wrong or raised takes slots and room
        of less severe ones.
        """
        first = [ahead] if ahead is not None else []
        weaker = [each for each in self._weaker(record) if each is not ahead]
        if not first and not weaker and len(self.kept) >= self.options.slots:
            return record
        room = self._room(first + weaker)
        call, output, note = seen.call, seen.output, ""
        needed = viewed_bytes(call, output)
        if needed > room:
            part = self._part(record, seen, room)
            if part is None:
                return replace(record, note=f"not kept: needs {needed} bytes, {max(room, 0)} left of --max-bytes")
            call, output, note = part
            needed = viewed_bytes(call, output)
        record = replace(record, note=note)
        leaving = self._leaving(needed, first, weaker)
        return self._save(record, self._document(record, call, output, seen.here), leaving)

    def _room(self, leaving: list[Kept]) -> int:
        """Bytes that are left, or will be when some dumps have gone."""
        return self.options.max_bytes - self._bytes + sum(each.nbytes for each in leaving)

    def _weaker(self, record: CallRecord) -> list[Kept]:
        """The dumps that may make way for this call, the least severe first."""
        if not _urgent(record):
            return []
        return [each for each in reversed(self.kept) if each.record.severity < record.severity]

    def _leaving(self, needed: int, first: list[Kept], weaker: list[Kept]) -> list[Kept]:
        """The `first` ones and as many more as have to go for a slot and `needed` bytes."""
        found = list(first)
        for each in weaker:
            if len(self.kept) - len(found) < self.options.slots and needed <= self._room(found):
                break
            found.append(each)
        return found

    def _part(self, record: CallRecord, seen: Seen, room: int) -> tuple[AttentionCall, Tensor, str] | None:
        """The guilty batch rows alone, if they fit into `room` bytes and still fail when run by themselves."""
        if not record.wrong or seen.call.query.dim() != 4:
            return None
        batch = seen.call.query.shape[0]
        for first, last in _batches(record, batch):
            call = batch_rows(seen.call, first, last)
            if viewed_bytes(call, seen.output[first:last] if seen.output is not None else None) > room:
                continue
            output = seen.again(call)
            if self._judge(call, output, seen.here).wrong:
                rows = f"batch row {first}" if last == first + 1 else f"batch rows {first}-{last - 1}"
                return call, output, f"{rows} of {batch} alone, to fit into --max-bytes"
        return None

    def _document(self, record: CallRecord, call: AttentionCall, output: Tensor | None, here: bool) -> dict[str, Any]:
        keywords = self._describe(record, call)
        return beside(call, lambda: dump.snapshot(call, output, **keywords), here)

    def _save(self, record: CallRecord, document: dict[str, Any], leaving: list[Kept]) -> CallRecord:
        """Write the dump, and take those off the disk that leave."""
        rows, keys = record.query[-2], record.key[-2]
        name = folder.stem_of(record.module, folder.layer_of(record.module), record.index, rows, keys, record.rank)
        replaced = leaving[0].file if leaving else None
        urgent = _urgent(record) or self.options.call is not None

        def write() -> tuple[str, int]:
            return folder.add(
                self.out,
                name,
                lambda path: dump.save(document, path, synced=urgent),
                _line(record),
                instead_of=replaced,
            )

        if self.options.keep == "all" and not urgent:
            self._pending = Pending(record, self._writer.begin(write))
            return record
        return self._keep(record, write(), leaving)

    def _keep(self, record: CallRecord, written: tuple[str, int], leaving: list[Kept]) -> CallRecord:
        """Note a dump that is on the disk."""
        record = replace(record, kept=written[0])
        for each in leaving:
            self.kept.remove(each)
            self._bytes -= each.nbytes
        for each in leaving[1:]:
            folder.remove(self.out, each.file)
        insort(self.kept, Kept(record, *written), key=_order)
        self._bytes += written[1]
        self._candidate = None
        return record


def _order(kept: Kept) -> tuple[int, float]:
    """The most severe first."""
    kind, ratio = kept.record.severity
    return -kind, -ratio


def _urgent(record: CallRecord) -> bool:
    return record.wrong or record.status == "raised"


def _line(record: CallRecord) -> dict[str, Any]:
    """The index's entry for a dump."""
    return {
        "module": record.module,
        "call_index": record.index,
        "phase": record.phase,
        "kernel": record.kernel,
        "live_ratio": record.ratio,
        "healthy": record.status == "agrees",
        "rank": record.rank,
        "world": record.world,
        "heads": [shape[-3] for shape in (record.query, record.key) if len(shape) > 2],
        "status": record.status,
    }


def _batches(record: CallRecord, batch: int) -> Iterator[tuple[int, int]]:
    """Ranges of batch rows to try: all guilty ones when they are fewer than all, then each alone."""
    guilty = sorted({row[0] for row in record.rows})
    if guilty and guilty[-1] + 1 - guilty[0] < batch:
        yield guilty[0], guilty[-1] + 1
    if batch > 1:
        yield from ((each, each + 1) for each in guilty)


def batch_rows(call: AttentionCall, first: int, last: int) -> AttentionCall:
    """Batch rows [first, last) of a call of four dimensions, as views."""
    fresh = {}
    for name, tensor in call.tensors.items():
        whole = tensor.dim() < 4 or tensor.shape[0] == 1
        fresh[name] = tensor if whole else tensor.narrow(0, first, last - first)
    return call.with_tensors(fresh)


def viewed_bytes(call: AttentionCall, output: Tensor | None = None) -> int:
    """Bytes of the elements that the views cover, each once; bool masks at an eighth, as a dump packs them.

    Views that share memory count as the larger of them.
    """
    tensors = {name: tensor for name, tensor in call.tensors.items() if getattr(tensor, "variant", None) is None}
    total = 0
    for names in memory_groups(tensors):
        sizes = [_bytes_of(tensors[name]) for name in names]
        shared = len(names) > 1 and len({tensors[name].data_ptr() for name in names}) < len(names)
        total += max(sizes) if shared else sum(sizes)
    return total + (_bytes_of(output) if output is not None else 0)


def _bytes_of(tensor: Tensor) -> int:
    count = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return -(-count // 8) if tensor.dtype == torch.bool else count * tensor.element_size()
