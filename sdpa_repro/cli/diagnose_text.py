"""What `sdpa-repro diagnose` says: each result as it comes, the files, the next command; and `result.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_repro.cli import capture as capturing
from sdpa_repro.cli import explain as explaining
from sdpa_repro.cli import issue as issuing
from sdpa_repro.cli import output
from sdpa_repro.cli import replay as replaying
from sdpa_repro.cli.live import View
from sdpa_repro.cli.model_options import model_words

if TYPE_CHECKING:
    from sdpa_repro.diagnosing.chain import Located, Reduced
    from sdpa_repro.diagnosing.demo import Plan
    from sdpa_repro.diagnosing.stages import Stages
    from sdpa_repro.diagnosing.stopping import Stop
    from sdpa_repro.explaining.explain import Explanation
    from sdpa_repro.publishing.published import Published
    from sdpa_repro.replaying.replay import Replay

SCHEMA = "diagnose"
MOST_PADDINGS = 3
"""Lines about what padding does to the logits; of more paddings only the worst is shown."""


@dataclass
class Found:
    """What a diagnosis has found so far; it fills up from stage to stage. plan: of the demo."""

    folder: Path
    words: tuple[str, ...]
    values: Mapping[str, Any]
    plan: Plan | None = None
    report: dict[str, Any] | None = None
    dump: Path | None = None
    replay: Replay | None = None
    stop: Stop | None = None
    explanation: Explanation | None = None
    reduced: Reduced | None = None
    published: Published | None = None
    located: Located | None = None
    page: Path | None = None
    stages: Stages | None = field(default=None, repr=False)

    @property
    def capture_status(self) -> int:
        """The exit status of the capture; 0 of a dump that was given."""
        from sdpa_repro.capturing.report import exit_status

        return exit_status(self.report) if self.report is not None else 0

    @property
    def demo_found(self) -> bool:
        """Whether the demo found what it should."""
        from sdpa_repro.diagnosing.demo import demo_found

        return self.plan is not None and demo_found(self.replay, self.plan)

    @property
    def exit_status(self) -> int:
        """That of the demo, of a script that failed, of `locate`, of the replay."""
        if self.plan is not None:
            return 0 if self.demo_found else 1
        script = self.report["script"] if self.report is not None else None
        if self.replay is None or self.capture_status not in (0, 1) or (script is not None and script["status"]):
            return self.capture_status
        return self.located.exit_status if self.located is not None else self.replay.exit_status

    @property
    def advice(self) -> str:
        """Why no more was done, in a sentence; "" when everything was."""
        from sdpa_repro.diagnosing.stopping import Stop, fixed, most_moved

        if self.stop is Stop.KNOWN_FIXED and self.replay is not None:
            known = fixed(self.replay)
            assert known is not None
            return (
                f"no issue is needed: {known.issue} is fixed in torch {known.fixed_in}; "
                f"until you upgrade: {known.workaround} (--issue explains it and writes an issue all the same)"
            )
        if self.stop is Stop.NOT_SDPA:
            moved = most_moved(self.report)
            assert moved is not None
            return (
                f"not SDPA: padding to {moved.total} tokens moves the next token's logits by {moved.shift:.2g} of "
                "their spread, and no attention call is wrong"
            )
        if self.stop is Stop.HEALTHY:
            calls = [] if self.report is None else self.report["calls"]
            unchecked = " in the calls that were checked" * any(call["status"] == "unchecked" for call in calls)
            elsewhere = (
                "; the mask and layout of the call nearest to its threshold are in the dump, capture --keep all keeps "
                "every call, and locate --model ID, of a model instead of a script, looks at padding and positions"
            )
            ran = self.report is not None and bool(self.words)
            return f"nothing wrong{unchecked}: no script, issue or page written" + (elsewhere if ran else "")
        return ""


def worst_dump(report: Mapping[str, Any], folder: Path) -> Path | None:
    """The worst dump of a capture's report, None when there is none."""
    dumps = report["dumps"]
    return folder / dumps[0]["file"] if dumps else None


def to_locate(found: Found) -> bool:
    """Whether the model is to be run again for `locate`: nothing wrong with SDPA, and padding shows or it was asked."""
    from sdpa_repro.diagnosing.stopping import Stop

    if found.words or found.plan is not None:
        return False
    return found.stop is Stop.NOT_SDPA or (found.stop is Stop.HEALTHY and bool(found.values["locate"]))


def show(found: Found, view: View, say: Callable[[Found], None]) -> None:
    """Print a part, unless the one JSON document is all that is wanted."""
    if not found.values["as_json"]:
        with view.pause():
            say(found)


def print_capture(found: Found) -> None:
    """A capture after which there is nothing to replay."""
    assert found.report is not None
    capturing.print_report(found.report, found.values["preload"], found.words)


def print_verdict(found: Found) -> None:
    """The answer, then what was captured and replayed."""
    from sdpa_repro.diagnosing.stopping import headline

    assert found.replay is not None
    output.answer(output.clean(headline(found.replay, found.stop)))
    if found.advice:
        output.line(output.clean(found.advice))
    script = found.report["script"] if found.report is not None else None
    for line in capturing.script_lines(script) if script is not None else []:
        output.line(output.clean(line))
    output.line()
    if found.report is not None:
        _print_calls(found.report)
        output.line()
    output.line(f"replay of {output.clean(str(found.dump))}")
    replaying.print_cells(found.replay)


def _print_calls(report: Mapping[str, Any]) -> None:
    """What padding did to the next token, and the table of calls."""
    told, moved = list(report.get("prefills", ())), list(report.get("moved", ()))
    if len(told) > MOST_PADDINGS and len(moved) == len(told):
        worst = max(range(len(told)), key=lambda at: moved[at]["shift"])
        told = [told[worst], f"… the other {len(told) - 1} paddings move them less"]
    for run in told:
        output.line(output.clean(run))
    rows, colours = capturing.call_rows(dict(report))
    if rows:
        output.table(capturing.HEADERS, rows, styles=colours)
    _print_remarks(report)


def _print_remarks(report: Mapping[str, Any]) -> None:
    """What was not looked at."""
    for line in capturing.remarks(dict(report)):
        output.line(output.clean(line))


def print_cause(found: Found) -> None:
    """The better sentence, when there is one, and its parts."""
    told = found.explanation
    if told is None or told.backend is None:
        return
    if told.cause != told.replay.sentence:
        output.line()
        output.line(f"cause: {output.clean(explaining.answer(told))}")
    explaining.print_sections(told)


def print_reduced(found: Found) -> None:
    """How small the call got."""
    assert found.reduced is not None
    output.line()
    output.line(output.clean(found.reduced.sentence))


def print_published(found: Found) -> None:
    """Whether the script fails as it should, and the files."""
    made = found.published
    assert made is not None
    output.line(output.clean(made.sentence))
    if made.script is not None:
        issuing.print_files(made)


def print_located(found: Found) -> None:
    """The stage at which padding shows."""
    assert found.located is not None
    output.line()
    output.line(output.clean(f"locate: {found.located.sentence}"))


def print_end(found: Found) -> None:
    """The files, the demo's result, the next command; or the one document."""
    if found.values["as_json"]:
        output.document(SCHEMA, document(found))
        return
    if found.replay is None:
        if found.plan is not None:
            output.line(demo_line(found))
        return
    if found.page is not None:
        output.line(f"report  {output.clean(str(found.page))}")
    else:
        output.line()
    output.line(f"all of it is in {output.clean(str(found.folder))}")
    if found.plan is not None:
        output.line(demo_line(found))
    output.next_command(next_command(found))


def demo_line(found: Found) -> str:
    """What the demo came to."""
    from sdpa_repro.diagnosing.demo import DEMO_ISSUE

    assert found.plan is not None
    how = "as planted" if found.plan.preload else "for real"
    if found.demo_found:
        return f"demo: found: {DEMO_ISSUE}, {how}"
    return (
        f"demo: NOT FOUND: {DEMO_ISSUE}, {how}; expected FLASH_ATTENTION or EFFICIENT_ATTENTION wrong in query row 288"
    )


def next_command(found: Found) -> str:
    """What to run next: the script; of the demo, whose fault is not there then, the issue; else what leads on."""
    from sdpa_repro.diagnosing.stopping import Stop, fixed

    made, replay = found.published, found.replay
    again = [word for each in found.values["preload"] for word in ("--preload", str(each))]
    if made is not None and made.script is not None and made.issue is not None:
        if found.plan is not None and found.plan.preload:
            return output.shell("cat", made.issue)
        return issuing.try_script(made.script, again)
    if found.stop is Stop.KNOWN_FIXED and replay is not None:
        known = fixed(replay)
        assert known is not None
        return output.shell("python", "-m", "pip", "install", "--upgrade", f"torch>={known.fixed_in}")
    if found.located is not None or (found.stop is Stop.HEALTHY and found.report is not None and not found.words):
        return output.shell("sdpa-repro", "locate", *model_words(found.values), *again)
    if found.explanation is not None and found.explanation.backend is not None:
        return output.shell("sdpa-repro", "issue", found.dump, *again)
    return output.shell("sdpa-repro", "show", found.dump)


def write_result(found: Found) -> None:
    """Write `result.json`. Raises InputError when that cannot be done."""
    from sdpa_repro.diagnosing.place import RESULT
    from sdpa_repro.publishing import files

    files.write(found.folder, RESULT, output.document_text(SCHEMA, document(found)) + "\n")


def document(found: Found) -> dict[str, Any]:
    """As plain JSON types: that of `explain`, or of the replay alone, and those of the other stages."""
    from sdpa_repro.publishing.section import without_explanation

    told = found.explanation
    if told is None and found.replay is not None and found.dump is not None:
        told = without_explanation(found.dump, found.replay)
    report = found.report or {}
    empty = {"preloaded": report.get("preloaded", []), "environment": report.get("environment", {})}
    return {
        "folder": str(found.folder),
        "capture": found.report,
        "dump": None if found.dump is None else str(found.dump),
        "stopped": None if found.stop is None else found.stop.value,
        "advice": found.advice,
        "reduce": found.reduced.document if found.reduced is not None else None,
        "issue": found.published.document() if found.published is not None else None,
        "locate": found.located.document if found.located is not None else None,
        "report": None if found.page is None else str(found.page),
        "demo": found.demo_found if found.plan is not None else None,
        "stages": [
            {"name": done.name, "seconds": round(done.seconds, 2), "reused": done.reused}
            for done in (found.stages.done if found.stages is not None else ())
        ],
        "exit_status": found.exit_status,
        **(empty if told is None else told.document()),
    }
