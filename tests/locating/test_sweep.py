"""The sweep: exactly the lengths that are wrong, whatever the prompt, and each run once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as File
from typing import Any

import pytest
import torch

from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, prepare, totals
from sdpa_repro.errors import InputError
from sdpa_repro.locating import sweeping
from sdpa_repro.locating.grid import grid
from sdpa_repro.locating.lengthening import lengthened
from sdpa_repro.locating.measuring import Run, measure
from sdpa_repro.locating.running import Path, running
from sdpa_repro.locating.sweeping import sweep
from tests import models
from tests.capturing import faults
from tests.locating.prefills import FAILING, LENGTH, small

PADS = (1, 4, 5, 6, 7, 8, 9, 20, 37, 38, 39, 40)
"""Total lengths around 64 and 96, and others."""

WIDE = 32
"""Head_dim 512 of the global layers: pytorch#191937 fails when the total leaves 1 on division by this."""


@pytest.fixture
def plant() -> Callable[[str], None]:
    """Plants a fault file; the real kernels come back after every test."""
    return faults.plant


@pytest.mark.slow
@pytest.mark.parametrize(("images", "dtype"), [(1, torch.bfloat16), (0, torch.float32)])
def test_exactly_the_totals_of_the_planted_fault_are_flagged(
    images: int, dtype: torch.dtype, plant: Callable[[str], None]
) -> None:
    prefill = small(dtype, images=images)
    plant("pytorch_191937")
    found = sweep(prefill, PADS, batches=False)
    expected = tuple(total for total in (LENGTH + pad for pad in (0, *PADS)) if total % WIDE == 1)
    assert found.totals_wrong == expected == (65, 97)
    assert not found.poisoned
    assert found.worst is not None
    assert found.worst.total == FAILING
    assert found.wrong(Path.DEFAULT)
    assert not any(found.wrong(path) for path in (Path.MATH, Path.EAGER, Path.FLOAT32))


@pytest.mark.slow
def test_nothing_is_flagged_on_healthy_kernels() -> None:
    found = sweep(small(torch.bfloat16), PADS)
    assert not found.any_flagged, [row.document() for row in found.rows if row.flagged]
    assert len(found.alone(Path.DEFAULT)) == len(found.alone(Path.MATH)) == len(PADS) + 1


def test_a_prompt_of_a_failing_length_is_a_poisoned_baseline(plant: Callable[[str], None]) -> None:
    prefill = lengthened(small(torch.bfloat16), FAILING)
    assert prefill is not None
    plant("pytorch_191937")
    found = sweep(prefill, [1, 31, 32, 33], batches=False)
    assert found.poisoned
    assert found.baseline is Path.MATH
    assert found.totals_wrong == (FAILING, FAILING + WIDE)
    assert {row.against for row in found.alone(Path.DEFAULT)} == {"MATH"}


@pytest.mark.slow
def test_in_batches_the_prompt_is_as_wrong_and_the_longer_row_is_as_alone(plant: Callable[[str], None]) -> None:
    prefill = small(torch.bfloat16)
    healthy = sweep(prefill, [6])
    beside = [row for row in healthy.rows if row.companions]
    places = Counter((row.companions, row.place, row.path) for row in beside)
    assert set(places) == {
        (count, place, path)
        for count in (1, 2)
        for place in ("padded", "companion")
        for path in (Path.DEFAULT, Path.MATH)
    }
    assert not healthy.any_flagged
    assert {row.prompt for row in beside if row.place == "companion"} == {LENGTH + 6}
    plant("pytorch_191937")
    found = sweep(prefill, [7])
    assert all(row.flagged == (row.path is Path.DEFAULT) for row in found.rows if row.companions)


def test_each_padding_and_path_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[tuple[int, int]] = Counter()

    def counted(prefill: Prefill, inputs: Mapping[str, torch.Tensor], **words: Any) -> Run:
        rows, total = inputs["input_ids"].shape
        runs[rows, total] += 1
        return measure(prefill, inputs, **words)

    monkeypatch.setattr(sweeping, "measure", counted)
    sweep(small(torch.bfloat16), [0, 1, 2], batches=False)
    # default and MATH at each; eager and float32 unpadded and at the worst
    assert sorted(runs.values()) == [2, 4, 4]


def test_without_memory_for_math_no_healthy_length_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(prefill: Prefill, path: Path) -> Iterator[Prefill]:
        if path is Path.MATH:
            raise InputError("out of memory on cuda: give a shorter prompt")
        with running(prefill, path) as ready:
            yield ready

    monkeypatch.setattr(sweeping, "running", full)
    found = sweep(small(torch.bfloat16), [1, 7], batches=False)
    assert not found.any_flagged
    assert 0 < found.noise < math.inf
    assert any("MATH is not available: out of memory" in note for note in found.notes)


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def interrupted(*args: Any, **words: Any) -> Run:
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return measure(*args, **words)

    monkeypatch.setattr(sweeping, "measure", interrupted)
    found = sweep(small(), range(10))
    assert not found.complete
    assert found.totals_wrong == ()
    assert [(row.pad, row.path.value) for row in found.rows] == [
        (0, "default"),
        (0, "MATH"),
        (1, "default"),
        (1, "MATH"),
        (2, "default"),
    ]


def test_a_path_that_is_not_available_is_a_row_that_says_why() -> None:
    found = sweep(small(), [3], batches=False)
    assert found.find(0, Path.FLOAT32) is None
    assert any("float32 already" in note for note in found.notes)
    assert any("float32 already" in row.reason for row in found.rows)


@pytest.mark.slow
def test_padding_on_the_right_of_a_decoder_and_of_an_encoder_is_healthy(tmp_path: File) -> None:
    from dataclasses import replace

    right = replace(small(torch.bfloat16), padding_side="right")
    assert not sweep(right, [1, 7]).any_flagged
    models.save_bart(tmp_path / "bart")
    options = PrefillOptions(model=str(tmp_path / "bart"), prompt="the cat sat on the mat", device="cpu")
    bart = prepare(options)
    found = sweep(bart, [1, 7, totals(bart, options)[-1] - bart.length])
    assert not found.any_flagged
    assert found.alone(Path.DEFAULT)[-1].total == 64


def test_a_batch_of_several_rows_is_swept_as_it_is(tmp_path: File) -> None:
    models.save_llama(tmp_path / "llama")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "the cat sat on the mat"}\n')
    options = PrefillOptions(model=str(tmp_path / "llama"), input=str(tmp_path / "rows.jsonl"), device="cpu")
    found = sweep(prepare(options), [1, 5])
    assert not found.any_flagged
    assert not [row for row in found.rows if row.companions]


def test_lengths_below_the_images_are_listed_as_unreachable() -> None:
    prefill = small()
    found = sweep(prefill, [1], batches=False)
    tried: list[str] = []

    def stop(sentence: str) -> None:
        tried.append(sentence)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grid(prefill, found, noise=found.noise, progress=stop)
    least = min(prompt for prompt in (31, 32, 33, 58, 63) if prompt >= 54)
    assert tried[0].startswith(f"prompt of {least} tokens")


def test_the_result_is_told_as_plain_values() -> None:
    found = sweep(small(), [1], batches=False)
    row = found.document()[0]
    assert {"prompt", "pad", "total", "path", "max_abs", "mean_abs", "argmax_flipped"} <= set(row)
    assert (row["path"], row["total"], row["max_abs"]) == ("default", LENGTH, 0.0)
