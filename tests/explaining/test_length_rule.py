"""The length rule of faults whose rule is known, first of predicates over L and S, then of planted kernels."""

from __future__ import annotations

import json
import random
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.explaining.length_rule import LengthRule, length_rule
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.check import LiveCheck
from sdpa_repro.replaying.trial import Result, Trial, in_process
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call

FAULTS = Path(__file__).parent.parent / "faults"

Predicate = Callable[[int, int], bool]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Calls this small are faster on one thread, above all where the machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture
def plant() -> Iterator[Callable[[str], None]]:
    """Plants a fault file in this process; the real kernels are back after the test."""

    def plant_file(name: str) -> None:
        runpy.run_path(str(FAULTS / f"{name}.py"))

    yield plant_file
    sys.modules["emulation"].restore()


def small_call(rows: int, keys: int | None = None, mask: str | None = None) -> AttentionCall:
    return make_call(1, 1, 1, rows, keys, width=4, mask=mask, dtype=torch.float32)


def lengths(call: AttentionCall) -> tuple[int, int]:
    return call.query.shape[-2], call.key.shape[-2]


def trial_of(predicate: Predicate, status: Status = Status.DIVERGES) -> Trial:
    """A trial that computes nothing and fails where the predicate over L and S says so."""
    return lambda call: Result(status if predicate(*lengths(call)) else Status.AGREES)


def rule_of(predicate: Predicate, rows: int, keys: int | None = None, mask: str | None = None) -> LengthRule:
    return length_rule(small_call(rows, keys, mask), trial_of(predicate))


@pytest.mark.parametrize(
    ("rule", "rows", "keys", "over"),
    [
        ("L % 32 == 1 and L > 1", 289, 289, "L"),
        ("L % 64 == 1", 65, 65, "L"),
        ("S % 32 == 1", 33, 33, "S"),
        ("L % 48 == 5", 53, 53, "L"),
        ("L % 80 == 3", 83, 83, "L"),
        ("L % 112 == 7", 119, 119, "L"),
        ("L % 176 == 9", 185, 185, "L"),
        ("L % 256 == 1 and L > 1", 257, 257, "L"),
        ("L <= 8", 5, 5, "L"),
        ("L >= 128", 289, 289, "L"),
        ("S >= 512", 600, 600, "S"),
        ("L % 128 == 64", 192, 192, "L"),
        ("L == 1", 1, 33, "L"),
        ("L % 16 == 1", 17, 17, "L"),
        ("L % 32 == 1 and S % 48 == 0", 33, 48, "L and S"),
        ("L < S", 33, 97, "L and S"),
    ],
)
def test_the_rule_of_a_predicate_is_found_and_predicts(rule: str, rows: int, keys: int, over: str) -> None:
    found = rule_of(eval(f"lambda L, S: {rule}"), rows, keys)
    assert (found.rule, found.over, found.why, found.complete) == (rule, over, "", True)
    assert found.held_out == found.held_out_right >= 12


@pytest.mark.parametrize("mask", ["causal", "float", "flag"])
def test_the_kind_of_mask_makes_no_difference(mask: str) -> None:
    assert rule_of(lambda rows, keys: rows % 32 == 1 and rows > 1, 65, mask=mask).rule == "L % 32 == 1 and L > 1"


def test_two_residues_half_a_period_apart_are_one_rule() -> None:
    assert rule_of(lambda rows, keys: rows % 32 in (1, 17), 33).rule == "L % 16 == 1"


def test_counts_are_those_of_the_predicate() -> None:
    found = rule_of(lambda rows, keys: rows % 32 == 1, 33)
    together, rows, keys = found.sweeps
    assert together.axis.vary == "L and S"
    assert list(together.fails) == [n for n in range(1, max(together.fails) + 1) if n % 32 == 1]
    assert set(range(1, 354)) <= {*together.fails, *together.passes}
    assert not [n for n in (*together.passes, *rows.passes) if n % 32 == 1]
    assert not keys.passes
    assert len(keys.fails) >= 100
    assert (found.below, found.above) == ((32, 32), (34, 34))
    pairs = {(n, n) for n in (*together.fails, *together.passes)}
    pairs |= {(n, 33) for n in (*rows.fails, *rows.passes)} | {(33, n) for n in keys.fails}
    assert found.fails + found.passes == len(pairs) + len(found.apart)


def test_failing_lengths_beyond_the_range_and_pairs_apart_are_predicted() -> None:
    found = rule_of(lambda rows, keys: rows % 32 == 1, 33)
    assert {385, 417} <= set(found.sweeps[0].fails)
    assert {fails for _, _, fails in found.apart} == {True, False}
    assert all(fails == (rows % 32 == 1) for rows, _, fails in found.apart)


def test_the_words_name_ranges_and_counts() -> None:
    words = rule_of(lambda rows, keys: rows % 32 == 1 and rows > 1, 289).words()
    assert words[0] == "fails when L % 32 == 1 and L > 1"
    assert words[1] == "S = L, 2…417: all 13 lengths with L % 32 == 1 fail, all 343 others pass"
    assert any(
        line.startswith("S varied at L = 289, 1…353: all ") and line.endswith(" lengths tried fail") for line in words
    )
    assert "nearest passing: L = 288, S = 288 and L = 290, S = 290" in words


def test_the_document_is_json_with_the_promised_keys() -> None:
    found = rule_of(lambda rows, keys: keys % 32 == 1, 33, 65)
    document = json.loads(json.dumps(found.document()))
    assert {"rule", "over", "fails", "passes", "held_out"} <= set(document)
    assert (document["rule"], document["over"]) == ("S % 32 == 1", "S")
    assert document["sweeps"][0]["fixed"] == {"S - L": 32}
    assert document["sweeps"][0]["fails"] == sum(b - a + 1 for a, b in document["sweeps"][0]["failing"])


@pytest.mark.parametrize("seed", range(3))
def test_random_failures_have_no_simple_rule(seed: int) -> None:
    share = (0.01, 0.2, 0.6)[seed]

    def predicate(rows: int, keys: int) -> bool:
        return (rows, keys) == (33, 33) or random.Random(f"{seed} {rows} {keys}").random() < share

    found = rule_of(predicate, 33)
    assert found.rule is None
    assert found.why.startswith("no simple rule")
    assert "no simple rule" in found.words()[0]


def test_a_backend_that_always_fails_has_no_length_rule() -> None:
    found = rule_of(lambda rows, keys: True, 33)
    assert (found.rule, found.over, found.passes) == (None, None, 0)
    assert found.words()[0] == "every length tried fails"
    assert (found.below, found.above) == (None, None)


def test_one_key_that_cannot_go_wrong_makes_no_rule_but_a_crash_does() -> None:
    call = small_call(33)
    wrong = length_rule(call, trial_of(lambda rows, keys: keys > 1))
    assert (wrong.rule, wrong.over) == (None, None)
    assert wrong.words()[0] == "every length tried fails"
    assert any("with one key" in reason for reason in wrong.untested)
    assert length_rule(call, trial_of(lambda rows, keys: keys > 1, Status.CRASHED)).rule == "S > 1"


def test_a_single_failing_length_is_named() -> None:
    assert rule_of(lambda rows, keys: rows == 100, 100).rule == "L == 100"
    found = rule_of(lambda rows, keys: rows == keys == 100, 100)
    assert (found.rule, found.over) == ("L == 100 and S == 100", "L and S")


def test_lengths_that_decline_are_not_tested_and_never_pass() -> None:
    def trial(call: AttentionCall) -> Result:
        rows, _ = lengths(call)
        if rows % 2:
            return Result(Status.DECLINED, reason="odd length")
        return Result(Status.DIVERGES if rows % 32 == 2 else Status.AGREES)

    found = length_rule(small_call(34), trial)
    assert found.rule == "L % 32 == 2"
    assert not [n for sweep in found.sweeps[:2] for n in sweep.passes if n % 2]
    assert set(found.untested) == {"odd length"}
    assert found.untested["odd length"] >= 177
    assert (found.below, found.above) == ((32, 32), (36, 36))


def test_lengths_whose_trial_raises_are_not_tested() -> None:
    def trial(call: AttentionCall) -> Result:
        if lengths(call)[0] % 4 == 3:
            raise RuntimeError("out of memory\nmore")
        return Result(Status.DIVERGES if lengths(call)[0] % 32 == 1 else Status.AGREES)

    found = length_rule(small_call(33), trial)
    assert (found.rule, set(found.untested)) == ("L % 32 == 1", {"out of memory"})


def test_crashes_count_as_failures_and_are_kept_few() -> None:
    crashes = []

    def trial(call: AttentionCall) -> Result:
        rows, keys = lengths(call)
        if rows == 1 and keys > 1:
            crashes.append(keys)
            return Result(Status.CRASHED, reason="SIGFPE")
        return Result(Status.AGREES)

    found = length_rule(small_call(1, 33), trial)
    assert (found.rule, found.over) == ("L == 1 and S > 1", "L and S")
    assert len(crashes) < 24


def test_a_call_that_does_not_fail_has_no_rule() -> None:
    found = rule_of(lambda rows, keys: False, 33)
    assert (found.rule, found.over, found.fails) == (None, None, 0)
    assert "does not fail again" in found.words()[0]


def test_a_failure_seen_only_with_some_masks_is_looked_for_again() -> None:
    """At L = 97 the fault shows in no mask but a random one, where the second key is hidden from some later row."""

    def trial(call: AttentionCall) -> Result:
        rows, _ = lengths(call)
        mask = call.attn_mask
        assert mask is not None
        seen = rows != 97 or not bool(mask[0, 0, 1:, 1].all())
        return Result(Status.DIVERGES if rows % 32 == 1 and rows > 1 and seen else Status.AGREES)

    found = length_rule(small_call(289, mask="causal"), trial)
    assert found.rule == "L % 32 == 1 and L > 1"
    assert 97 in found.sweeps[0].fails


def test_a_structure_that_matters_is_kept() -> None:
    """Fails only while every row sees every key: telling the rows apart would hide it."""

    def trial(call: AttentionCall) -> Result:
        assert call.attn_mask is not None
        return Result(Status.DIVERGES if call.attn_mask.all() and lengths(call)[0] % 16 == 0 else Status.AGREES)

    call = replace(small_call(32), attn_mask=torch.ones(1, 1, 32, 32, dtype=torch.bool))
    assert length_rule(call, trial).rule == "L % 16 == 0"


def test_heads_are_cut_only_while_the_failure_survives() -> None:
    shapes = set()

    def trial(call: AttentionCall, needed: int) -> Result:
        shapes.add(tuple(call.query.shape[:2]))
        rows, _ = lengths(call)
        fails = rows % 32 == 1 and call.query.shape[1] >= needed
        return Result(Status.DIVERGES, LiveCheck("diverges", rows=((1, 3, 0),))) if fails else Result(Status.AGREES)

    call = make_call(2, 8, 1, 65, width=256, mask=None)
    assert length_rule(call, lambda call: trial(call, 1), high=100).rule == "L % 32 == 1"
    assert shapes == {(2, 8), (1, 2)}
    shapes.clear()
    assert length_rule(call, lambda call: trial(call, 8), high=100).rule == "L % 32 == 1"
    assert shapes == {(2, 8), (1, 2), (1, 8)}


def test_a_rule_of_fewer_heads_is_not_passed_off_as_that_of_the_call() -> None:
    def trial(call: AttentionCall) -> Result:
        modulus = 32 if call.query.shape[1] == 2 else 64
        fails = lengths(call)[0] % modulus == 1
        return Result(Status.DIVERGES, LiveCheck("diverges", rows=((0, 3, 0),))) if fails else Result(Status.AGREES)

    call = make_call(1, 8, 1, 65, width=512, mask=None)
    assert length_rule(call, trial, high=150).rule == "L % 64 == 1"


def test_the_range_that_was_asked_for_is_kept_to() -> None:
    tried = []

    def trial(call: AttentionCall) -> Result:
        tried.append(lengths(call))
        return Result(Status.DIVERGES if lengths(call)[0] % 32 == 1 else Status.AGREES)

    found = length_rule(small_call(65, 85), trial, low=40, high=140)
    assert found.rule == "L % 32 == 1"
    assert set(found.sweeps[0].fails) | set(found.sweeps[0].passes) == set(range(40, 121))
    assert all(40 <= number <= 140 for pair in tried for number in pair)


def test_the_same_seed_tries_the_same_lengths_in_the_same_order() -> None:
    runs = []
    for seed in (0, 0, 1):
        tried: list[tuple[int, int]] = []

        def trial(call: AttentionCall, tried: list[tuple[int, int]] = tried) -> Result:
            tried.append(lengths(call))
            return Result(Status.DIVERGES if lengths(call)[0] % 48 == 5 else Status.AGREES)

        runs.append((length_rule(small_call(53), trial, seed=seed), tried))
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]
    assert runs[2][0].rule == "L % 48 == 5"


def test_a_deadline_and_ctrl_c_leave_a_partial_answer() -> None:
    count = []

    def trial(call: AttentionCall) -> Result:
        count.append(1)
        if len(count) == 150:
            raise KeyboardInterrupt
        return Result(Status.DIVERGES if lengths(call)[0] % 32 == 1 else Status.AGREES)

    stopped = length_rule(small_call(289), trial)
    assert not stopped.complete
    assert stopped.fails + stopped.passes == 149
    assert stopped.rule in ("L % 32 == 1", None)
    assert "incomplete" in stopped.words()[-1]
    late = length_rule(small_call(289), trial, deadline=time.monotonic() - 1)
    assert (late.complete, late.rule, late.fails) == (False, None, 1)


def test_progress_says_how_far_it_is() -> None:
    texts: list[str] = []
    length_rule(small_call(33), trial_of(lambda rows, keys: rows % 32 == 1), progress=texts.append)
    assert len(texts) > 10
    assert texts[0].startswith("length rule: 25 lengths tried")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "heads", "rows", "width", "padding", "rule"),
    [
        ("pytorch_191937", 4, 65, 136, 7, "L % 32 == 1 and L > 1"),
        ("pytorch_191937", 2, 65, 64, 7, "L % 64 == 1 and L > 1"),
        ("altered_191937", 2, 53, 32, 0, "L % 48 == 5"),
    ],
)
def test_a_planted_mask_row_fault_is_over_l_alone(
    plant: Callable[[str], None], fault: str, heads: int, rows: int, width: int, padding: int, rule: str
) -> None:
    plant(fault)
    call = make_call(1, heads, 1, rows, width=width, padding=padding, scale=1.0)
    found = length_rule(call, in_process(Backend.FLASH_ATTENTION))
    assert (found.rule, found.over) == (rule, "L")
    assert found.held_out == found.held_out_right >= 40
    assert not found.sweeps[2].passes


@pytest.mark.slow
def test_the_rule_of_the_gemma_call_takes_less_than_half_a_minute(plant: Callable[[str], None]) -> None:
    plant("pytorch_191937")
    call = make_call(1, 16, 1, 289, width=512, padding=7, scale=1.0)
    start = time.process_time()
    found = length_rule(call, in_process(Backend.FLASH_ATTENTION))
    assert time.process_time() - start < 30
    assert (found.rule, found.over) == ("L % 32 == 1 and L > 1", "L")
    assert (found.below, found.above) == ((288, 288), (290, 290))


def test_a_healthy_kernel_fails_at_no_length() -> None:
    call = make_call(1, 2, 1, 33, width=16, padding=3)
    found = length_rule(call, in_process(Backend.FLASH_ATTENTION))
    assert (found.rule, found.fails) == (None, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "mask", "rows", "keys", "rule", "over"),
    [
        ("last_key_tile_dropped", "causal", 65, 65, "S % 32 == 1", "S"),
        ("half_tile_padding", "causal", 64, 64, "L % 128 == 64 and S % 128 != 0", "L and S"),
        ("query_transposed_short", None, 6, 40, "L > 1 and L <= 8", "L"),
        ("rows_beyond", "causal", 150, 150, "L > 128", "L"),
        ("value_scaled_in_tile", "causal", 40, 40, "L > 16", "L"),
        ("scale_ignored", "causal", 40, 40, None, None),
        ("noise_in_column", "causal", 40, 40, None, None),
    ],
)
def test_a_planted_fault_of_another_kind_has_its_own_rule(
    plant: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    mask: str | None,
    rows: int,
    keys: int,
    rule: str | None,
    over: str | None,
) -> None:
    monkeypatch.syspath_prepend(str(FAULTS))
    plant(fault)
    call = make_call(1, 2, 2, rows, keys, 32, mask=mask, padding=3, layout="dense")
    if fault == "scale_ignored":
        call = replace(call, scale=1.0)
    found = length_rule(call, in_process(Backend.FLASH_ATTENTION))
    assert (found.rule, found.over) == (rule, over)
    if rule is None:
        assert found.words()[0].startswith("every length tried fails")
