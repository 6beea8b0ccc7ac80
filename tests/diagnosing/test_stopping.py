"""When a diagnosis ends early: nothing wrong, known and fixed, not SDPA."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sdpa_repro.diagnosing.stopping import Moved, Stop, fixed, headline, most_moved, stop_after
from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.verdict import Verdict
from tests.killed_work import made_replay

PATH = Path("x.pt")


def known(match: str = "exact", fixed_in: str | None = "2.14.0") -> Match:
    return Match("pytorch#191937", match, "title", fixed_in, "key.contiguous()")


@pytest.mark.parametrize(
    ("version", "match", "fixed_in", "preloaded", "stops"),
    [
        ("2.13.0", "exact", "2.14.0", False, True),
        ("2.13.0+cu130", "exact", "2.14.0", False, True),
        ("2.14.0", "exact", "2.14.0", False, False),
        ("2.15.0", "exact", "2.14.0", False, False),
        ("2.13.0", "exact", None, False, False),
        ("2.13.0", "possible", "2.14.0", False, False),
        ("2.13.0", "emulated", "2.14.0", False, False),
        ("2.13.0", "exact", "2.14.0", True, False),
    ],
)
def test_only_an_exact_match_that_a_newer_torch_does_not_have_stops(
    version: str,
    match: str,
    fixed_in: str | None,
    preloaded: bool,
    stops: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    planted = ({"name": "fault.py", "sha256": "0"},) if preloaded else ()
    result = made_replay(PATH, known=(known(match, fixed_in),), preloaded=planted)
    assert (fixed(result) is not None) == stops
    assert (stop_after(result, None, issue=False) is Stop.KNOWN_FIXED) == stops
    assert stop_after(result, None, issue=True) is None


def test_what_is_fixed_is_said_with_what_to_do_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    result = made_replay(PATH, known=(known(),))
    assert headline(result, Stop.KNOWN_FIXED) == "upgrade torch to 2.14.0 or later: MATH is wrong in query row 4"
    assert headline(result, None) == "MATH is wrong in query row 4"


def test_a_healthy_call_stops_and_padding_that_shows_is_not_sdpa() -> None:
    healthy = made_replay(PATH, verdict=Verdict.HEALTHY)
    assert stop_after(healthy, None, issue=False) is Stop.HEALTHY
    assert stop_after(healthy, Moved(289, 0.02, False), issue=True) is Stop.HEALTHY
    assert stop_after(healthy, Moved(289, 0.9, True), issue=False) is Stop.NOT_SDPA


@pytest.mark.parametrize(
    ("shift", "flipped", "clearly"),
    [(0.0, False, False), (0.05, True, False), (0.15, False, False), (0.15, True, True), (0.3, False, True)],
)
def test_logits_that_jitter_have_not_moved(shift: float, flipped: bool, clearly: bool) -> None:
    assert Moved(289, shift, flipped).clearly == clearly


@pytest.mark.parametrize("shift", [math.nan, math.inf])
def test_logits_that_are_no_numbers_have_moved(shift: float) -> None:
    assert Moved(289, shift, False).clearly


def test_the_length_at_which_padding_moves_most_counts() -> None:
    rows = [{"total": total, "shift": shift, "flipped": False} for total, shift in ((283, 0.1), (289, 0.4), (290, 0.2))]
    assert most_moved({"moved": rows}) == Moved(289, 0.4, False)
    assert most_moved({"moved": []}) is None
    assert most_moved(None) is None
