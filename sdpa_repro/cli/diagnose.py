"""`sdpa-repro diagnose`: the whole chain in one folder; and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import capture as capturing
from sdpa_repro.cli import diagnose_text as text
from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.cli.live import View, watching
from sdpa_repro.cli.model_options import NAMES, build_options, given, model_options
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.cli.diagnose_text import Found
    from sdpa_repro.diagnosing.chain import Case
    from sdpa_repro.diagnosing.demo import Plan
    from sdpa_repro.diagnosing.stages import Stages
    from sdpa_repro.replaying.worker import Worker

NO_RESULT = ("as_json", "no_issue", "issue", "locate", "fresh", "out", "budget", "no_prove", "command")
"""Options on which what is captured does not depend."""


@click.command(
    name="diagnose",
    cls=capturing.ScriptCommand,
    short_help="Capture, replay, explain, reduce, and write issue and report in one go.",
    epilog=epilog(
        {
            0: "nothing wrong (with --demo: the expected bug was found); or of a script its own status",
            1: "a divergence (with --demo: the expected bug was not found)",
            3: "wrong live but clean on replay",
            130: "interrupted; the same command goes on from there",
        },
        "sdpa-repro diagnose --model ID --image cat.png --pad 7",
        "sdpa-repro diagnose -- script.py ARGS",
        "sdpa-repro diagnose dumps/x.pt",
    ),
)
@click.argument(
    "words", metavar="[DUMP | -- SCRIPT.py ARGS...]", nargs=-1, type=click.UNPROCESSED, shell_complete=dumps
)
@model_options
@click.option(
    "--out",
    "-o",
    default="out",
    show_default=True,
    type=PATH,
    help="Where to make the folder for everything, named after the dump, script or model.",
)
@capturing.selection_options
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), help="Seconds for explaining and for reducing.")
@click.option("--no-issue", is_flag=True, help="Stop after explaining: write no script and no issue.")
@click.option("--issue", is_flag=True, help="Write the issue even of a bug that is known and fixed.")
@click.option("--locate", is_flag=True, help="When no call is wrong, look for the stage where padding shows, always.")
@click.option("--fresh", is_flag=True, help="Use nothing of an earlier run.")
@click.option("--demo", is_flag=True, help="The embedded model with a known bug; succeeds when that is found.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; a script's stdout goes to stderr.")
def command(words: tuple[str, ...], demo: bool, **values: Any) -> None:
    """Find out what is wrong with a model's attention: capture its calls, replay the worst, explain it, and write a
    script and an issue about the smallest call that still fails, and a page to look at: all into one folder.

    A run that was killed goes on where it was when the same command is started again.
    """
    dump = Path(words[0]) if len(words) == 1 and words[0].endswith(".pt") else None
    _check(words, dump, demo, values)
    said = "sdpa-repro diagnose --demo" if demo else capturing.command_line(values, "diagnose", "out")
    values = {**values, "no_prove": True, "command": said}
    plan = None
    if demo:
        from sdpa_repro.diagnosing.demo import DEMO_PAD, demo_plan

        plan = demo_plan()
        if not values["as_json"]:
            output.answer(plan.words)
            output.line()
        values |= {"pad": DEMO_PAD, "device": plan.device, "preload": plan.preload, "issue": True}
    raise SystemExit(_diagnose(words, dump, values, plan))


def _check(words: Sequence[str], dump: Path | None, demo: bool, values: dict[str, Any]) -> None:
    """Raise InputError for options that do not go together, and for a dump that is none, before anything is made."""
    if demo and (words or given(**values) or values["preload"]):
        raise InputError("--demo brings its own model, padding and fault: leave the other options out")
    if dump is not None and given(**{**values, "device": None}):
        raise InputError(f"{dump} is a dump: leave the model options out")
    if values["issue"] and values["no_issue"]:
        raise InputError("--issue and --no-issue contradict each other: give one of them")
    if values["locate"] and words:
        raise InputError("--locate needs the model itself: name it with --model instead of a script or a dump")
    if dump is not None:
        from sdpa_repro.dump import load

        load(dump)
    elif words:
        from sdpa_repro.capturing.script import command_of

        folder = Path(words[0])
        if folder.is_dir() and not (folder / "__main__.py").is_file() and any(folder.glob("*.pt")):
            raise InputError(f"{folder} is a folder: give one of the dumps in it")
        command_of(words)
    else:
        build_options(**{name: values.get(name) for name in NAMES})


def _diagnose(words: Sequence[str], dump: Path | None, values: dict[str, Any], plan: Plan | None) -> int:
    """Choose the folder, hold it, go on from what is there; the exit status."""
    from sdpa_repro import ranks
    from sdpa_repro.diagnosing import naming, place
    from sdpa_repro.diagnosing.stages import Stages
    from sdpa_repro.replaying.interrupts import interrupts

    subject = naming.subject_of(dump, words, values["model"], demo=plan is not None)
    name = "demo" if plan else naming.name_of(dump, words, values["model"])
    folder = place.choose(values["out"], name, subject)
    values["out"] = folder
    if not ranks.is_first():
        if dump is None:
            capturing.run_capture(words, values, unpadded=False)
        return 0
    chosen = {option: value for option, value in values.items() if option not in NO_RESULT}
    key = naming.command_key([] if dump else words, chosen)
    with ExitStack() as stack:
        stack.enter_context(place.held(folder))
        view = stack.enter_context(watching())
        pressed = stack.enter_context(interrupts())
        dump, said = _made_ready(stack, folder, key, dump, [*values["preload"], *([] if dump else words)], values)
        place.write_run(folder, place.Run(subject, key, False))
        stages = Stages(folder, key, view)
        for sentence in said:
            stages.say(sentence)
        try:
            found = _stages(stages, words, dump, values, pressed, plan, view)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("results so far are kept: the same command goes on there") from None
        text.write_result(found)
        place.write_run(folder, place.Run(subject, key, True))
        with view.pause():
            text.print_end(found)
    return found.exit_status


def _made_ready(
    stack: ExitStack, folder: Path, key: str, dump: Path | None, needed: Sequence[str | Path], values: dict[str, Any]
) -> tuple[Path | None, list[str]]:
    """Make room in a folder that is held: what another command left is moved, not removed.

    needed: files that the command names. Returns where the dump is now, and what there is to say.
    """
    from sdpa_repro.diagnosing import place

    before = place.read_run(folder)
    if before is None:
        return dump, []
    if before.command != key:
        inside = dump is not None and dump.resolve().parent == folder.resolve()
        aside = place.set_aside(folder, needed)
        if aside is None:
            return dump, place.start_over(folder)
        stack.enter_context(place.held(folder))
        said = [f"the results of another command or torch that were in {folder} are in {aside} now"]
        return (aside / dump.name if dump is not None and inside else dump), said
    if values["fresh"] or (before.finished and dump is None):
        return dump, place.start_over(folder)
    return dump, [] if before.finished else ["an earlier run of this command did not end: going on where it was"]


def _stages(
    stages: Stages,
    words: Sequence[str],
    dump: Path | None,
    values: dict[str, Any],
    pressed: list[int],
    plan: Plan | None,
    view: View,
) -> Found:
    """Every stage in turn, each printed as soon as it is known, the answer first."""
    from sdpa_repro.diagnosing import place
    from sdpa_repro.diagnosing.chain import Case
    from sdpa_repro.replaying.worker import Worker

    preload = tuple(values["preload"])
    with Worker(preload) as worker:  # imports torch while the model runs
        found = text.Found(stages.folder, tuple(words), values, plan, stages=stages)
        if dump is None:
            found.report = _captured(stages, words, values, view)
            dump = text.worst_dump(found.report, stages.folder)
            if dump is None or found.capture_status == 130:
                text.show(found, view, text.print_capture)
                if found.capture_status == 130:
                    raise KeyboardInterrupt
                return found
        else:
            dump = place.brought(dump, stages.folder)
        case = Case(stages, dump, values["device"], preload, values["budget"], lambda: bool(pressed))
        found.dump = dump
        _judged(case, found, worker, view)
        if found.stop is None:
            _worked_out(case, found, worker, view)
        elif text.to_locate(found):
            _located(found, stages, preload, view)
        _drawn(case, found, worker)
    return found


def _captured(stages: Stages, words: Sequence[str], values: dict[str, Any], view: View) -> dict[str, Any]:
    """The report of the capture; a script has the terminal to itself."""
    from sdpa_repro import ranks
    from sdpa_repro.capturing.report import exit_status
    from sdpa_repro.diagnosing.place import clear_dumps

    def work() -> dict[str, Any]:
        if ranks.world() == 1:  # of a run that was killed while it captured; other ranks may be writing already
            clear_dumps(stages.folder)
        unpadded = not words and ranks.world() == 1
        if not words:
            return capturing.run_capture(words, values, unpadded=unpadded, progress=stages.say)
        with view.pause():
            return capturing.run_capture(words, values, progress=stages.say)

    report = stages.run(
        "capture",
        None,
        dict,
        work,
        words=lambda told: f"{told['wrong']} of {told['checked']} calls wrong",
        wrote=lambda told: [stages.folder / each["file"] for each in told["dumps"]],
        keep=lambda told: exit_status(told) != 130 and not told["failed"] and ranks.world() == 1,
    )
    return {**report, "out": str(stages.folder)}


def _judged(case: Case, found: Found, worker: Worker, view: View) -> None:
    """The verdict, printed at once: it is the first line."""
    from sdpa_repro.diagnosing.chain import replayed
    from sdpa_repro.diagnosing.stopping import most_moved, stop_after

    found.replay = replayed(case, worker)
    if found.replay.device != "cpu":
        worker.close()  # its GPU memory is wanted by what follows
    found.stop = stop_after(found.replay, most_moved(found.report), issue=found.values["issue"])
    text.show(found, view, text.print_verdict)


def _worked_out(case: Case, found: Found, worker: Worker, view: View) -> None:
    """Cause, smallest call, script and issue, as far as they are wanted. After Ctrl-C: what is known, then the end."""
    from sdpa_repro.diagnosing.chain import explained, published, reduced

    replay = found.replay
    assert replay is not None
    found.explanation = explained(case, replay)
    text.show(found, view, text.print_cause)
    if case.interrupted():
        raise KeyboardInterrupt
    if replay.verdict.value != "backend_wrong" or found.values["no_issue"]:
        return
    found.reduced = reduced(case, replay)
    if case.interrupted():
        raise KeyboardInterrupt
    text.show(found, view, text.print_reduced)
    found.published = published(case, replay, found.reduced, worker, found.explanation)
    text.show(found, view, text.print_published)


def _located(found: Found, stages: Stages, preload: tuple[Path, ...], view: View) -> None:
    """No call is wrong: where padding shows instead."""
    from sdpa_repro.diagnosing.chain import located

    options = build_options(**{name: found.values.get(name) for name in NAMES})
    stages.say("no attention call is wrong: looking for the stage at which padding shows")
    found.located = located(stages, options, "", preload)
    if found.located.exit_status == 130:
        raise KeyboardInterrupt
    text.show(found, view, text.print_located)


def _drawn(case: Case, found: Found, worker: Worker) -> None:
    """The page, of everything but a healthy call."""
    from sdpa_repro.diagnosing.chain import drawn

    replay = found.replay
    assert replay is not None
    if replay.verdict.value == "healthy":
        return
    found.page = drawn(case, found.explanation or replay, found.published, worker)
