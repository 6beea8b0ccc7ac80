"""`explain` joins the parts: each planted fault is explained, a healthy call is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sdpa_repro.errors import InputError
from sdpa_repro.explaining.explain import explain, throttled
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
