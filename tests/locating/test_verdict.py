"""Faults that no kernel has a part in are put at their own level, with the module that makes them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch

from sdpa_repro.capturing.prefill import Prefill, padded
from sdpa_repro.locating.running import Path as Way
from sdpa_repro.locating.stages import Level, Outcome, Stage, StageTable, compare_stages
from sdpa_repro.locating.verdict import INVARIANTS, conclude, invariant
from tests.locating import planted, prefills
from tests.locating.prefills import FAILING, LENGTH

MODELLING = "transformers/models/gemma4_unified/modeling_gemma4_unified.py"
LAYER = 1


@dataclass(frozen=True)
class Planted:
    """A fault, where it belongs, and whether it shows at every padded length."""

    plant: Callable[[Prefill], AbstractContextManager[None]]
    level: Level
    stage: str
    module: str
    always: bool = False


FAULTS = {
    "features_one_off": Planted(lambda _: planted.features_one_off(), Level.MULTIMODAL, "embeddings", "model"),
    "token_type_lost": Planted(lambda _: planted.token_type_lost(), Level.MULTIMODAL, "token types", "model", True),
    "positions": Planted(lambda _: planted.positions_ignore_the_mask(), Level.POSITIONS, "position_ids", "model", True),
    "block_ids": Planted(lambda _: planted.block_ids_wrong_at_a_boundary(), Level.MASK, "image block ids", "model"),
    "sliding_mask": Planted(lambda _: planted.sliding_window_one_short(), Level.MASK, "sliding mask", "model"),
    "layer": Planted(
        lambda prefill: planted.layer_wrong_everywhere(prefill.model, LAYER),
        Level.MODEL,
        f"layer {LAYER} output",
        f"model.language_model.layers.{LAYER}.mlp",
    ),
}


def compare(prefill: Prefill, total: int) -> StageTable:
    return compare_stages(prefill, padded(prefill, prefill.length), padded(prefill, total))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow
def test_a_planted_fault_is_put_at_its_level(name: str, dtype: torch.dtype) -> None:
    fault, prefill = FAULTS[name], prefills.small(dtype)
    with fault.plant(prefill):
        table = compare(prefill, FAILING)
    verdict = conclude(None, table)
    assert (verdict.level, verdict.stage, verdict.module) == (fault.level, fault.stage, fault.module)
    assert verdict.file == MODELLING
    assert verdict.invariant == invariant(fault.stage)
    assert all(part in verdict.sentence for part in (fault.level.value, fault.module, MODELLING, verdict.invariant))
    assert f"total length {FAILING} ({LENGTH} tokens padded by 7 on the left)" in verdict.sentence
    assert "\n" not in verdict.sentence
    assert next(stage.name for stage in table.stages if stage.status is Outcome.DIFFERS) == fault.stage
    assert not [stage for stage in table.stages if stage.level is Level.BACKEND and stage.status is Outcome.DIFFERS]
    assert verdict.dump is None


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.always])
def test_a_length_that_does_not_show_the_fault_is_clean(name: str) -> None:
    prefill = prefills.small()
    with FAULTS[name].plant(prefill):
        verdict = conclude(None, compare(prefill, FAILING + 1))
    assert verdict.level is Level.NOTHING
    assert not verdict.found


@pytest.mark.slow
def test_a_baseline_of_a_failing_length_shows_the_model_s_fault_too() -> None:
    prefill = prefills.small(length=FAILING)
    with planted.layer_wrong_everywhere(prefill.model, LAYER):
        verdict = conclude(None, compare(prefill, FAILING + 7))
    assert (verdict.level, verdict.module) == (Level.MODEL, f"model.language_model.layers.{LAYER}.mlp")


@dataclass(frozen=True)
class Answers:
    """A sweep that is wrong on some paths."""

    wrong_on: tuple[Way, ...]
    ran: tuple[Way, ...] = tuple(Way)
    accusation: str = ""

    def wrong(self, path: Way) -> bool | None:
        return path in self.wrong_on if path in self.ran else None


def table(*stages: Stage) -> StageTable:
    return StageTable(stages, length=58, total=65, padding_side="left")


WRONG_LAYER = Stage(
    "layer 3 output", Outcome.DIFFERS, Level.MODEL, 2.0, 0.1, "token 57", "model.layers.3.mlp", "a/b.py"
)
CLEAN = Stage("input_ids", Outcome.EQUAL, Level.MULTIMODAL, 0.0, 0.0)


def test_eager_and_float32_runs_that_are_wrong_too_are_told() -> None:
    verdict = conclude(Answers((Way.DEFAULT, Way.EAGER)), table(CLEAN, WRONG_LAYER))
    assert verdict.eager is True
    assert "eager attention is wrong too" in verdict.sentence
    assert "moved by 2, rounding moves it by 0.1" in verdict.sentence


def test_a_sweep_without_eager_runs_says_nothing_about_them() -> None:
    verdict = conclude(Answers((Way.DEFAULT,), ran=(Way.DEFAULT, Way.MATH)), table(CLEAN, WRONG_LAYER))
    assert verdict.eager is None
    assert "eager" not in verdict.sentence


def test_the_first_stage_that_differs_decides() -> None:
    types = Stage("token types", Outcome.DIFFERS, Level.MULTIMODAL, 1.0, 0.0, "token 5", "model", "a/b.py")
    assert conclude(None, table(CLEAN, types, WRONG_LAYER)).level is Level.MULTIMODAL


def test_nothing_found_names_what_was_not_available() -> None:
    missing = Stage("image features", Outcome.NOT_AVAILABLE, Level.MULTIMODAL)
    verdict = conclude(None, table(CLEAN, missing))
    assert verdict.level is Level.NOTHING
    assert "not available: image features" in verdict.sentence


def test_logits_that_moved_without_a_stage_that_did_are_admitted() -> None:
    verdict = conclude(Answers((Way.DEFAULT,)), table(CLEAN))
    assert verdict.level is Level.NOTHING
    assert "no single stage explains it" in verdict.sentence


@pytest.mark.parametrize(
    "stage", ["sliding mask", "mask", "layer 5 SDPA", "encoder layer 0 query", "layer 1 cross SDPA"]
)
def test_every_stage_has_an_invariant(stage: str) -> None:
    assert invariant(stage) in INVARIANTS.values()
