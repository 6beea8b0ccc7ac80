"""Reduce the call of a dump and write the small one as a dump that was seen to fail when read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro import environment
from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import Dump, load, save, snapshot
from sdpa_repro.errors import INTERRUPTED, InputError
from sdpa_repro.explaining.explain import suspect
from sdpa_repro.explaining.explanation import TOO_LITTLE
from sdpa_repro.explaining.hurried import LATER, NO_ANSWER, replay_within, unjudged
from sdpa_repro.explaining.pacing import Budget, Pace, work_of
from sdpa_repro.explaining.stand_in import replayed_shorter
from sdpa_repro.recipe import to_document
from sdpa_repro.reducing.reduction import Reduction, check_freeze, reduce
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import SWALLOWED
from sdpa_repro.replaying.check import LiveCheck
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.trial import Result, Trial, in_process, isolated, same_failure
from sdpa_repro.replaying.verdict import Status, Verdict

ORIGIN = ("model", "module", "call_index", "calls", "phase", "total_length", "padding", "padding_side", "rank")
"""What of a dump's origin a reduced dump repeats: nothing of the input, no command, no path."""

TIMEOUT = 30.0
HANG = 5.0
"""Seconds after which a call is taken to hang: the first time, and while reducing one that does."""

TRIALS = 30
"""Trials of the whole call that there has to be time for; else its lengths come down first, on the replay's word."""

SEARCH_SHARE = 0.2
"""Share of the budget that the search gets at least, however long the replay took."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ReducedDump:
    """What became of a dump. `backend`, `reduction` and `output` are None when its call does not fail here."""

    path: Path
    replay: Replay
    backend: str | None = None
    reduction: Reduction | None = None
    output: Path | None = None
    proven: bool = False
    """Whether the file's call failed in the same way in a fresh process."""
    left_out: tuple[str, ...] = ()
    """Backends that there was no time for in the replay; see `hurried.unjudged`."""

    @property
    def exit_status(self) -> int:
        """1 a minimum was written, 2 the budget was too small, 3 not when read back, else that of the replay."""
        if self.reduction is None and unjudged(self.left_out):
            return TOO_LITTLE
        if self.reduction is None:
            return self.replay.exit_status if self.replay.verdict is not Verdict.BACKEND_WRONG else 0
        if self.reduction.stopped == "interrupted":
            return INTERRUPTED
        return 1 if self.proven else 3

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        found = self.reduction
        if found is None and unjudged(self.left_out):
            return NO_ANSWER
        if found is None and self.left_out:
            return f"there is nothing to reduce: {self.replay.sentence}; {LATER}: {', '.join(self.left_out)}"
        if found is None:
            return f"there is nothing to reduce: {self.replay.sentence}"
        if not self.proven:
            return f"the reduced call ({found.shape}) fails in this process but not in a fresh one that reads it back"
        size = "fails already" if found.shape == found.shape_before else "still fails"
        stopped = {
            "": "",
            "table": "",
            "time": " (out of time: maybe not the smallest)",
            "interrupted": " (interrupted)",
        }
        shorter = "; the dumped call itself did not come to an end in this time" if unjudged(self.left_out) else ""
        return f"{size} at {found.shape}: {self.backend} {_what(found)}{stopped[found.stopped]}{shorter}"

    def document(self) -> dict[str, Any]:
        """As plain JSON types; the keys are stable (DESIGN section 9)."""
        empty: dict[str, Any] = {"from": None, "to": None, "needed": [], "neighbour": {}, "calls": 0, "seconds": 0.0}
        return {
            "file": self.path.name,
            "sentence": self.sentence,
            "backend": self.backend,
            **(empty if self.reduction is None else self.reduction.document()),
            "output": None if self.output is None else str(self.output),
            "proven": self.proven,
            "preloaded": [dict(record) for record in self.replay.preloaded],
            "environment": dict(self.replay.environment),
        }


def _what(found: Reduction) -> str:
    """What the backend does in the reduced call."""
    checked = found.result.checked
    if found.result.status is Status.CRASHED:
        return f"crashes ({found.result.reason})"
    if found.result.status is Status.TIMEOUT:
        return "hangs"
    if checked is not None and checked.reason == SWALLOWED:
        return SWALLOWED
    if found.result.status is Status.NONFINITE or checked is None:
        return "gives NaN or Inf where the result is finite"
    return f"is off by {checked.max_abs:.2g} where rounding explains {checked.threshold:.1g}"


def reduce_dump(
    path: str | Path,
    output: str | Path | None = None,
    *,
    device: str | None = None,
    backend: str | None = None,
    preload: Sequence[str | Path] = (),
    budget: float | None = None,
    freeze: Collection[str] = (),
    seed: int = 0,
    replayed: Replay | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ReducedDump:
    """Reduce the failure of `backend` (default: the one that replay finds guilty) and write it to `output`.

    output: default `x.min.pt` beside `x.pt`. budget: seconds for replay and search together, of which the search gets
    a fifth at least; the best call so far is kept, on Ctrl-C too. Where there is no time to judge the call itself, a
    shorter one that fails is reduced. preload: Python files run in every process before the first call, this one
    included. replayed: a replay of the captured dtype made before. freeze and seed: see `reduction.reduce`. force:
    replace a file that is there already, which the default name does anyway; the dump itself never.
    Raises InputError for a bad dump or option, and when the file cannot be written.
    """
    path = Path(path)
    usual = path.with_name(f"{path.stem}.min.pt")
    target = usual if output is None else Path(output)
    _check(path, target, replaced=force or target.resolve() == usual.resolve())
    check_freeze(freeze)
    say = progress or (lambda text: None)
    given = Budget(budget)
    result = replayed
    left_out: tuple[str, ...] = ()
    if result is None:
        result, left_out = replay_within(
            path, given, device=device, backend=backend, preload=preload, timeout=TIMEOUT, progress=progress
        )
    chosen, place = suspect(result, backend), None
    if chosen is None and unjudged(left_out):
        say("there is no time to judge the call: looking for a shorter one that fails")
        place, result = replayed_shorter(
            result, given, lambda one: suspect(one, backend) is not None, preload=preload, progress=progress
        )
        chosen = suspect(result, backend)
    if result.verdict is Verdict.INVALID_CALL:
        raise InputError(f"there is nothing to reduce: {result.sentence}")
    if chosen is None:
        return ReducedDump(path, result, left_out=left_out)
    environment.preload([Path(file) for file in preload])
    dump = load(path, result.device)
    say(f"reducing the failure of {chosen.value}")
    if budget is not None:
        given = Budget(max(given.left, SEARCH_SHARE * budget))
    call = prepared(dump, None) if place is None else place.call
    first, pace = _told(result, chosen, call, given)
    with _trial(dump, call, chosen, result, preload, alone=first is None) as trial:
        trial = trial if first is None else pace.trial(trial)
        words: dict[str, Any] = {"deadline": given.deadline, "freeze": freeze, "seed": seed, "progress": progress}
        found = reduce(call, trial, first=first, **words)
    _write(dump, found, chosen, result, target, preload)
    say("running the reduced call in a fresh process")
    same = first is not None and found.result is found.first  # the replay read this very call in a fresh process
    proven = same or _fails_when_read(target, found, chosen, dump, result.device, preload)
    return ReducedDump(path, result, chosen.value, found, target, proven, left_out)


def _check(path: Path, target: Path, *, replaced: bool) -> None:
    """Before minutes of work: the target is another file, in a folder that exists and can be written into.

    replaced: whether a file may be there already.
    """
    if target.resolve() == path.resolve() or (target.exists() and path.exists() and target.samefile(path)):
        raise InputError(f"-o {target} is the dump itself: choose another name")
    if target.is_dir() or not target.resolve().parent.is_dir():
        raise InputError(f"cannot write {target}: give a file in a folder that exists")
    if not replaced and os.path.lexists(target):
        raise InputError(f"{target} is there already: give another name with -o, or --force to replace it")
    if not os.access(target.resolve().parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into {target.resolve().parent}: it is read-only; name a file elsewhere with -o")


def _told(result: Replay, backend: Backend, call: AttentionCall, given: Budget) -> tuple[Result | None, Pace]:
    """How the call fails as the replay saw it, where the time is too short for many trials of it; else None.

    And the pace of trials, as far as the replay tells it.
    """
    cells = [cell for cell in result.cells if backend.value in (cell.backend, cell.kernel) and cell.wrong]
    pace = Pace(given)
    pace.learn(work_of(call), 2 * max(cell.seconds or 0.0 for cell in cells))  # checking takes as long again
    cell, bad = cells[0], cells[0].bad
    if given.left > TRIALS * pace.expected(work_of(call)) or bad is None or cell.status is Status.UNSTABLE:
        return None, pace
    numbers = (cell.max_abs or 0.0, cell.threshold or 0.0, cell.ratio or 0.0)
    return Result(cell.status, LiveCheck(cell.status.value, *numbers, (bad.worst,), bad.count)), pace


@contextmanager
def _trial(
    dump: Dump, call: AttentionCall, backend: Backend, result: Replay, preload: Sequence[str | Path], *, alone: bool
) -> Iterator[Trial]:
    """Trials of the backend, for `call` and smaller ones: in this process, or in workers where it crashes or hangs.

    alone: on one thread if the failure does not need more, since the calls get small; that takes a trial.
    """
    statuses = {cell.status for cell in result.cells if backend.value in (cell.backend, cell.kernel)}
    context = {**dump.context, "threads": 1}
    if statuses & {Status.CRASHED, Status.TIMEOUT}:
        timeout = HANG if Status.TIMEOUT in statuses else TIMEOUT
        with isolated(backend, dump.context, preload=preload, timeout=timeout) as trial:
            yield trial
    elif alone and in_process(backend, context)(call).fails:
        yield in_process(backend, context)
    else:
        yield in_process(backend, dump.context)


def _write(
    dump: Dump, found: Reduction, backend: Backend, result: Replay, target: Path, preload: Sequence[str | Path]
) -> None:
    """The reduced call as a dump: its output, its closed forms, and as much of the origin as reveals nothing."""
    checked = found.result.checked
    live: dict[str, Any] = {"ran": backend.value, "status": found.result.status.value}
    if checked is not None:
        live |= {
            "max_abs": checked.max_abs,
            "threshold": checked.threshold,
            "ratio": checked.ratio,
            "rows": [list(row) for row in checked.rows],
        }
    document = snapshot(
        found.call,
        found.result.output,
        context={**dump.context, "device": result.device, "layout": environment.memory_layout(found.call)},
        origin=scrubbed(dump.origin),
        environment=environment.software(result.device),
        live=live,
        recipe={name: to_document(recipe) for name, recipe in found.recipes.items()},
        preloaded=environment.preload_records(preload),
    )
    save(document, target)


def scrubbed(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a dump's origin that say which call it was; a model that is a path loses its folders."""
    kept = {key: origin[key] for key in ORIGIN if origin.get(key) is not None}
    model = kept.get("model")
    if isinstance(model, str) and (Path(model).is_absolute() or model.startswith(("~", ".", "\\")) or "\\" in model):
        kept["model"] = model.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return kept


def _fails_when_read(
    target: Path,
    found: Reduction,
    backend: Backend,
    dump: Dump,
    device: str,
    preload: Sequence[str | Path],
) -> bool:
    """Whether the written dump's call fails in the same way in a new process."""
    call: AttentionCall = load(target, device).call
    timeout = HANG if found.first.status is Status.TIMEOUT else TIMEOUT
    with isolated(backend, dump.context, preload=preload, timeout=timeout) as trial:
        return same_failure(trial(call), found.first)
