"""A recording session: which calls it wants, one record for each, the dumps, and the report at the end."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro import environment, ranks
from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing import elsewhere, folder
from sdpa_repro.capturing.handlers import hand_on
from sdpa_repro.capturing.keeping import Keeper
from sdpa_repro.capturing.ledger import Ledger
from sdpa_repro.capturing.recorder import Seen, Stopped, beside, listening
from sdpa_repro.capturing.records import CallRecord, Options, describe_mask, nothing_seen
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.check import LiveCheck, check
from sdpa_repro.replaying.variants import explicit_mask

Progress = Callable[[str], None]
QUIET_SECONDS = 10.0
"""A sign of life at most this often while no call goes wrong."""

NAMES, PROBLEMS = 100, 20
"""Most threads and reasons that are counted by name, and most problems that are told: runs may be very long."""


class Session:
    """The calls seen by one recording. Made by `capture`; safe to use from several threads."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        options: Options,
        *,
        progress: Progress | None = None,
        origin: Mapping[str, Any] | None = None,
        preloaded: Sequence[Mapping[str, str]] = (),
        trail: Callable[[str], None] | None = None,
        recorded: Callable[[], None] | None = None,
    ) -> None:
        """Creates the folder `out`, else raises InputError.

        `trail` is told which call is running ("" for none), for the case that it does not come back;
        `recorded` is called after each call that was looked at.
        """
        self.out = Path(out)
        self.options = options
        folder.prepare(self.out)
        self._keeper = Keeper(self.out, options, judge, self._describe)
        self._progress = progress or (lambda _: None)
        self._notes: dict[str, Any] = dict(origin or {})
        self._trail = trail
        self._recorded = recorded or (lambda: None)
        self._preloaded = [dict(each) for each in preloaded]
        self._environments: dict[str, dict[str, Any]] = {}
        self._records = Ledger()
        self._seen = 0
        self._modules: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._elsewhere: Counter[str] = Counter()
        self._problems: list[str] = []
        self._problem_count = 0
        self._children = elsewhere.child_seconds()
        self._lock = threading.RLock()
        self._spoke = time.monotonic()
        self._stopped = self._closed = False

    @property
    def calls(self) -> list[CallRecord]:
        """A record for each call that the options want, in the order in which the calls began.

        Of very many calls those of the first ones, of dumps, and of the worst ones (see `ledger`).
        """
        with self._lock:
            self._settle()
            files = {each.file for each in self._keeper.kept}
            records = self._records.listed(each.record for each in self._keeper.kept)
        return [record if record.kept in files else replace(record, kept=None) for record in records]

    @property
    def dumps(self) -> list[Path]:
        """The dumps on disk, the worst first."""
        with self._lock:
            self._settle()
            return [self.out / each.file for each in self._keeper.kept]

    def note(self, **facts: Any) -> None:
        """Facts for the origin of the calls from now on: `total_length`, `padding`, `model`, …"""
        with self._lock:
            self._notes.update(facts)

    def summary(self) -> dict[str, Any]:
        """The whole report as plain dicts, lists, strings and numbers."""
        with self._lock:
            self._settle()
            return {
                "options": asdict(self.options),
                "seen": self._seen,
                "modules": list(self._modules),
                "checked": len(self._records),
                "wrong": self._records.wrong,
                "raised": self._records.statuses["raised"],
                "calls": [dict(vars(record)) for record in self.calls],
                "dumps": [each.file for each in self._keeper.kept],
                "passed": dict(self._passed),
                "elsewhere": dict(self._elsewhere),
                "hints": elsewhere.hints(self._children, thorough=not self._seen),
                "problems": self._told_problems(),
                "stopped": self._stopped,
            }

    def close(self) -> None:
        """Write what is to be written at the end; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._settle()
            self._amend(self._keeper.finish)

    # What the recorder calls:

    def expect(self, module: str, phase: str) -> int | None:
        """Count a call that begins; its index, or None when the options do not want it."""
        with self._lock:
            index = self._seen
            self._seen += 1
            self._modules[module] += 1
            wanted = not (self._stopped or self._closed) and self.options.wants(index, module, phase)
            return index if wanted else None

    def passed(self, reason: str) -> None:
        """Count a call that could not be looked at."""
        with self._lock:
            _count(self._passed, reason)

    def elsewhere(self, thread: str) -> None:
        """Count a call made in a context that is not this session's."""
        with self._lock:
            _count(self._elsewhere, thread)

    def enter(self, index: int, seen: Seen) -> None:
        """Leave a trail; the inputs of a call that was asked for by index go to the disk before it runs."""
        if self._trail is not None:
            self._trail(f"call {index} ({seen.module}, {seen.call.query.shape[-2]}x{seen.call.key.shape[-2]})")
        if index != self.options.call:
            return
        try:
            with self._lock:
                self._keeper.ahead(self._record(index, seen), seen)
        except Exception as error:
            hand_on(error)
            self._problem(error, index)

    def take(self, index: int, seen: Seen) -> None:
        """Judge a call, record it, dump it if it is to be dumped. Raises only `Stopped`."""
        if self._trail is not None:
            self._trail("")
        try:
            record = self._record(index, seen)
        except Exception as error:
            hand_on(error)
            self._problem(error, index)
            return
        with self._lock:
            self._records.add(record)
            self._settle()
            try:
                record = self._keeper.offer(record, seen)
                self._records.amend(record)
            except Exception as error:
                hand_on(error)
                self._problem(error, index)
            self._report(record)
            stop = record.wrong and self.options.stop_at_first
            self._stopped |= stop
        self._recorded()
        if stop:
            raise Stopped(self)

    def forked(self) -> None:
        """In a forked child: have a lock that nobody holds, and leave to the parent what it was about to write."""
        self._lock = threading.RLock()
        self._keeper.forked()

    def _settle(self) -> None:
        """Wait for the dump that is being written beside the run, if any."""
        self._amend(self._keeper.settle)

    def _amend(self, dumped: Callable[[], CallRecord | None]) -> None:
        """Note a dump of a call that was recorded before."""
        try:
            record = dumped()
        except Exception as error:
            hand_on(error)
            self._problem(error)
        else:
            if record is not None:
                self._records.amend(record)

    def _record(self, index: int, seen: Seen) -> CallRecord:
        call, output = seen.call, seen.output
        rank, world = _place()
        if seen.error is not None:
            live = LiveCheck("raised", reason=_first_line(seen.error))
        elif output is None:
            live = LiveCheck("unchecked", reason="the call has not returned")
        elif self.options.check:
            live = seen.judged(judge)
        else:
            live = LiveCheck("unchecked", reason="the live check is off")
        return CallRecord(
            index=index,
            module=seen.module,
            phase=seen.phase,
            thread=seen.thread,
            dtype=environment.dtype_name(call.query.dtype),
            query=tuple(call.query.shape),
            key=tuple(call.key.shape),
            value=tuple(call.value.shape),
            mask=describe_mask(call),
            key_head_stride=_head_stride(call.key),
            value_head_stride=_head_stride(call.value),
            kernel=seen.kernel,
            status=live.status,
            max_abs=live.max_abs,
            threshold=live.threshold,
            ratio=live.ratio,
            rows=live.rows,
            wrong_rows=live.wrong_rows,
            reason=live.reason,
            total_length=self._notes.get("total_length"),
            padding=self._notes.get("padding"),
            rank=rank,
            world=world,
        )

    def _describe(self, record: CallRecord, call: AttentionCall) -> dict[str, Any]:
        """Everything in a dump but the call itself."""
        device = str(call.query.device)
        if device not in self._environments:
            self._environments[device] = environment.software(device)
        origin = {
            "model": None,
            "total_length": None,
            "padding": None,
            "command": None,
            **self._notes,
            "module": record.module,
            "call_index": record.index,
            "calls": self._seen,
            "phase": record.phase,
            "rank": record.rank,
            "world": record.world,
        }
        if record.status == "raised":
            origin["raised"] = environment.without_home(record.reason)
        if record.note:
            origin["note"] = record.note
        live = {
            "ran": record.kernel,
            "status": record.status,
            "max_abs": record.max_abs,
            "threshold": record.threshold,
            "ratio": record.ratio,
            "rows": [list(row) for row in record.rows],
            "wrong_rows": record.wrong_rows,
            "reason": record.reason,
        }
        return {
            "context": environment.capture_context(call),
            "origin": origin,
            "environment": self._environments[device],
            "live": live,
            "preloaded": self._preloaded,
        }

    def _report(self, record: CallRecord) -> None:
        """One line when a call goes bad, and a sign of life now and then."""
        if record.wrong or record.status == "raised":
            kept = f" -> {self.out / record.kept}" if record.kept else f" ({record.note or 'not kept'})"
            self._say(record.sentence() + kept)
        elif time.monotonic() - self._spoke > QUIET_SECONDS:
            self._say(f"{len(self._records)} calls so far, the last one in {record.module}")

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._progress(text)

    def _problem(self, error: Exception, index: int | None = None) -> None:
        """Note what went wrong in the recorder itself; the recorded code goes on."""
        text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {_first_line(str(error))}"
        with self._lock:
            self._problem_count += 1
            if self._problem_count <= PROBLEMS:
                self._problems.append(text if index is None else f"call {index}: {text}")
            if self._problem_count == 1:
                self._say(f"recorder: {self._problems[0]}")

    def _told_problems(self) -> list[str]:
        more = self._problem_count - len(self._problems)
        return [*self._problems, *([f"{more} more problems of the recorder"] if more else [])]


@contextmanager
def capture(
    out: str | os.PathLike[str] = "dumps",
    *,
    call: int | None = None,
    module: str | None = None,
    phase: str = "all",
    keep: str = "diverging",
    stop_at_first: bool = False,
    max_dumps: int | None = None,
    max_bytes: int = 2 << 30,
    all_threads: bool = False,
    check: bool = True,
    progress: Progress | None = None,
    origin: Mapping[str, Any] | None = None,
    preloaded: Sequence[Mapping[str, str]] = (),
) -> Iterator[Session]:
    """Record the attention calls of a block of code, check each live, and dump those that matter into `out`.

    The options are those of `Options`. Only calls of the current context are recorded, or with
    `all_threads` all of the process. `stop_at_first` leaves the block after the first call that is wrong.
    `origin` and `preloaded` (see `environment.preload`) go into every dump. Raises InputError for options
    that do not exist, for a folder that cannot be written to, and after the block when no call was recorded.

        with capture("dumps") as session:
            model(**inputs)
        print(session.calls, session.dumps)
    """
    options = Options(call, module, phase, keep, stop_at_first, max_dumps, max_bytes, check)
    session = Session(out, options, progress=progress, origin=origin, preloaded=preloaded)
    try:
        with listening(session, everywhere=all_threads):
            yield session
    except Stopped as stop:
        if stop.session is not session:
            raise
    finally:
        session.close()
    if not session.calls:
        raise InputError(nothing_seen(session.summary()))


def judge(call: AttentionCall, output: Tensor, here: bool = False) -> LiveCheck:
    """The live check of a call under none of the model's modes (`beside`); the output's dtype tells of autocast."""
    plain = replace(call, attn_mask=explicit_mask(call)) if hasattr(call.attn_mask, "variant") else call
    dtype = output.dtype if output.dtype != call.query.dtype else None
    return beside(call, lambda: check(plain, output, dtype=dtype), here)


def _count(counts: Counter[str], name: str) -> None:
    counts[name if name in counts or len(counts) < NAMES else "others"] += 1


def _head_stride(tensor: Tensor) -> int | None:
    return tensor.stride(-3) if tensor.dim() >= 3 else None


def _place() -> tuple[int | None, int | None]:
    """This process's rank and how many there are, both None outside a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return ranks.rank(), ranks.world()
    told = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    rank, world = (int(text) if text.isascii() and text.isdigit() else None for text in told)
    return rank, world if rank is not None else None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
