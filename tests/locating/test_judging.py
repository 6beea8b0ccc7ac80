"""What counts as beyond noise, on made-up logits."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sdpa_repro.locating.judging import judged, rms
from sdpa_repro.locating.running import Path
from sdpa_repro.locating.sweep import Row, WrongCall

TRUE = torch.linspace(-3, 3, 100)[None]
CALL = WrongCall("layers.0", "FLASH_ATTENTION", 1.0, 30.0, (5,))


def rows(path: Path, count: int, *, noise: float = 0.01, wrong: tuple[int, ...] = (), by: float = 0.5) -> list[Row]:
    """Rows of one path for paddings 0 to `count` - 1, of a prompt of 10 tokens, with noise of this size."""
    found = []
    for pad in range(count):
        random = torch.Generator().manual_seed(1000 * list(Path).index(path) + pad)
        logits = TRUE + noise * torch.randn(TRUE.shape, generator=random)
        if pad in wrong:
            logits = logits + by * torch.randn(TRUE.shape, generator=random)
        found.append(Row(10, pad, path, logits=logits))
    return found


def flagged(found: list[Row], shaken: tuple[float, ...] = (0.01, 0.01, 0.01)) -> list[tuple[str, int]]:
    return [(row.path.value, row.pad) for row in judged(found, 10, shaken).rows if row.flagged]


def test_distance_is_the_root_mean_square_of_the_worst_row() -> None:
    assert math.isclose(rms(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(2, 2)), math.sqrt(12.5))
    assert rms(torch.tensor([[math.nan, 0.0]]), torch.zeros(1, 2)) == math.inf


def test_noise_alone_flags_nothing() -> None:
    assert flagged(rows(Path.DEFAULT, 64) + rows(Path.MATH, 64)) == []


def test_paddings_that_stand_out_are_flagged_and_no_others() -> None:
    found = rows(Path.DEFAULT, 64, wrong=(7, 39)) + rows(Path.MATH, 64)
    assert flagged(found) == [("default", 7), ("default", 39)]


def test_a_path_that_is_wrong_too_does_not_widen_the_noise() -> None:
    found = rows(Path.DEFAULT, 64, wrong=(7, 39)) + rows(Path.MATH, 64, wrong=(7, 39))
    assert flagged(found) == [("default", 7), ("default", 39), ("MATH", 7), ("MATH", 39)]


def test_a_baseline_that_is_wrong_is_called_poisoned_and_another_takes_its_place() -> None:
    found = judged(rows(Path.DEFAULT, 64, wrong=(0, 32)) + rows(Path.MATH, 64), 10, (0.01,))
    assert found.poisoned
    assert found.baseline is Path.MATH
    assert found.totals_wrong == (10, 42)
    clean = found.find(5, Path.DEFAULT)
    assert clean is not None
    assert clean.against == "MATH"
    assert clean.max_abs is not None
    assert clean.max_abs < 0.1
    assert found.worst is not None
    assert found.worst.pad not in (0, 32)  # as wrong as the baseline: the two would look alike


def test_with_two_paddings_the_math_run_stands_for_the_middle() -> None:
    found = rows(Path.DEFAULT, 2, wrong=(1,)) + rows(Path.MATH, 2)
    assert flagged(found, (0.05,)) == [("default", 1)]
    poisoned = judged(rows(Path.DEFAULT, 2, wrong=(0,)) + rows(Path.MATH, 2), 10, (0.05,))
    assert poisoned.poisoned
    assert poisoned.totals_wrong == (10,)


def test_logits_that_are_not_finite_are_beyond_any_noise() -> None:
    found = rows(Path.DEFAULT, 20) + rows(Path.MATH, 20)
    found[4] = replace(found[4], logits=torch.full_like(TRUE, math.nan))
    assert flagged(found) == [("default", 4)]


def test_wrong_calls_and_inputs_flag_a_row_whose_logits_look_right() -> None:
    found = rows(Path.DEFAULT, 20) + rows(Path.MATH, 20)
    found[3] = replace(found[3], wrong_calls=(CALL,))
    found[6] = replace(found[6], inputs_differ=("mask of call 2",))
    result = judged(found, 10, (0.01,))
    assert {row.pad: row.why for row in result.rows if row.flagged} == {
        3: "FLASH_ATTENTION is wrong in layers.0",
        6: "mask of call 2 differs",
    }


def test_runs_that_were_not_possible_are_rows_without_numbers() -> None:
    found = judged([*rows(Path.DEFAULT, 2), Row(10, 1, Path.FLOAT32, reason="no memory")], 10, ())
    assert found.wrong(Path.FLOAT32) is None
    assert found.rows[-1].document()["reason"] == "no memory"
    assert found.rows[-1].max_abs is None


def test_the_worst_is_the_shortest_of_those_that_moved_about_the_most() -> None:
    found = judged(rows(Path.DEFAULT, 64, wrong=(7, 39, 50)) + rows(Path.MATH, 64), 10, (0.01,))
    assert found.worst is not None
    assert found.worst.pad == 7
    alone = judged(rows(Path.DEFAULT, 1) + rows(Path.MATH, 1), 10, (0.01,))
    assert alone.worst is None
    assert alone.wrong(Path.DEFAULT) is None


def test_of_equal_logits_the_first_token_is_the_one_that_argmax_names() -> None:
    plain, moved = TRUE.clone(), TRUE.clone()
    plain[0, [3, 50, 90]] = 200.0
    moved[0, [4, 60, 80]] = 200.0
    found = judged([Row(10, pad, Path.DEFAULT, logits=logits) for pad, logits in ((0, plain), (1, moved))], 10, (1.0,))
    row = found.rows[1]
    assert row.top5_plain == (3, 50, 90, 99, 98)
    assert row.top5 == (4, 60, 80, 99, 98)
    assert (row.top5_plain[0], row.top5[0]) == (int(plain.argmax(-1)), int(moved.argmax(-1)))


def test_a_row_says_what_its_logits_say_beside_the_unpadded_ones() -> None:
    plain, moved = TRUE.clone(), TRUE.clone()
    moved[0, 0] = 9.0
    found = judged([Row(10, pad, Path.DEFAULT, logits=logits) for pad, logits in ((0, plain), (1, moved))], 10, (1.0,))
    row = found.rows[1]
    assert (row.max_abs, row.argmax_flipped) == (12.0, True)
    assert row.mean_abs is not None
    assert math.isclose(row.mean_abs, 0.12, rel_tol=1e-6)
    assert row.top5_plain == (99, 98, 97, 96, 95)
    assert row.top5 == (0, 99, 98, 97, 96)
    assert row.document()["total_mod_32"] == 11


def test_noise_that_was_not_measured_lets_no_logits_accuse() -> None:
    found = judged(rows(Path.DEFAULT, 4), 10, ())
    assert found.noise == math.inf
    assert not found.any_flagged
    wrong = [*rows(Path.DEFAULT, 4)[:3], replace(rows(Path.DEFAULT, 4)[3], wrong_calls=(CALL,))]
    assert judged(wrong, 10, ()).totals_wrong == (13,)


def test_where_every_padding_is_wrong_the_unpadded_run_is_not_called_poisoned() -> None:
    wrong = tuple(range(1, 20))
    found = rows(Path.DEFAULT, 20, wrong=wrong) + rows(Path.MATH, 20)
    for calls in ((), (CALL,)):
        accused = [replace(row, wrong_calls=calls) if row.path is Path.DEFAULT and row.pad else row for row in found]
        result = judged(accused, 10, (0.01,))
        assert not result.poisoned
        assert result.totals_wrong == tuple(10 + pad for pad in wrong)


def test_a_wrong_call_is_looked_into_before_logits_that_moved_further() -> None:
    found = rows(Path.DEFAULT, 20, wrong=(5,)) + rows(Path.MATH, 20)
    found[9] = replace(found[9], wrong_calls=(CALL,))
    result = judged(found, 10, (0.01,))
    assert result.totals_wrong == (15, 19)
    assert result.worst is not None
    assert result.worst.pad == 9
    assert result.accusation == "FLASH_ATTENTION is wrong in layers.0 at total length 19 (default)"
