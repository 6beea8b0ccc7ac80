"""From a failing dump to a folder with a script that was run, an issue, and the reduced dump."""

from __future__ import annotations

import hashlib
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdpa_repro.dump import load
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import explain, suspect
from sdpa_repro.publishing import files
from sdpa_repro.publishing.escaping import mapping, one_line
from sdpa_repro.publishing.facts import Tried, is_synthetic, recipes_of, story_of, tried_script
from sdpa_repro.publishing.issue import Report, check_template, issue
from sdpa_repro.publishing.published import Published
from sdpa_repro.publishing.tensor_lines import tensor_lines
from sdpa_repro.publishing.unit_test import unit_test
from sdpa_repro.publishing.version_results import read_results
from sdpa_repro.publishing.version_row import Row
from sdpa_repro.publishing.version_table import issue_rows
from sdpa_repro.publishing.versions import collect_env, table
from sdpa_repro.reducing.dump_reducer import reduce_dump
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.interrupts import interrupts
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.verdict import Status, Verdict
from sdpa_repro.replaying.worker import Worker

MANY_RUNS, FEW_RUNS = 20, 3
HANGS_AFTER, TIMEOUT_SECONDS = 30.0, 120.0
"""Seconds for a kernel that did not return before, and for any other."""

LEAST = 2.0
"""Seconds below which no search for a length rule is begun."""

SMALL = 1 << 20
"""Elements of all tensors up to which a call is run `MANY_RUNS` times to see whether it is deterministic."""

Progress = Callable[[str], None]


def publish(
    path: str | Path,
    folder: str | Path | None = None,
    *,
    reduced: bool = True,
    explained: bool = True,
    include_values: bool = False,
    test: bool = False,
    template: str | Path | None = None,
    preload: Sequence[str | Path] = (),
    device: str | None = None,
    budget: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
    explanation: Mapping[str, Any] | None = None,
    results: Sequence[str | Path] = (),
    replayed: Replay | None = None,
    reduction: Mapping[str, Any] | None = None,
    worker: Worker | None = None,
    captured: Mapping[str, Any] | None = None,
) -> Published:
    """Reduce and explain the dump's call, write `repro.py` and `issue.md` into `folder`, and run the script.

    folder: default `<dump>.issue` beside the dump. reduced, explained: leave that part out when False. budget:
    seconds for reducing and explaining together. explanation: the document of an `explain` that was already made.
    results: files that `versions` wrote, about this dump or about the script that is written here. replayed, reduction:
    a replay of the captured dtype, and the document of a `reduce_dump`, that were already made. worker: one with the
    preloads to replay in, left running. captured: the document of an `explain` of the dump itself; `explanation` is
    about the call that is published, the reduced one (where none is, `captured` is about that, too).
    Nothing is written when no backend fails, and `exit_status` is that of the verdict; else 1 when the script fails
    as it should, 3 when it does not. Raises InputError for bad input, for files that would be overwritten without
    `force`, for a bad template.
    """
    path, say = Path(path), progress or (lambda text: None)
    target = files.folder_for(path, Path(folder) if folder is not None else None)
    names = [files.SCRIPT, files.ISSUE, files.DUMP, *([files.TEST] if test else [])]
    files.check_free(target, names, force=force)
    check_template(template)
    tried = tuple((Path(name).name, *read_results(name)) for name in results)
    if replayed is None:
        say(f"replaying {path.name}")
    seen = replayed or replay(path, device=device, dtypes=("captured",), runs=1, preload=preload)
    if seen.verdict is not Verdict.BACKEND_WRONG:
        return Published(_nothing(seen), seen.exit_status, seen)
    options = _Options(
        path,
        target,
        tuple(preload),
        seen.device,
        include_values,
        test,
        template,
        reduced,
        explained,
        budget,
        say,
        tried,
        worker,
        captured or {},
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sdpa-repro-") as scratch, interrupts() as pressed:
        case = _reduced(options, seen, Path(scratch), reduction)
        if not pressed:
            case = _explained(options, case, explanation)
        if not pressed:
            options = replace(options, captured=_told(options, case, seen, time.monotonic() - began))
        if pressed:  # the searches end with what they have
            raise KeyboardInterrupt("nothing was written")
        return _written(options, case, seen)


@dataclass(frozen=True)
class _Options:
    """What does not change on the way."""

    path: Path
    folder: Path
    preload: tuple[str | Path, ...]
    device: str
    include_values: bool
    test: bool
    template: str | Path | None
    reduce: bool
    explain: bool
    budget: float | None
    say: Progress
    tried: tuple[tuple[str, str, list[Row]], ...] = ()
    """Of each file of results: its name, the sha256 of what was run, the rows."""
    worker: Worker | None = None
    captured: Mapping[str, Any] = field(default_factory=dict)
    """An explanation of the captured call, or empty."""

    @property
    def half(self) -> float | None:
        """Half of the seconds: reducing gets one, explaining the other."""
        return None if self.budget is None else self.budget / 2


@dataclass(frozen=True)
class _Case:
    """The call to publish, in the file `path`, and what is known about it."""

    path: Path
    backend: str
    replay: Replay
    reduction: Mapping[str, Any] = field(default_factory=dict)
    explanation: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    runs: int = 1
    """How often the script runs each backend: more than once where it does not fail every time."""


def _reduced(options: _Options, seen: Replay, scratch: Path, reduction: Mapping[str, Any] | None) -> _Case:
    """The reduced call; the captured one when it is not to be reduced, or cannot be."""
    backend = suspect(seen)
    assert backend is not None
    case = _Case(options.path, backend.value, seen)
    if not options.reduce:
        return case
    if reduction is not None:
        return replace(case, path=Path(reduction["output"]), reduction=reduction)
    try:
        found = reduce_dump(
            options.path,
            scratch / files.DUMP,
            device=options.device,
            preload=options.preload,
            budget=options.half,
            replayed=seen,
            progress=options.say,
        )
    except InputError as error:
        return replace(case, notes=(f"not reduced: {error}",))
    if found.output is None or not found.proven:
        return replace(case, notes=(f"not reduced: {found.sentence}",))
    return replace(case, path=found.output, reduction=found.document())


def _explained(options: _Options, case: _Case, explanation: Mapping[str, Any] | None) -> _Case:
    """The case with a replay of its own call in many runs, and an explanation."""
    elements = sum(tensor.numel() for tensor in load(case.path).call.tensors.values())
    before = {cell.status for cell in case.replay.cells if case.backend in (cell.backend, cell.kernel)}
    runs = 1 if before & {Status.CRASHED, Status.TIMEOUT} else MANY_RUNS if elements <= SMALL else FEW_RUNS
    times = "once" if runs == 1 else f"{runs} times"
    options.say(f"replaying the {'reduced' if case.reduction else 'captured'} call {times}")
    again = replay(
        case.path,
        device=options.device,
        dtypes=("captured",),
        runs=runs,
        timeout=HANGS_AFTER if Status.TIMEOUT in before else TIMEOUT_SECONDS,
        preload=options.preload,
        worker=options.worker,
    )
    if case.backend in again.guilty or case.backend == Backend.DEFAULT.value:
        flaky = any(
            cell.status is Status.UNSTABLE and case.backend in (cell.backend, cell.kernel) for cell in again.cells
        )
        case = replace(case, replay=again, runs=runs if flaky else 1)
    else:
        case = replace(case, notes=(*case.notes, f"{case.backend} did not fail again in {runs} more runs"), runs=runs)
    if explanation is None and options.explain and not case.reduction:
        explanation = options.captured or None
    if explanation is not None or not options.explain:
        return replace(case, explanation=explanation or {})
    found = explain(
        case.path,
        device=options.device,
        backend=case.backend,
        preload=options.preload,
        budget=options.half,
        progress=options.say,
    )
    return replace(case, explanation=found.document())


def _told(options: _Options, case: _Case, seen: Replay, spent: float) -> Mapping[str, Any]:
    """What is known of the captured call; its lengths are searched where those of the reduced call gave no rule.

    seen: its replay. spent: seconds of the budget that are gone.
    """
    rule = mapping(case.explanation.get("length_rule"))
    varied = rule.get("rule") is None and rule.get("fails") and rule.get("passes")
    left = None if options.budget is None else options.budget - spent
    if options.captured or not (options.explain and case.reduction and varied) or (left is not None and left < LEAST):
        return options.captured
    options.say("no rule over the reduced call's lengths: looking for that of the captured call")
    return explain(
        options.path,
        device=options.device,
        backend=case.backend,
        preload=options.preload,
        budget=left,
        parts=("length_rule",),
        progress=options.say,
        replayed=seen,
    ).document()


def _written(options: _Options, case: _Case, seen: Replay) -> Published:
    """Tell the story, run the script, write the files. seen: the replay of the captured call."""
    original, dump = load(options.path), load(case.path)
    recipes = recipes_of(dump)
    values = options.include_values or is_synthetic(original.origin)
    replayed = case.replay.document()
    story = story_of(
        dump,
        case.backend,
        replayed,
        case.explanation,
        device=options.device,
        inline=values,
        runs=case.runs,
        searched=bool(case.reduction),
        reduction=case.reduction,
        captured=original.call if case.reduction else None,
        told=options.captured,
    )
    tensors = tensor_lines(dump.call, recipes, inline=story.inline, file=story.file)
    beside = {story.file: case.path} if tensors.stored else {}
    options.say("running repro.py in a fresh process")
    made = tried_script(dump.call, recipes, story, guilty=case.replay.guilty, preload=options.preload, beside=beside)
    versions, left_out = _versions(options, made)
    options.say("collecting versions for the issue")
    report = Report(
        call=dump.call,
        story=made.story,
        script=made.text,
        run=made.run,
        explanation=case.explanation,
        reduction=case.reduction,
        replay=replayed,
        origin=original.origin,
        environment=original.environment,
        captured_with=original.preloaded,
        preloaded=case.replay.preloaded,
        versions=versions,
        machine=collect_env(),
        command=_command(options),
        inline=tensors.inline,
        stored=tensors.stored,
        result=dump.output,
        captured=original.call if case.reduction else None,
        captured_explanation=options.captured,
        captured_replay=seen.document() if case.reduction else {},
    )
    contents: dict[str, str | bytes] = {files.SCRIPT: made.text, files.ISSUE: issue(report, options.template)}
    notes = (*case.notes, *left_out)
    if options.test:
        try:
            contents[files.TEST] = unit_test(dump.call, recipes, made.story)
        except InputError as error:
            notes = (*notes, f"no {files.TEST}: {error}")
    if case.reduction or tensors.stored:
        contents[files.DUMP] = case.path.read_bytes()
    paths = files.write_all(options.folder, contents)
    return Published(
        sentence=_sentence(made),
        exit_status=1 if made.run.fails else 3,
        replay=case.replay,
        title=report.title,
        cause=made.story.cause,
        folder=options.folder,
        script=paths[files.SCRIPT],
        issue=paths[files.ISSUE],
        test=paths.get(files.TEST),
        dump=paths.get(files.DUMP),
        run=made.run,
        closed=not tensors.inline and not tensors.stored,
        explanation=case.explanation,
        reduction=case.reduction,
        notes=notes,
    )


def _versions(options: _Options, made: Tried) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The rows for the issue: this run, and results of this very script or dump; a note for those of another."""
    if not options.tried:
        return [], []
    about = {hashlib.sha256(data).hexdigest() for data in (made.text.encode("utf-8"), options.path.read_bytes())}
    rows: list[Mapping[str, Any]] = [*table(made.run, ())]
    notes = []
    for name, digest, found in options.tried:
        if digest in about:
            rows += issue_rows(found)
        else:
            notes.append(f"{name} is about another script: run the new one with sdpa-repro versions and --issue")
    return rows, notes


def _sentence(made: Tried) -> str:
    """The answer: the cause, and whether the script does here what it should."""
    run = made.run
    if run.fails:
        return f"{made.story.cause} repro.py fails here as it should ({run.ending()}, {run.seconds:.0f} s)"
    return f"{made.story.cause} But repro.py does NOT fail here ({run.ending()}): do not post it as it is"


def _nothing(seen: Replay) -> str:
    """Why there is no issue to write."""
    if seen.verdict is Verdict.HEALTHY:
        return f"nothing to report: {seen.sentence}"
    if seen.verdict is Verdict.EAGER_WRONG:
        return f"nothing to report to PyTorch: {seen.sentence}"
    return f"no issue written: {seen.sentence}"


def _command(options: _Options) -> str:
    """What writes these files again; files by their names alone, since folders are nobody's business."""
    words = ["sdpa-repro", "issue", one_line(options.path.name, 100)]
    words += [] if options.reduce else ["--no-reduce"]
    words += [] if options.explain else ["--no-explain"]
    words += ["--include-values"] if options.include_values else []
    words += ["--test"] if options.test else []
    for file in options.preload:
        words += ["--preload", one_line(Path(file).name, 100)]
    return " ".join(shlex.quote(word) for word in words)
