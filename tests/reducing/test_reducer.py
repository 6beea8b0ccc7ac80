"""The search: it follows one failure down to the smallest call, and stops with the best one when it must."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.explaining.pacing import OutOfTimeError
from sdpa_repro.recipe import build
from sdpa_repro.reducing.reduction import Reduction, reduce
from sdpa_repro.replaying.trial import Result
from sdpa_repro.replaying.verdict import Status
from tests.calls import make_call
from tests.reducing.trials import AGREEING, Condition, diverging, failing, lengths

CALL = make_call(heads=4, rows=97, width=24, padding=3)


def shape(found: Reduction) -> tuple[int, int, int, int, int]:
    """B, H, L, S, E."""
    return (*found.call.query.shape[:3], found.call.key.shape[2], found.call.query.shape[3])  # type: ignore[return-value]


CONGRUENCES: dict[str, tuple[int, Condition, int]] = {
    "modulo 32": (289, lambda call: lengths(call)[0] > 1 and lengths(call)[0] % 32 == 1, 33),
    "modulo 48": (293, lambda call: lengths(call)[0] > 5 and lengths(call)[0] % 48 == 5, 53),
    "modulo 176": (530, lambda call: lengths(call)[0] > 2 and lengths(call)[0] % 176 == 2, 178),
    "beyond 100": (289, lambda call: lengths(call)[0] > 100, 101),
    "S alone": (97, lambda call: lengths(call)[1] > 1 and lengths(call)[1] % 16 == 1, 17),
    "an odd one": (97, lambda call: lengths(call)[0] in (97, 13), 13),
}


@pytest.mark.parametrize(("rows", "condition", "smallest"), CONGRUENCES.values(), ids=CONGRUENCES)
def test_lengths_reach_the_smallest_one_that_fails(rows: int, condition: Condition, smallest: int) -> None:
    found = reduce(make_call(heads=2, rows=rows, width=8), failing(condition))
    assert shape(found) == (1, 1, smallest, smallest, 8)


def test_lengths_that_differ_become_equal_where_that_fails_too() -> None:
    call = make_call(heads=1, rows=40, keys=90, width=8)
    assert lengths(reduce(call, failing(lambda call: lengths(call)[0] >= 7)).call) == (7, 7)


def test_lengths_that_must_differ_are_made_small_one_by_one() -> None:
    call = make_call(heads=1, rows=40, keys=90, width=8)
    wrong = failing(lambda call: lengths(call)[0] >= 7 and lengths(call)[1] >= lengths(call)[0] + 5)
    assert lengths(reduce(call, wrong).call) == (7, 12)


def test_the_smallest_total_wins_between_width_and_length() -> None:
    def wrong(call: AttentionCall) -> bool:
        period = 64 if call.query.shape[3] <= 128 else 32
        return lengths(call)[0] > 1 and lengths(call)[0] % period == 1

    found = reduce(make_call(heads=1, rows=97, width=256), failing(wrong))
    assert shape(found) == (1, 1, 65, 65, 8)


def test_every_tensor_gets_a_closed_form_that_builds_it() -> None:
    found = reduce(CALL, failing(lambda call: call.attn_mask is not None))
    assert found.closed
    for name, recipe in found.recipes.items():
        built = build(recipe)
        assert torch.equal(built, found.call.tensors[name])
        assert built.stride() == found.call.tensors[name].stride()


def test_values_that_nothing_can_replace_stay_as_captured() -> None:
    there = CALL.value[0, 0, 0, 0].clone()
    found = reduce(CALL, failing(lambda call: bool(call.value[0, 0, 0, 0] == there)))
    assert set(found.call.tensors) - set(found.recipes) == {"value"}
    assert not found.closed


def test_stride_0_that_is_needed_stays_and_shows_as_two_heads() -> None:
    found = reduce(CALL, failing(lambda call: call.key.stride(1) == 0 and call.value.stride(1) == 0))
    assert found.call.query.shape[1] == 2
    assert found.recipes["key"].expanded == tuple(found.call.key.shape)
    assert found.recipes["key"].strided is None
    assert found.call.query.is_contiguous()


def test_a_view_of_one_head_with_stride_0_becomes_two_expanded_heads() -> None:
    one = replace(CALL, query=CALL.query[:, :1], key=CALL.key[:, :1], value=CALL.value[:, :1])
    found = reduce(one, failing(lambda call: call.key.stride(1) == 0 and call.value.stride(1) == 0))
    assert found.recipes["key"].expanded == tuple(found.call.key.shape)
    assert found.call.query.shape[1] == 2


def test_flags_that_do_not_matter_go_and_the_one_that_does_stays() -> None:
    call = make_call(heads=4, kv_heads=2, rows=9, width=8, layout="gqa", mask="flag", scale=1.0)
    found = reduce(call, failing(lambda call: call.scale is not None))
    assert (found.call.enable_gqa, found.call.is_causal, found.call.scale) == (False, False, 1.0)


def test_the_table_says_what_was_needed_and_what_passes() -> None:
    found = reduce(
        CALL, failing(lambda call: call.attn_mask is not None and lengths(call)[0] % 32 == 1 and lengths(call)[0] > 1)
    )
    rows = {row.name: row for row in found.rows}
    assert (rows["L"].before, rows["L"].after, rows["L"].needed) == ("97", "33", True)
    assert rows["L"].neighbour == "L = 32 passes, L = 34 passes"
    assert (rows["S"].needed, rows["mask"].needed, rows["values"].needed) == (False, True, False)
    assert rows["mask"].neighbour.startswith("no mask passes")
    assert {row.name for row in found.rows if row.needed} == {"L", "mask"}


def test_another_kind_of_failure_is_not_followed() -> None:
    def trial(call: AttentionCall) -> Result:
        if lengths(call)[0] < 20:
            return Result(Status.NONFINITE, diverging().checked)
        return diverging()

    assert lengths(reduce(CALL, trial).call) == (20, 20)


def test_a_failure_that_gets_faint_is_not_followed() -> None:
    def trial(call: AttentionCall) -> Result:
        return diverging(10.0 if lengths(call)[0] >= 20 else 1.2)

    assert lengths(reduce(CALL, trial).call) == (20, 20)


def test_a_faint_failure_may_be_reduced_as_it_is() -> None:
    assert lengths(reduce(CALL, lambda call: diverging(1.2)).call) == (1, 1)


@pytest.mark.parametrize("status", [Status.CRASHED, Status.TIMEOUT])
def test_crashes_and_hangs_are_reduced_too(status: Status) -> None:
    def trial(call: AttentionCall) -> Result:
        return Result(status, reason="SIGSEGV") if lengths(call)[1] > 4 else AGREEING

    found = reduce(CALL, trial)
    assert (lengths(found.call), found.result.status) == ((5, 5), status)


def test_a_call_that_passes_is_an_error() -> None:
    with pytest.raises(InputError, match="does not fail here: agrees"):
        reduce(CALL, failing(lambda call: False))


def test_a_call_whose_rows_are_all_masked_is_an_error() -> None:
    blind = replace(CALL, attn_mask=torch.zeros(1, 1, 97, 97, dtype=torch.bool))
    with pytest.raises(InputError, match="fully masked"):
        reduce(blind, failing(lambda call: True))


def test_no_reduced_call_is_trivial() -> None:
    found = reduce(CALL, failing(lambda call: True))
    assert shape(found) == (1, 1, 1, 1, 8)
    assert all(tensor.numel() for tensor in found.call.tensors.values())


def stopped_at(calls: int, stop: Callable[[], None]) -> Callable[[AttentionCall], Result]:
    """A trial that fails for L > 9 and is interrupted after some calls."""
    seen: list[int] = []

    def trial(call: AttentionCall) -> Result:
        seen.append(1)
        if len(seen) == calls:
            stop()
        return diverging() if lengths(call)[0] > 9 else AGREEING

    return trial


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("calls", [2, 5, 40])
def test_ctrl_c_keeps_the_best_call_so_far(calls: int) -> None:
    found = reduce(CALL, stopped_at(calls, interrupt))
    assert found.stopped == "interrupted"
    assert lengths(found.call)[0] > 9


def test_ctrl_c_while_the_table_is_made_leaves_the_smallest_call() -> None:
    whole = reduce(CALL, stopped_at(0, interrupt))
    found = reduce(CALL, stopped_at(whole.calls - 2, interrupt))
    assert (found.stopped, found.complete) == ("table", False)
    assert shape(found) == shape(whole)
    assert len(found.rows) < len(whole.rows)


def test_the_budget_keeps_the_best_call_so_far() -> None:
    found = reduce(CALL, failing(lambda call: True), deadline=time.monotonic() - 1)
    assert (found.stopped, shape(found)) == ("time", (1, 4, 97, 97, 24))


def test_the_same_seed_gives_the_same_result() -> None:
    wrong = failing(
        lambda call: bool(call.value[..., 0].max() > call.value[..., 0].min()) and lengths(call)[0] % 8 == 1
    )
    one, two = reduce(CALL, wrong, seed=3), reduce(CALL, wrong, seed=3)
    assert (one.recipes, one.calls) == (two.recipes, two.calls)


FROZEN: dict[str, Callable[[AttentionCall], int]] = {
    "B": lambda call: call.query.shape[0],
    "H": lambda call: call.query.shape[1],
    "L": lambda call: call.query.shape[2],
    "S": lambda call: call.key.shape[2],
    "E": lambda call: call.query.shape[3],
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_stays_and_the_rest_gets_small(name: str) -> None:
    call = make_call(batch=2, heads=3, rows=9, width=16, layout="dense")
    found = reduce(call, failing(lambda call: True), freeze=[name])
    smallest = {"B": 1, "H": 1, "L": 1, "S": 1, "E": 8, name: FROZEN[name](call)}
    assert {size: read(found.call) for size, read in FROZEN.items()} == smallest


def test_a_frozen_layout_keeps_its_stride_0_and_its_order() -> None:
    found = reduce(CALL, failing(lambda call: True), freeze=["layout"])
    assert found.call.key.stride(1) == 0


def test_a_frozen_mask_stays_a_mask() -> None:
    found = reduce(CALL, failing(lambda call: True), freeze=["mask"])
    assert found.call.attn_mask is not None
    assert "attn_mask" not in found.recipes


def test_frozen_values_stay_captured() -> None:
    found = reduce(CALL, failing(lambda call: True), freeze=["values"])
    assert not {"query", "key", "value"} & set(found.recipes)


def test_an_unknown_name_cannot_be_frozen() -> None:
    with pytest.raises(InputError, match="cannot freeze 'colour'"):
        reduce(CALL, failing(lambda call: True), freeze=["colour"])


def test_every_call_is_counted() -> None:
    tried: list[int] = []

    def trial(call: AttentionCall) -> Result:
        tried.append(1)
        return diverging() if lengths(call)[0] > 9 else AGREEING

    assert reduce(make_call(heads=2, rows=21, width=8), trial).calls == len(tried)


def test_progress_tells_calls_and_size() -> None:
    said: list[str] = []
    reduce(CALL, failing(lambda call: True), progress=said.append, deadline=time.monotonic() + 60)
    assert "calls: fails at 1×" in said[0]
    assert "s left" in said[0]


def test_what_a_replay_saw_of_a_long_call_is_not_tried_again_and_its_lengths_come_down_first() -> None:
    tried: list[tuple[int, int]] = []

    def trial(call: AttentionCall) -> Result:
        tried.append(lengths(call))
        return diverging() if lengths(call)[0] % 32 == 1 and lengths(call)[0] > 1 else AGREEING

    found = reduce(make_call(heads=2, rows=289, width=8), trial, first=diverging())
    assert shape(found)[2:4] == (33, 33)
    assert max(tried) < (289, 289)


def test_a_trial_that_there_is_no_time_for_ends_the_search_with_the_best_call_so_far() -> None:
    def trial(call: AttentionCall) -> Result:
        if lengths(call)[0] != 33:
            raise OutOfTimeError
        return diverging()

    found = reduce(CALL, trial, first=diverging())
    assert found.stopped == "time"
    assert found.result is found.first


def test_the_table_names_the_number_of_heads_that_was_tried() -> None:
    call = make_call(heads=4, kv_heads=1, rows=9, width=8, layout="gqa")
    found = reduce(call, failing(lambda call: call.query.shape[1] == 4), freeze=["H"])
    row = next(row for row in found.rows if row.name == "H")
    assert row.neighbour == "H = 3, Hkv = 1 passes"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_captured_nan_and_infinity_are_kept_as_they_are(value: float) -> None:
    """A kernel that turns NaN into numbers fails with captured values alone: no closed form has any."""
    call = make_call(heads=2, rows=17, width=16, layout="dense")
    call.query[0, 1, 5, 3] = value

    def trial(candidate: AttentionCall) -> Result:
        return AGREEING if bool(candidate.query.isfinite().all()) else diverging()

    found = reduce(call, trial)
    assert found.call.query.numel() < call.query.numel()
    assert not bool(found.call.query.isfinite().all())
