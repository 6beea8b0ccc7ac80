"""The stages behind the capture: replay, explain, reduce, publish, draw; each by its own verb's function, once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.diagnosing.naming import file_hash
from sdpa_repro.diagnosing.place import PAGE
from sdpa_repro.diagnosing.stages import Stages
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import Explanation, explain
from sdpa_repro.publishing import files
from sdpa_repro.publishing.page import page, write_page
from sdpa_repro.publishing.publish import publish
from sdpa_repro.publishing.published import Published
from sdpa_repro.publishing.section import section, without_explanation
from sdpa_repro.reducing.dump_reducer import reduce_dump
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.worker import Worker


@dataclass(frozen=True)
class Case:
    """The dump, inside the folder of the stages, and how its call is to be run.

    budget: seconds for one search. interrupted: whether Ctrl-C was pressed, which ends a search with what it has.
    """

    stages: Stages
    dump: Path
    device: str | None = None
    preload: tuple[Path, ...] = ()
    budget: float | None = None
    interrupted: Callable[[], bool] = lambda: False

    @property
    def depends(self) -> list[Any]:
        """What every result about this dump depends on."""
        return [file_hash(self.dump), self.dump.name, self.device]

    @property
    def searched(self) -> list[Any]:
        """The same for a result that a search with a budget led to."""
        return [*self.depends, self.budget]


@dataclass(frozen=True)
class Reduced:
    """What reducing came to: the document of `reduce_dump`, and the small dump, None when there is none."""

    sentence: str
    output: Path | None = None
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Located:
    """What `locate` came to: its sentence, its exit status and its document."""

    sentence: str
    exit_status: int
    document: Mapping[str, Any] = field(default_factory=dict)


def replayed(case: Case, worker: Worker | None = None) -> Replay:
    """The dump in its captured dtype through every backend. worker: one to use and leave running."""

    def work() -> Replay:
        return replay(
            case.dump,
            device=case.device,
            dtypes=("captured",),
            runs=1,
            preload=case.preload,
            progress=case.stages.say,
            worker=worker,
        )

    return case.stages.run("replay", case.depends, Replay, work, words=lambda found: found.verdict.value)


def explained(case: Case, result: Replay) -> Explanation:
    """Why the call fails; `complete` is False when the budget ended or Ctrl-C was pressed."""

    def work() -> Explanation:
        return explain(
            case.dump,
            device=case.device,
            preload=case.preload,
            budget=case.budget,
            replayed=result,
            progress=case.stages.say,
        )

    return case.stages.run(
        "explain",
        case.searched,
        Explanation,
        work,
        words=lambda found: "explained" if found.complete else "cut short",
        keep=lambda found: not case.interrupted(),
    )


def reduced(case: Case, result: Replay) -> Reduced:
    """The smallest call that still fails, written as `call.pt` beside the dump."""
    failed: list[InputError] = []

    def work() -> Reduced:
        try:
            found = reduce_dump(
                case.dump,
                case.stages.folder / files.DUMP,
                device=result.device,
                preload=case.preload,
                budget=case.budget,
                replayed=result,
                force=True,  # of a run that was killed while it reduced
                progress=case.stages.say,
            )
        except InputError as error:  # such as a full disk, which a later start may find with more room
            failed.append(error)
            return Reduced(f"not reduced: {error}")
        if found.output is None or not found.proven:
            (case.stages.folder / files.DUMP).unlink(missing_ok=True)
            return Reduced(f"not reduced: {found.sentence}")
        return Reduced(found.sentence, found.output, found.document())

    return case.stages.run(
        "reduce",
        case.searched,
        Reduced,
        work,
        words=lambda found: found.sentence.partition(":")[0],
        wrote=lambda found: [found.output],
        keep=lambda found: not failed and not case.interrupted(),
    )


def published(
    case: Case, result: Replay, small: Reduced, worker: Worker | None = None, told: Explanation | None = None
) -> Published:
    """Script and issue about the small call, and how the script ended in a process of its own. worker: as above.

    told: why the captured call fails, for what does not hold of the small one.
    """

    def work() -> Published:
        return publish(
            case.dump,
            case.stages.folder,
            reduced=small.output is not None,
            preload=case.preload,
            device=result.device,
            budget=case.budget,
            force=True,
            replayed=result,
            reduction=small.document or None,
            captured=told.document() if told is not None else None,
            worker=worker,
            progress=case.stages.say,
        )

    return case.stages.run(
        "issue",
        [*case.searched, small.sentence, told.cause if told is not None else None],
        Published,
        work,
        words=lambda found: "repro.py fails as it should" if found.run and found.run.fails else "written",
        wrote=lambda found: [found.script, found.issue, found.dump],
    )


def drawn(case: Case, result: Replay | Explanation, made: Published | None, worker: Worker | None = None) -> Path:
    """The page about the dump, from the results that are there; three kernels are run again for its picture."""
    known = without_explanation(case.dump, result) if isinstance(result, Replay) else result

    def work() -> Path:
        case.stages.say("drawing")
        shown = section(known, preload=case.preload, worker=worker, published=made)
        return write_page(case.stages.folder / PAGE, page([shown]))

    return case.stages.run(
        "report",
        [*case.searched, known.cause, known.seconds, made.sentence if made else None],
        Path,
        work,
        words=lambda path: path.name,
        wrote=lambda path: [path],
    )


def located(stages: Stages, options: PrefillOptions, key: str, preload: tuple[Path, ...]) -> Located:
    """Load the model again and say at which stage the padded run and the unpadded one part.

    key: a hash of the command, since nothing in a folder says what the model computes.
    """

    def work() -> Located:
        from sdpa_repro.capturing.prefill import prepare, totals
        from sdpa_repro.environment import preload as run_preloads
        from sdpa_repro.locating.locate import locate_prefill

        planted = run_preloads(list(preload))
        prefill = prepare(options, stages.say)
        pads = [total - prefill.length for total in totals(prefill, options)]
        with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as scratch:
            found = locate_prefill(prefill, pads, lengths=False, out=scratch, preloaded=planted, progress=stages.say)
        return Located(found.sentence, found.exit_status, _plain(found.document()))

    return stages.run(
        "locate",
        key,
        Located,
        work,
        words=lambda found: "found" if found.exit_status == 1 else "nothing beyond noise",
        keep=lambda found: found.exit_status != 130,
    )


def _plain(value: Any) -> Any:
    """A document with nothing in it but what can be kept."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
