"""The checklist: a fault breaks its item and what follows from it, and nothing is broken in healthy models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.capturing.prefill import Prefill, PrefillOptions, prepare
from sdpa_repro.errors import InputError
from sdpa_repro.locating import invariants, verify
from sdpa_repro.locating.invariants import Checklist, Finding, Item, Point, Status
from sdpa_repro.locating.lengthening import lengthened
from sdpa_repro.locating.verify import Verified, around_tiles, verify_prefill
from tests import models
from tests.capturing import faults
from tests.locating import planted
from tests.locating.prefills import FAILING, LENGTH, full, small

PADS = (FAILING - LENGTH - 1, FAILING - LENGTH)
FOLLOWING = {invariants.LOGITS, invariants.GREEDY}


@pytest.fixture
def plant() -> Callable[[str], None]:
    """Plants a fault file; the real kernels come back after every test."""
    return faults.plant


def check(prefill: Prefill, pads: tuple[int, ...] = PADS, **words: Any) -> Verified:
    return verify_prefill(prefill, pads, **{"batches": (2,), "caches": False, **words})


def item(found: Verified, name: str) -> Item:
    return next(each for each in found.items if each.name == name)


def statuses(found: Verified) -> dict[str, Status]:
    return {each.name: each.status for each in found.items}


@pytest.mark.parametrize(
    ("fault", "name", "follow", "always"),
    [
        (planted.features_one_off, invariants.FEATURES, set(), False),
        (planted.token_type_lost, invariants.TYPES, {invariants.BLOCKS, invariants.VISIBILITY}, True),
        (planted.positions_ignore_the_mask, invariants.POSITIONS, set(), True),
        (planted.block_ids_wrong_at_a_boundary, invariants.BLOCKS, {invariants.VISIBILITY}, False),
        (planted.sliding_window_one_short, invariants.VISIBILITY, set(), False),
        (None, invariants.LOGITS, set(), False),
    ],
    ids=["features", "types", "positions", "blocks", "window", "layer"],
)
def test_each_fault_breaks_its_item_and_what_follows(
    fault: Callable[[], AbstractContextManager[None]] | None, name: str, follow: set[str], always: bool
) -> None:
    prefill = small()
    with fault() if fault is not None else planted.layer_wrong_everywhere(prefill.model, 1):
        found = check(prefill)
    assert [each.name for each in found.broken] == [name]
    broken = {each.name for each in found.items if each.status is Status.BROKEN}
    assert broken - FOLLOWING - {name} == follow
    points = {each.point for each in item(found, name).findings}
    expected = {Point(batch, LENGTH + pad) for batch in (1, 2) for pad in PADS if always or LENGTH + pad == FAILING}
    assert points == expected
    assert found.exit_status == 1
    assert found.sentence.startswith(f"{name} broken at total length {min(expected).total}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_breaks_the_logits_alone_and_locate_is_named(
    dtype: torch.dtype, plant: Callable[[str], None]
) -> None:
    plant("pytorch_191937")
    found = check(small(dtype), (5, 6, 7, 39), batches=())
    assert [each.name for each in found.broken] == [invariants.LOGITS]
    assert [each.point.total for each in item(found, invariants.LOGITS).findings] == [FAILING, FAILING + 32]
    assert "(wherever total % 32 == 1, nowhere else)" in found.sentence
    assert "FLASH_ATTENTION in model.language_model.layers.2.self_attn is off by" in found.sentence
    assert found.sentence.endswith("all before it holds: locate walks the layers and keeps a call that is wrong")


def test_a_prompt_of_a_failing_length_is_measured_by_math(plant: Callable[[str], None]) -> None:
    prefill = lengthened(small(torch.bfloat16), FAILING)
    assert prefill is not None
    plant("pytorch_191937")
    found = check(prefill, (31, 32), batches=())
    logits = item(found, invariants.LOGITS)
    assert [each.point.total for each in logits.findings] == [FAILING, FAILING + 32]
    assert "the unpadded run is wrong too" in logits.findings[0].how


@pytest.mark.slow
def test_logits_beyond_noise_hold_where_every_call_and_layer_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "HALF_MARGIN", 0.0)  # as if rounding moved nothing
    found = check(small(torch.bfloat16, images=0), (6,), batches=())
    assert statuses(found)[invariants.LOGITS] is Status.HOLDS
    assert any("every SDPA call and every layer is right by itself" in note for note in found.notes)


def test_a_wrong_call_is_told_although_the_logits_stay_within_noise(
    plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "HALF_MARGIN", 1e9)  # as if rounding moved anything by anything
    plant("pytorch_191937")
    found = check(small(torch.bfloat16), batches=())
    assert [each.point.total for each in item(found, invariants.LOGITS).findings] == [FAILING]
    assert "FLASH_ATTENTION in model.language_model.layers.2.self_attn" in found.sentence


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("save", [models.save_llama, models.save_bart, models.save_t5])
def test_nothing_is_broken_in_healthy_families(save: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    save(tmp_path / "model")
    prompt = "the cat sat on the mat and saw one two three four five six seven eight"
    prefill = prepare(PrefillOptions(model=str(tmp_path / "model"), prompt=prompt, dtype=dtype, device="cpu"))
    pads = [total - prefill.length for total in (31, 32, 33)]
    found = check(prefill, tuple(pads), caches=True)
    assert found.broken == (), found.sentence
    assert found.exit_status == 0
    kinds = statuses(found)
    assert kinds[invariants.FEATURES] is kinds[invariants.TYPES] is Status.NOT_APPLICABLE
    assert item(found, invariants.FEATURES).reason == "the prompt has no image"
    held = {invariants.VISIBILITY, invariants.LOGITS, invariants.GREEDY}
    assert {kinds[name] for name in held} == {Status.HOLDS}
    decoder = prefill.side == "decoder"
    assert kinds[invariants.CACHES] is (Status.HOLDS if decoder else Status.NOT_APPLICABLE)
    assert item(found, invariants.VISIBILITY).checked == 4 + 3


def test_with_an_image_all_but_the_caches_hold(tmp_path: Path) -> None:
    found = check(small(torch.bfloat16), caches=True)
    kinds = statuses(found)
    caches = kinds.pop(invariants.CACHES)
    assert set(kinds.values()) == {Status.HOLDS}
    assert (caches is Status.BROKEN) == bool(found.caches and found.caches.different)
    if caches is Status.BROKEN:
        assert found.exit_status == 1
        assert "(no SDPA fault)" in found.sentence
        assert item(found, invariants.CACHES).document()["first"]["file"].startswith("transformers/models/gemma4")


def test_ctrl_c_keeps_the_items_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **words: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_greedy", interrupted)
    found = check(small(images=0), batches=())
    kinds = statuses(found)
    assert kinds[invariants.LOGITS] is Status.HOLDS
    assert kinds[invariants.GREEDY] is Status.NOT_CHECKED
    assert found.exit_status == 130
    assert found.sentence.startswith("stopped: so far all")
    monkeypatch.setattr(verify, "_measure_noise", interrupted)
    found = check(small(images=0), batches=())
    assert found.sentence == "stopped before anything was checked"


def test_padding_on_the_right_has_no_greedy_output() -> None:
    right = replace(small(images=0), padding_side="right")
    found = check(right, (6,), batches=())
    assert statuses(found)[invariants.GREEDY] is Status.NOT_APPLICABLE
    assert not found.broken, found.sentence


def test_where_nothing_can_be_padded_it_says_so() -> None:
    prefill = full()
    found = check(prefill, tuple(around_tiles(prefill)))
    assert found.exit_status == 0
    assert found.sentence.endswith("nothing was padded: the invariants of padding were not tried")


def test_without_positions_for_an_answer_the_rest_is_checked() -> None:
    prefill = lengthened(full(), LENGTH - 1)
    assert prefill is not None
    found = check(prefill, (1,), batches=())
    assert statuses(found)[invariants.GREEDY] is Status.NOT_APPLICABLE
    assert "positions for 58 tokens" in item(found, invariants.GREEDY).reason
    assert statuses(found)[invariants.LOGITS] is Status.HOLDS


def test_default_lengths_lie_around_multiples_of_32_and_fit_the_model(tmp_path: Path) -> None:
    lengths = [LENGTH + pad for pad in around_tiles(small())]
    assert lengths == [63, 64, 65, 95, 96, 97, 127, 128, 129]
    models.save_bart(tmp_path / "bart")
    bart = prepare(PrefillOptions(model=str(tmp_path / "bart"), prompt="the cat", device="cpu"))
    assert [bart.length + pad for pad in around_tiles(bart)] == [31, 32, 33, 63, 64]
    with pytest.raises(InputError, match="positions for 64 tokens"):
        verify_prefill(bart, [63])


def test_a_near_tie_is_no_difference() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0]], [[1.0, 1.05, 0.0]]])
    plain, other = torch.tensor([[0, 1]]), torch.tensor([[0, 0]])
    assert verify._parts(plain, other, logits, tie=0.1) == ""
    assert verify._parts(plain, other, logits, tie=0.01).startswith("token 1 is 0 instead of 1")
    assert verify._parts(plain, torch.tensor([[2, 1]]), logits, tie=0.1).startswith("token 0 is 2 instead of 0")


def test_an_item_follows_another_only_where_that_one_is_broken_too() -> None:
    checklist = Checklist()
    here, there = Point(1, 65), Point(1, 97)
    checklist.broken(invariants.VISIBILITY, Finding(here, "a mask"))
    checklist.broken(invariants.LOGITS, Finding(here, "far"))
    checklist.hold(invariants.LOGITS, there)
    assert {each.name: each.follows for each in checklist.items()}[invariants.LOGITS] == invariants.VISIBILITY
    checklist.broken(invariants.LOGITS, Finding(there, "far"))
    found = {each.name: each for each in checklist.items()}
    assert found[invariants.LOGITS].guilty
    assert found[invariants.LOGITS].document()["broken_at"] == [{"total": 65, "batch": 1}, {"total": 97, "batch": 1}]
    assert found[invariants.GREEDY].status is Status.NOT_CHECKED
