"""Results made by hand, one of each kind with every part filled in, for the tests of what `--json` prints.

Running the verbs for real takes minutes; what their documents look like does not depend on how they came about.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sdpa_repro.capturing.prefill import Prefill
from sdpa_repro.cli.diagnose_text import Found
from sdpa_repro.diagnosing.stages import Done, Stages
from sdpa_repro.explaining.answers import Answer, Conditions, Outcome, Tried, Workaround
from sdpa_repro.explaining.explain import Explanation
from sdpa_repro.explaining.grid_result import Cell, Grid
from sdpa_repro.explaining.grid_result import Row as GridRow
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.explaining.kinds import Kind
from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.explaining.length_result import TOGETHER, LengthRule, Sweep
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.guarding.script import GuardedRun
from sdpa_repro.locating import deciding
from sdpa_repro.locating.caches import CacheComparison
from sdpa_repro.locating.greedy import Continuation
from sdpa_repro.locating.grid import Unreachable
from sdpa_repro.locating.invariants import Finding, Item, Point, Status
from sdpa_repro.locating.locate import Located
from sdpa_repro.locating.running import Path as Way
from sdpa_repro.locating.sweep import Row, WrongCall
from sdpa_repro.locating.sweep import Sweep as PadSweep
from sdpa_repro.locating.table import Level, Stage, StageTable
from sdpa_repro.locating.table import Outcome as StageOutcome
from sdpa_repro.locating.verdict import Verdict
from sdpa_repro.locating.verify import Verified
from sdpa_repro.publishing.published import Published
from sdpa_repro.publishing.report import Reported
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.publishing.section import Section
from sdpa_repro.publishing.share import Shared
from sdpa_repro.publishing.try_versions import Versions
from sdpa_repro.publishing.version_row import Outcome as VersionOutcome
from sdpa_repro.publishing.version_row import Row as VersionRow
from sdpa_repro.publishing.version_runs import Subject
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.replay import Replay

PRELOADED = {"name": "fault.py", "sha256": "0" * 64}
FACTOR = Answer("attn_mask", "a mask", (Tried("no mask", Outcome.PASSES),))


def prefill() -> Prefill:
    """What documents ask of a prefill."""
    return cast(Prefill, SimpleNamespace(name="tiny", length=282, padding_side="left", device="cpu"))


def explanation(replay: Replay) -> Explanation:
    """Every part worked out."""
    axis = Axis(TOGETHER, 33, 33)
    return Explanation(
        Path("x.pt"),
        "FLASH_ATTENTION",
        replay,
        conditions=Conditions(
            True,
            needed=(FACTOR,),
            not_needed=(FACTOR,),
            not_tested=(FACTOR,),
            alternatives=(("batch", "heads"),),
            workarounds=(Workaround("MATH is right", "with ...", True),),
        ),
        hypothesis=Hypothesis("mask_row", "the last query row was computed with mask row 0", tied=("other",), sets=2),
        length_rule=LengthRule(
            "L % 32 == 1",
            "L",
            fails=1,
            passes=2,
            held_out=1,
            held_out_right=1,
            below=(32, 32),
            above=(34, 34),
            sweeps=(Sweep(axis, (33,), (32, 34), (1,)),),
            apart=((33, 40, True),),
            untested={"one key": 1},
        ),
        poison=Poison(False, "nothing outside the inputs moves the output"),
    )


def grid() -> Grid:
    """One form of the call, of which one length fails."""
    kind = Kind(Backend.FLASH_ATTENTION, "bfloat16", 512, "as-dumped")
    cells = (Cell(kind, 32, "agrees"), Cell(kind, 33, "diverges", 49.0), Cell(kind, 34, "not_tested", reason="time"))
    axis = Axis(TOGETHER, 33, 33)
    return Grid(Path("x.pt"), "cpu", axis, (32, 33, 34), (GridRow(kind, axis, cells),), preloaded=(PRELOADED,))


def published(replay: Replay) -> Published:
    """An issue with a script that was run."""
    run = ScriptRun(1, "AssertionError", 2.0, "here")
    return Published("wrong", 1, replay, title="t", cause="c", script=Path("repro.py"), run=run, notes=("n",))


def shared(replay: Replay) -> Shared:
    """A copy with one real argument."""
    return Shared(Path("y.pt"), "some values are real", ("key",), ("query", "value"), ("phase",), replay)


def reported(replay: Replay) -> Reported:
    """A page about one dump, and another that could not be read."""
    section = cast(Section, SimpleNamespace(replay=replay, preloaded={"fault.py": "0" * 64}))
    return Reported(Path("report.html"), (section,), {"bad.pt": "is empty"}, 1)


def versions() -> Versions:
    """One environment."""
    row = VersionRow("here", VersionOutcome.FAILS, {"MATH": "ok"}, {"torch": "2.13.0"}, "", 1.0, ("fault.py",))
    return Versions(Subject(Path("repro.py"), "0" * 64, "assert False"), (row,), (PRELOADED,))


def guarded() -> GuardedRun:
    """One process in which a call was changed."""
    summary: dict[str, Any] = {
        "needed": True,
        "why": "",
        "calls": 3,
        "changed": {"pytorch#191937": 1},
        "issues": [{"issue": "pytorch#191937", "fixed_in": "2.14.0", "cure": "contiguous key and value"}],
        "passed": {"nested": 1},
        "threads_not_covered": {},
    }
    return GuardedRun(0, ({"pid": 1, "state": "ended", "summary": summary},))


def diagnosed(replay: Replay) -> Found:
    """A dump that was explained."""
    stages = cast(Stages, SimpleNamespace(done=(Done("replay", 1.0, False),)))
    return Found(
        Path("out/x"),
        (),
        {},
        dump=Path("out/x/x.pt"),
        replay=replay,
        explanation=explanation(replay),
        stages=stages,
    )


def located() -> Located:
    """A padding that moves the logits through an SDPA call."""
    wrong = WrongCall("layers.5", "FLASH_ATTENTION", 1.5, 49.0, (288,))
    row = Row(282, 7, Way.DEFAULT, wrong_calls=(wrong,), why="logits", against="default")
    rule = deciding.LengthRule(
        "total % 32 == 1", "total length", "fails when", ("not the padding",), ((282, 7),), ((282, 6),)
    )
    rule = deciding.LengthRule(**{**vars(rule), "unreachable": (Unreachable(1, 2, "no shorter prompt"),)})
    stage = Stage("layer 5 attention", StageOutcome.DIFFERS, Level.BACKEND, 1.0, 0.1, "token 288", "layers.5", "m.py")
    call = {"run": "padded", "status": "diverges"}
    return Located(
        prefill(),
        PadSweep((row,), 282, 0.1),
        rule,
        StageTable((stage,), 282, 289, "left", (call,), Path("x.pt")),
        Verdict(Level.BACKEND, "layer 5", "attention", "layers.5", "m.py", "same", "token 288", dump=Path("x.pt")),
        (Continuation(Way.DEFAULT, 7, (1, 2), (1, 3)),),
        ("a note",),
        (PRELOADED,),
    )


def verified() -> Verified:
    """One broken invariant, and caches that differ."""
    point = Point(1, 289)
    item = Item("logits", Status.BROKEN, 1, (Finding(point, "moved", "layers.5", "m.py"),))
    caches = CacheComparison(289, ("sliding",), {"sliding": "one key more"}, 0.5, (1, 2), "m", "m.py", True)
    return Verified(prefill(), (item,), (point,), 0.1, caches, ("a note",), (PRELOADED,))
