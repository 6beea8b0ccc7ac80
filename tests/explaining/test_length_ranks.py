"""The search for a length rule gives the same answer when its trials are shared out, and all ranks end together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpa_repro import ranks
from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.assisting import Helpers, Plan
from sdpa_repro.explaining.length_ranks import Shared, attempt
from sdpa_repro.explaining.length_rule import length_rule
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.trial import Result, Trial
from sdpa_repro.replaying.verdict import Status
from tests import torchrun
from tests.calls import make_call


def trial_of(predicate: Callable[[int, int], bool], status: Status = Status.DIVERGES) -> Trial:
    """A trial that computes nothing and fails where the predicate over L and S says so."""

    def trial(call: AttentionCall) -> Result:
        return Result(status if predicate(call.query.shape[-2], call.key.shape[-2]) else Status.AGREES)

    return trial


def small_call(rows: int, keys: int | None = None) -> AttentionCall:
    return make_call(1, 1, 1, rows, keys, width=4, mask=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("predicate", "rows", "status"),
    [
        (lambda rows, keys: rows % 32 == 1 and rows > 1, 33, Status.DIVERGES),
        (lambda rows, keys: keys % 48 == 7, 55, Status.DIVERGES),
        (lambda rows, keys: rows == 40, 40, Status.NONFINITE),
        (lambda rows, keys: True, 9, Status.DIVERGES),
        (lambda rows, keys: rows % 16 == 3, 35, Status.CRASHED),
    ],
    ids=["residue", "keys", "one length", "always", "crashes"],
)
def test_the_answer_is_the_same_with_shared_trials(
    predicate: Callable[[int, int], bool], rows: int, status: Status
) -> None:
    trial, call = trial_of(predicate, status), small_call(rows)
    assert length_rule(call, Shared(trial)).document() == length_rule(call, trial).document()


def test_a_deadline_ends_a_shared_search_with_what_is_known() -> None:
    calls = []

    def slow(call: AttentionCall) -> Result:
        calls.append(call.query.shape[-2])
        return Result(Status.DIVERGES)

    found = length_rule(small_call(9), Shared(slow), deadline=time.monotonic() - 1)
    assert found.complete is False
    assert len(calls) <= 1


def test_a_call_that_cannot_be_made_is_an_outcome_with_its_reason() -> None:
    def unmakeable(rows: int, keys: int) -> AttentionCall:
        raise RuntimeError("no room\nfor it")

    for trial in (trial_of(lambda rows, keys: True), Shared(trial_of(lambda rows, keys: True))):
        assert attempt(trial, unmakeable, (3, 3)) == (None, "no room")


def test_prepared_outcomes_are_given_once_and_for_their_own_form_alone() -> None:
    asked = []

    def trial(call: AttentionCall) -> Result:
        asked.append(call.query.shape[-2])
        return Result(Status.AGREES)

    shared = Shared(trial)
    one, other = (lambda rows, keys: small_call(rows, keys)), (lambda rows, keys: small_call(rows, keys))
    shared.prepare(one, [(3, 3), (4, 4)])
    assert asked == [3, 4]
    shared.at(one, (3, 3))
    assert asked == [3, 4]
    shared.at(other, (4, 4))
    shared.at(one, (3, 3))
    assert asked == [3, 4, 4, 3]


def test_another_rank_leaves_the_search_when_rank_0_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "of_all", lambda value: [None, value])
    shared = Shared(trial_of(lambda rows, keys: True))
    with pytest.raises(OutOfTimeError):
        shared(small_call(3))
    with pytest.raises(OutOfTimeError):
        shared.prepare(small_call, [(3, 3)])


def test_helpers_that_were_not_asked_are_sent_home(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(ranks, "of_all", lambda value: told.append(value) or [value])
    plan, trial = Plan(Backend.DEFAULT, "cpu", {}, apart=False), trial_of(lambda rows, keys: True)
    with Helpers(wanted=False) as nobody:
        assert nobody.share(plan, trial) is trial
    assert told == []
    with Helpers(wanted=True):
        pass
    assert told == [None]
    with Helpers(wanted=True) as helpers:
        assert isinstance(helpers.share(plan, trial), Shared)
    assert told == [None, plan]


@pytest.mark.slow
def test_two_ranks_explain_as_one_process_does_and_rank_0_alone_speaks(tmp_path: Path) -> None:
    import torch

    from sdpa_repro.explaining.explain import explain
    from tests.replaying.dumps import fault, write_dump

    with torch.inference_mode():
        path = write_dump(make_call(rows=33, heads=2, padding=3), tmp_path / "call.pt")
    words = ["explain", path, "--lengths", "25:40", "--json", "--preload", *fault("pytorch_191937")]
    done = torchrun.run("-m", "sdpa_repro", *words, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    alone = explain(path, lengths=(25, 40), preload=fault("pytorch_191937"), parts=("length_rule",))
    assert alone.length_rule is not None
    assert document["length_rule"] == json.loads(json.dumps(alone.length_rule.document()))
    assert document["length_rule"]["sweeps"][0]["failing"] == [[33, 33]]
