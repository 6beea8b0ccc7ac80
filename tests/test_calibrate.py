"""A sample of `make calibrate`: random healthy calls raise no alarm, on seeds of their own."""

from __future__ import annotations

import warnings

import pytest
import torch

from sdpa_repro.replaying.backends import Backend
from tests.calibrate import DTYPES, LAYOUTS, MASKS, PATHS, VALUES, judge_sample, samples, tally


def test_samples_are_the_same_for_a_seed() -> None:
    one, two = (next(iter(samples(7, 1))).call for _ in range(2))
    assert torch.equal(one.query, two.query)
    assert torch.equal(one.value, two.value)


def test_every_kind_of_mask_value_and_layout_is_drawn() -> None:
    drawn = list(samples(1, 400, longest=33))
    assert {sample.mask for sample in drawn} == set(MASKS)
    assert {sample.values for sample in drawn} == set(VALUES)
    assert {sample.layout for sample in drawn} == set(LAYOUTS)
    assert {sample.call.query.dtype for sample in drawn} == set(DTYPES)


def test_a_sample_judges_every_path_that_runs() -> None:
    drawn = next(sample for sample in samples(1, 50, longest=33) if sample.call.value.shape == sample.call.key.shape)
    with torch.inference_mode():
        judged = judge_sample(drawn)
    assert set(judged) == set(PATHS)
    assert judged[Backend.MATH] is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [201, 202])
def test_no_healthy_call_raises_an_alarm(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tally(range(seed, seed + 1), 150, 289)
    assert [alarm for entry in found.values() for alarm in entry.alarms] == []
    assert sum(len(entry.ratios) for entry in found.values()) > 450
