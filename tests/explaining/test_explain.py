"""`explain` joins the parts: each planted fault is explained, a healthy call is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.errors import InputError
from sdpa_repro.explaining.answers import Answer, Conditions
from sdpa_repro.explaining.explain import Explanation, explain, suspect, throttled, with_rule
from sdpa_repro.explaining.length_result import LengthRule
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.fidelity import Fidelity
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.verdict import Status, Verdict
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump


def dump(folder: Path, **shape: object) -> Path:
    with torch.inference_mode():
        return write_dump(make_call(**shape), folder / "call.pt")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_bug_that_started_it_is_explained(tmp_path: Path) -> None:
    path = dump(tmp_path, rows=65, padding=7, heads=4, width=136, scale=1.0)
    result = explain(path, preload=fault("pytorch_191937"))
    document = json.loads(json.dumps(result.document(), default=str))
    assert document["backend"] == "FLASH_ATTENTION"
    assert {"attn_mask", "key_value_head_stride_0", "no_grad", "length_L"} <= set(document["needed"])
    assert {"values", "dtype", "batch", "length_S", "query_layout"} <= set(document["not_needed"])
    assert document["length_rule"]["over"] == "L"
    assert document["length_rule"]["rule"].startswith("L % 32 == 1")
    assert document["hypothesis"]["id"] == "mask_row"
    assert document["hypothesis"]["sentence"] == "the last query row (64) was computed with mask row 0"
    assert document["known"][0]["issue"] == "pytorch#191937"
    assert (document["known"][0]["match"], document["known"][0]["fixed_in"]) == ("emulated", "2.14.0")
    assert document["poison"]["reads_outside"] is False
    assert any("contiguous" in help_["line"] and help_["verified"] for help_ in document["workarounds"])
    assert document["complete"] is True
    assert document["preloaded"][0]["name"] == "pytorch_191937.py"
    assert result.cause == f"FLASH_ATTENTION: {result.hypothesis.sentence}, when {result.length_rule.rule}"  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_healthy_call_explains_to_nothing(tmp_path: Path) -> None:
    result = explain(dump(tmp_path))
    assert result.backend is None
    assert (result.conditions, result.hypothesis, result.length_rule, result.poison) == (None, None, None, None)
    assert result.document()["needed"] == []
    assert result.replay.exit_status == 0


@pytest.mark.slow
def test_a_budget_gives_a_partial_answer_marked_as_such(tmp_path: Path) -> None:
    result = explain(dump(tmp_path), preload=fault("pytorch_191937"), budget=0.001)
    assert result.backend == "FLASH_ATTENTION"
    assert result.complete is False
    assert result.conditions is None
    assert result.document()["complete"] is False


@pytest.mark.slow
def test_a_crash_is_explained_in_worker_processes(tmp_path: Path) -> None:
    path = dump(tmp_path, rows=4, heads=2, width=16)
    result = explain(path, preload=fault("segfault"), parts=("poison",))
    assert result.backend == "FLASH_ATTENTION"
    assert result.poison is not None
    assert "crashes" in result.poison.words


@pytest.mark.slow
def test_a_length_that_the_rule_decides_is_needed_although_its_neighbours_fail_too(tmp_path: Path) -> None:
    path = dump(tmp_path, rows=289, heads=2, width=16, layout="dense")
    result = explain(path, preload=fault("rows_beyond"), parts=("conditions", "length_rule"))
    document = result.document()
    assert document["length_rule"]["rule"] == "L > 128"
    assert "length_L" in document["needed"]
    assert "length_L" not in document["not_needed"]


def test_unknown_parts_and_backends_are_refused(tmp_path: Path) -> None:
    path = dump(tmp_path)
    with pytest.raises(InputError, match="unknown part 'magic'"):
        explain(path, parts=("magic",))


def test_progress_is_throttled() -> None:
    said: list[str] = []
    say = throttled(said.append, seconds=1000)
    for number in range(50):
        say(str(number))
    assert said == []
    say = throttled(said.append, seconds=0)
    say("now")
    assert said == ["now"]


@pytest.mark.slow
def test_a_shorter_call_is_explained_where_time_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdpa_repro.explaining.explain.TRIALS", 1e12)
    path = dump(tmp_path, rows=1025, heads=2, width=16, padding=7)
    result = explain(path, preload=fault("pytorch_191937"), budget=120, parts=("conditions", "hypothesis"))
    document = result.document()
    assert document["stand_in"] == [257, 257]
    assert {"attn_mask", "key_value_head_stride_0", "no_grad", "length_L"} <= set(document["needed"])
    assert document["hypothesis"]["sentence"] == (
        "the last query row (256) was computed with mask row 0 (at L = 257, S = 257)"
    )
    dense = next(help_ for help_ in document["workarounds"] if "contiguous" in help_["line"])
    assert (dense["verified"], dense["at"]) == (True, "")


@pytest.mark.slow
def test_without_a_budget_the_call_itself_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdpa_repro.explaining.explain.TRIALS", 1e12)
    path = dump(tmp_path, rows=513, heads=2, width=16)
    result = explain(path, preload=fault("pytorch_191937"), parts=("hypothesis",))
    assert (result.stand_in, result.left_out) == (None, ())
    assert result.hypothesis is not None
    assert result.hypothesis.sentence == "the last query row (512) was computed with mask row 0"


@pytest.mark.slow
def test_an_exception_is_not_taken_for_a_call_that_does_not_fail(tmp_path: Path) -> None:
    result = explain(dump(tmp_path, rows=4, heads=2, width=16), preload=fault("raises"))
    assert result.replay.guilty
    assert (result.conditions, result.length_rule, result.poison) == (None, None, None)
    assert result.complete


def answer(id: str) -> Answer:
    return Answer(id, id, why="stopped before this was tried")


def test_a_length_that_was_not_tried_is_needed_when_the_rule_decides_it() -> None:
    rule = LengthRule("L % 64 == 1", "L", 5, 9, 3, 3, None, None, ())
    found = with_rule(Conditions(True, not_tested=(answer("length_L"), answer("length_S")), complete=False), rule)
    assert [one.id for one in found.needed] == ["length_L"]
    assert [one.id for one in found.not_tested] == ["length_S"]


def replayed(cells: tuple[Cell, ...], guilty: tuple[str, ...] = ()) -> Replay:
    verdict = Verdict.BACKEND_WRONG if guilty else Verdict.HEALTHY
    fidelity, path = Fidelity(None, None, ""), Path("x.pt")
    return Replay(
        path, verdict, None, guilty, "said", (), fidelity, cells, "cpu", "bfloat16", (), (), (), int(bool(guilty))
    )


def test_a_kernel_that_is_right_is_not_suspected_for_what_the_default_path_calls_it() -> None:
    wrong = Cell("default", "bfloat16", Status.DIVERGES, chosen="MATH")
    assert suspect(replayed((wrong, Cell("MATH", "bfloat16", Status.AGREES)), ("MATH",))) is Backend.DEFAULT
    left_out = Cell("MATH", "bfloat16", Status.DECLINED)
    assert suspect(replayed((wrong, left_out), ("MATH",))) is Backend.MATH


def test_a_replay_that_did_not_end_is_no_answer() -> None:
    cells = (Cell("default", "bfloat16", Status.DECLINED),)
    words: dict[str, Any] = {"complete": False, "left_out": ("MATH", "default"), "judged": False, "seconds": 21.0}
    cut = Explanation(Path("x.pt"), None, replayed(cells), **words)
    assert cut.cause.startswith("no answer: ")
    assert cut.cause.endswith("give a larger budget, such as --budget 90")
    assert cut.exit_status == 2
    assert replace(cut, interrupted=True).exit_status == 130
    missing = Explanation(Path("x.pt"), None, replayed(cells), complete=False, left_out=("MATH", "eager"))
    assert missing.cause == "said; left out for want of time: MATH, eager"
    assert missing.exit_status == 0
    assert missing.larger_budget is None


def without_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the replay of the dump at `path` end before the default path has."""
    seen = replace(replayed((Cell("default", "bfloat16", Status.DECLINED),)), path=path)
    within = lambda *args, **words: (seen, ("MATH", "eager", "default"))  # noqa: E731
    monkeypatch.setattr("sdpa_repro.explaining.explain.replay_within", within)


@pytest.mark.slow
def test_a_shorter_call_answers_for_one_that_there_was_no_time_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dump(tmp_path, rows=1025, heads=2, width=16, padding=7)
    without_answer(path, monkeypatch)
    result = explain(path, preload=fault("pytorch_191937"), budget=120, parts=("conditions", "hypothesis"))
    assert (result.judged, result.backend, result.stand_in) == (False, "FLASH_ATTENTION", (257, 257))
    assert result.exit_status == 1
    assert result.path == result.replay.path == path
    assert result.known[0].issue == "pytorch#191937"
    assert result.cause == (
        "FLASH_ATTENTION: the last query row (256) was computed with mask row 0 (at L = 257, S = 257); seen on a "
        "shorter call (L = 257, S = 257), since this one did not come to an end in time"
    )
    assert result.seen.startswith("FLASH_ATTENTION is wrong in query row 256 of 2 heads")
    assert result.seen.endswith("since this one did not come to an end in time")
    document = result.document()
    assert (document["judged"], document["verdict"]) == (False, "backend_wrong")
    assert document["left_out"][:3] == ["MATH", "eager", "default"]
    assert all(not help_["verified"] for help_ in document["workarounds"])


@pytest.mark.slow
def test_where_no_shorter_call_fails_a_budget_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump(tmp_path, rows=513, heads=2, width=16)
    without_answer(path, monkeypatch)
    result = explain(path, budget=120)
    assert (result.judged, result.backend, result.stand_in, result.exit_status) == (False, None, None, 2)
    assert result.cause.startswith("no answer: ")
    assert result.complete is False


@pytest.mark.parametrize(
    ("status", "said"),
    [(Status.CRASHED, "crashes"), (Status.TIMEOUT, "hangs"), (Status.NONFINITE, "gives NaN or Inf")],
)
def test_the_cause_says_in_which_way_it_fails(status: Status, said: str) -> None:
    rule = LengthRule("L % 64 == 1", "L", 5, 9, 3, 3, None, None, ())
    result = replayed((Cell("FLASH_ATTENTION", "bfloat16", status),), ("FLASH_ATTENTION",))
    assert Explanation(Path("x.pt"), "FLASH_ATTENTION", result, length_rule=rule).cause == (
        f"FLASH_ATTENTION {said}, when L % 64 == 1"
    )
