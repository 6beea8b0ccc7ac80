"""Kept results come back as they were, and a file from somebody else builds nothing but results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sdpa_repro.diagnosing.codec import decoded, encoded
from sdpa_repro.explaining.answers import Answer, Conditions, Outcome, Tried
from sdpa_repro.explaining.explain import Explanation
from sdpa_repro.explaining.hypotheses import Hypothesis, NearMiss
from sdpa_repro.explaining.length_probe import Axis
from sdpa_repro.explaining.length_result import LengthRule, Sweep
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.explaining.rules import Clause, Rule
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.replay import Replay
from tests.killed_work import made_replay


def explanation(folder: Path) -> Explanation:
    """One of every class that an explanation is made of."""
    replay = made_replay(folder / "x.pt", known=(Match("pytorch#1", "exact", "title", None, "none"),))
    tried = Tried("no mask", Outcome.PASSES, line="attn_mask=None")
    rule = Rule((Clause("L", "==", (1,), modulus=32),))
    sweep = Sweep(Axis("L", 33, 33), (33,), (32, 34), ())
    return Explanation(
        folder / "x.pt",
        "MATH",
        replay,
        Conditions(True, needed=(Answer("attn_mask", "a mask", (tried,)),), alternatives=(("a", "b"),)),
        Hypothesis("mask_row", "row 4 used row 0", (NearMiss("other", "words", 1, 2, "why"),)),
        LengthRule("L % 32 == 1", "L", 1, 2, 3, 3, (32, 32), None, (sweep,), untested={"why": 1}, fitted=rule),
        Poison(False, "nothing"),
    )


def test_an_explanation_comes_back_equal_through_text(tmp_path: Path) -> None:
    first = explanation(tmp_path)
    text = json.dumps(encoded(first, tmp_path), allow_nan=False)
    assert decoded(json.loads(text), tmp_path, Explanation) == first


def test_a_path_in_the_folder_moves_with_it_and_another_one_stays(tmp_path: Path) -> None:
    inside, outside = tmp_path / "a" / "x.pt", tmp_path / "y.pt"
    kept = encoded((inside, outside), tmp_path / "a")
    assert decoded(kept, tmp_path / "b", tuple) == (tmp_path / "b" / "x.pt", outside)


def test_infinities_numbers_as_keys_and_text_that_is_more_than_text_are_kept(tmp_path: Path) -> None:
    value = {"a": math.inf, 3: (math.nan, [torch.__version__])}
    back = decoded(json.loads(json.dumps(encoded(value, tmp_path), allow_nan=False)), tmp_path, dict)
    assert back["a"] == math.inf
    assert math.isnan(back[3][0])
    assert back[3][1] == [str(torch.__version__)]


@pytest.mark.parametrize(
    "hostile",
    [
        {"$": "subprocess.Popen", "fields": {"args": "true"}},
        {"$": "sdpa_repro.replaying.worker.Worker", "fields": {}},
        {"$": "sdpa_repro.replaying.cells.Cell", "fields": {"nothing": 1}},
        {"$": "sdpa_repro.replaying.verdict.Status", "value": "no such status"},
        {"no tag": 1},
        {"$": "tuple"},
        ["a list"],
        None,
    ],
)
def test_anything_that_is_no_result_of_the_kind_is_refused(hostile: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a "):
        decoded(hostile, tmp_path, Replay)


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Tensor"):
        encoded({"a": torch.zeros(1)}, tmp_path)
