"""Reduce the call of a dump and write the small one as a dump that was seen to fail when read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro import environment
from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import Dump, load, save, snapshot
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import suspect
from sdpa_repro.recipe import to_document
from sdpa_repro.reducing.reduction import Reduction, check_freeze, reduce
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.jobs import prepared
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.trial import Trial, in_process, isolated, same_failure
from sdpa_repro.replaying.verdict import Status, Verdict

ORIGIN = ("model", "module", "call_index", "calls", "phase", "total_length", "padding", "padding_side", "rank")
"""What of a dump's origin a reduced dump repeats: nothing of the input, no command, no path."""

TIMEOUT = 30.0
HANG = 5.0
"""Seconds after which a call is taken to hang: the first time, and while reducing one that does."""

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

    @property
    def exit_status(self) -> int:
        """1 a minimum was written, 3 it does not fail when read back, else that of the replay."""
        if self.reduction is None:
            return self.replay.exit_status if self.replay.verdict is not Verdict.BACKEND_WRONG else 0
        if self.reduction.stopped == "interrupted":
            return 130
        return 1 if self.proven else 3

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        found = self.reduction
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
        return f"{size} at {found.shape}: {self.backend} {_what(found)}{stopped[found.stopped]}"

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
    progress: Progress | None = None,
) -> ReducedDump:
    """Reduce the failure of `backend` (default: the one that replay finds guilty) and write it to `output`.

    output: default `x.min.pt` beside `x.pt`. budget: seconds for the search; the best call so far is kept, on
    Ctrl-C too. preload: Python files run in every process before the first call, this one included. replayed: a
    replay of the captured dtype made before. freeze and seed: see `reduction.reduce`.
    Raises InputError for a bad dump or option, and when the file cannot be written.
    """
    path = Path(path)
    target = path.with_name(f"{path.stem}.min.pt") if output is None else Path(output)
    _check(path, target)
    check_freeze(freeze)
    say = progress or (lambda text: None)
    result = replayed or replay(
        path, device=device, dtypes=("captured",), runs=1, timeout=TIMEOUT, preload=preload, progress=progress
    )
    chosen = suspect(result, backend)
    if result.verdict is Verdict.INVALID_CALL:
        raise InputError(f"there is nothing to reduce: {result.sentence}")
    if chosen is None:
        return ReducedDump(path, result)
    environment.preload([Path(file) for file in preload])
    dump = load(path, result.device)
    say(f"reducing the failure of {chosen.value}")
    deadline = None if budget is None else time.monotonic() + budget
    with _trial(dump, chosen, result, preload) as trial:
        found = reduce(prepared(dump, None), trial, deadline=deadline, freeze=freeze, seed=seed, progress=progress)
    _write(dump, found, chosen, result, target, preload)
    say("running the reduced call in a fresh process")
    proven = _fails_when_read(target, found, chosen, dump, result.device, preload)
    return ReducedDump(path, result, chosen.value, found, target, proven)


def _check(path: Path, target: Path) -> None:
    """Before minutes of work: the target is another file in a folder that exists."""
    if target.resolve() == path.resolve():
        raise InputError(f"-o {target} is the dump itself: choose another name")
    if target.is_dir() or not target.resolve().parent.is_dir():
        raise InputError(f"cannot write {target}: give a file in a folder that exists")


@contextmanager
def _trial(dump: Dump, backend: Backend, result: Replay, preload: Sequence[str | Path]) -> Iterator[Trial]:
    """Trials of the backend: in this process, or in workers where it crashes or hangs.

    The calls get small, so one thread is faster than several, if the failure does not need more.
    """
    statuses = {cell.status for cell in result.cells if backend.value in (cell.backend, cell.kernel)}
    context = {**dump.context, "threads": 1}
    if statuses & {Status.CRASHED, Status.TIMEOUT}:
        timeout = HANG if Status.TIMEOUT in statuses else TIMEOUT
        with isolated(backend, dump.context, preload=preload, timeout=timeout) as trial:
            yield trial
    elif in_process(backend, context)(prepared(dump, None)).fails:
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
