"""A long call is replaced by a short one of the same residues that fails in the same way, and by no other."""

from __future__ import annotations

from sdpa_repro.explaining.answers import Conditions, Workaround
from sdpa_repro.explaining.confirming import confirmed
from sdpa_repro.explaining.hypotheses import Hypothesis
from sdpa_repro.explaining.length_result import LengthRule
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.explaining.poison import Poison
from sdpa_repro.explaining.rules import Clause, Rule
from sdpa_repro.explaining.stand_in import StandIn, conditions_at, hypothesis_at, poison_at, rule_for, stand_in
from sdpa_repro.replaying.trial import Result, Trial
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.reducing.trials import Condition, failing, lengths

CALL = make_call(heads=2, rows=1025, width=8, padding=3)
PLACE = StandIn(CALL, 257, 257, "distinct")
DENSE = "key, value = key.contiguous(), value.contiguous()"


def found_for(rows: int, keys: int, condition: Condition) -> tuple[int, int] | None:
    found = stand_in(make_call(heads=2, rows=rows, keys=keys, width=8), failing(condition), Status.DIVERGES)
    return None if found is None else (found.rows, found.keys)


def test_the_residues_stay() -> None:
    assert found_for(1025, 1025, lambda call: lengths(call)[0] % 64 == 1) == (257, 257)
    assert found_for(1155, 1027, lambda call: lengths(call)[0] % 128 == 3) == (387, 259)


def test_s_stays_the_longer_one() -> None:
    rows, keys = found_for(300, 4097, lambda call: True) or (0, 0)
    assert rows <= keys
    assert (rows % 256, keys % 256) == (44, 1)


def test_a_longer_one_is_taken_where_the_shortest_passes() -> None:
    assert found_for(2049, 2049, lambda call: lengths(call)[0] > 500) == (513, 513)


def test_a_call_that_fails_in_another_way_is_none() -> None:
    def crashes(call: object) -> Result:
        return Result(Status.CRASHED)

    assert stand_in(CALL, crashes, Status.DIVERGES) is None
    assert stand_in(CALL, failing(lambda call: True), Status.UNSTABLE) is not None
    assert found_for(1025, 1025, lambda call: lengths(call)[0] > 1000) is None


def test_a_short_call_has_no_shorter_one() -> None:
    assert found_for(289, 289, lambda call: True) is None


def test_what_was_found_says_where() -> None:
    helps = (Workaround("cured without x", "x", True), Workaround("fixed in torch 9", "pip", False))
    first, second = conditions_at(Conditions(True, workarounds=helps), PLACE).workarounds
    assert (first.verified, first.told) == (False, "cured without x (at L = 257, S = 257)")
    assert second.told == "fixed in torch 9 (not tried here)"
    told = hypothesis_at(Hypothesis("mask_row", "the last query row (256) used mask row 0"), PLACE)
    assert told is not None
    assert told.sentence == "the last query row (256) used mask row 0 (at L = 257, S = 257)"
    assert poison_at(Poison(False, "nothing moves it"), PLACE).words == "nothing moves it (at L = 257, S = 257)"
    assert poison_at(Poison(None, "not tested: x"), PLACE).words == "not tested: x"


def rule(*clauses: Clause) -> LengthRule:
    fitted = Rule(clauses)
    return LengthRule(str(fitted), fitted.over, 5, 9, 3, 3, None, None, (), fitted=fitted)


def test_a_rule_that_the_call_itself_contradicts_is_none() -> None:
    right = rule(Clause("L", "==", (1,), 64))
    assert rule_for(right, 1025, 1025) is right
    wrong = rule_for(rule(Clause("L", "<", (300,))), 1025, 1025)
    assert (wrong.rule, wrong.over) == (None, None)
    assert "does not hold at L = 1025, S = 1025" in wrong.words()[0]


def helpful(*helps: Workaround) -> Conditions:
    return conditions_at(Conditions(True, workarounds=helps), PLACE)


STRIDE = Workaround("cured without key and value that repeat one head with stride 0", DENSE, True)


def test_a_workaround_that_cures_the_call_itself_is_verified() -> None:
    def trial_for(context: object) -> Trial:
        return failing(lambda call: call.key.stride(1) == 0)

    (help_,) = confirmed(helpful(STRIDE), CALL, trial_for, {}, ()).workarounds
    assert (help_.verified, help_.told) == (True, STRIDE.words)


def test_a_workaround_that_does_not_cure_the_call_itself_is_not() -> None:
    (help_,) = confirmed(helpful(STRIDE), CALL, lambda context: failing(lambda call: True), {}, ()).workarounds
    assert not help_.verified


def test_a_backend_that_the_replay_found_right_is_verified_and_the_end_of_the_time_keeps_the_rest() -> None:
    line = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ...  # around the call"
    helps = helpful(Workaround("MATH is right on this call", line, True), STRIDE)

    def no_time(call: object) -> Result:
        raise OutOfTimeError

    found = confirmed(helps, CALL, lambda context: no_time, {}, ("MATH",)).workarounds
    assert [help_.verified for help_ in found] == [True, False]
    unknown = confirmed(helps, CALL, lambda context: no_time, {}, ()).workarounds
    assert unknown[0].told == "MATH is right on a shorter call (at L = 257, S = 257)"
