"""A recipe's tensor and the tensor its printed line builds are the same: bits, shape, strides."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdpa_repro.attention import viewed_once
from sdpa_repro.errors import InputError
from sdpa_repro.recipe import Kind, Planted, Recipe, Strided, build, from_document, line, to_document

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPE = (1, 3, 1, 4)

VALUES = [
    Recipe(Kind.ZEROS, SHAPE, torch.float32),
    Recipe(Kind.FULL, SHAPE, torch.float32, constant=2.5),
    Recipe(Kind.FULL, SHAPE, torch.float32, constant=-math.inf),
    Recipe(Kind.ARANGE, SHAPE, torch.float32, dim=1),
    Recipe(Kind.ARANGE, SHAPE, torch.float32, dim=-1, period=3),
    Recipe(Kind.EYE, (2, 1, 4, 4), torch.float32),
    Recipe(Kind.RANDINT, SHAPE, torch.float32, seed=7),
    Recipe(Kind.RANDN, SHAPE, torch.float32, seed=7),
    Recipe(Kind.ZEROS, SHAPE, torch.float32, planted=Planted((0, 1, 0, 2), 40)),
    Recipe(Kind.RANDN, SHAPE, torch.float32, planted=Planted((0, 2, 0, 3), -88.5)),
]

LAYOUTS = [
    {},
    {"transposed": (1, 2)},
    {"expanded": (1, 3, 5, 4)},
    {"expanded": (1, 3, 5, 4), "transposed": (1, 2)},
    {"strided": Strided((2, 2), (3, 1), 1)},
]


def run(text: str) -> Tensor:
    names: dict[str, object] = {"torch": torch}
    exec(text, names)
    made = names["key"]
    assert isinstance(made, Tensor)
    return made


def assert_same(recipe: Recipe) -> None:
    built, printed = build(recipe), run(line(recipe, "key"))
    assert (built.dtype, built.shape, built.stride()) == (printed.dtype, printed.shape, printed.stride())
    assert built.storage_offset() == printed.storage_offset()
    assert torch.equal(built, printed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", VALUES, ids=lambda recipe: str(recipe.kind.value))
def test_a_printed_line_builds_the_same_bits(recipe: Recipe, dtype: torch.dtype) -> None:
    assert_same(replace(recipe, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(layout) or "dense")
@pytest.mark.parametrize("recipe", VALUES[:5] + VALUES[6:], ids=lambda recipe: str(recipe.kind.value))
def test_a_printed_line_builds_the_same_strides(recipe: Recipe, layout: dict[str, tuple[int, ...]]) -> None:
    assert_same(replace(recipe, **layout))  # type: ignore[arg-type]


def test_a_bool_tensor_can_be_printed() -> None:
    assert_same(Recipe(Kind.FULL, (2, 3), torch.bool, constant=True))
    assert build(Recipe(Kind.FULL, (2, 3), torch.bool, constant=True)).all()


def test_values_are_what_the_kind_says() -> None:
    assert build(Recipe(Kind.ARANGE, (2, 3), torch.float32, dim=0)).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert build(Recipe(Kind.ARANGE, (1, 5), torch.float32, dim=1, period=2)).tolist() == [[0, 1, 0, 1, 0]]
    assert build(Recipe(Kind.EYE, (2, 3), torch.float32)).tolist() == [[1, 0, 0], [0, 1, 0]]
    planted = build(Recipe(Kind.FULL, (2, 2), torch.float32, constant=1, planted=Planted((0, 1), 9)))
    assert planted.tolist() == [[1, 9], [1, 1]]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_seeded_whole_numbers_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    recipe = Recipe(Kind.RANDINT, (64, 64), torch.float64)
    exact = build(recipe) * 8
    assert torch.equal(exact, exact.round())
    assert (int(exact.min()), int(exact.max())) == (-8, 8)
    assert torch.equal(build(replace(recipe, dtype=dtype)).double(), build(recipe))


def test_another_seed_gives_other_values() -> None:
    recipe = Recipe(Kind.RANDINT, (8, 8), torch.float32)
    assert not torch.equal(build(recipe), build(replace(recipe, seed=1)))


def test_expanding_one_head_gives_stride_0_over_memory_of_one_head() -> None:
    key = build(Recipe(Kind.RANDINT, (1, 1, 33, 512), torch.bfloat16, expanded=(1, 2, 33, 512)))
    assert key.stride() == (33 * 512, 0, 512, 1)
    assert viewed_once(key).numel() * 2 == key.untyped_storage().nbytes()


def test_lines_read_like_a_person_wrote_them() -> None:
    recipe = Recipe(Kind.ZEROS, (1, 1, 33, 136), torch.bfloat16, expanded=(1, 2, 33, 136))
    assert line(recipe, "key") == "key = torch.zeros((1, 1, 33, 136), dtype=torch.bfloat16).expand(1, 2, 33, 136)"
    moved = line(Recipe(Kind.FULL, (2, 2), torch.float32, constant=3, planted=Planted((1, 1), 4)), "value", "device")
    assert moved == "value = torch.full((2, 2), 3, dtype=torch.float32).to(device)\nvalue[1, 1] = 4"


MASKS = [
    Recipe(Kind.TRIL, (1, 1, 4, 5), torch.bool),
    Recipe(Kind.TRIL, (4, 4), torch.bool, padding=2),
    Recipe(Kind.TRIL, (1, 1, 4, 4), torch.bool, window=2),
    Recipe(Kind.TRIL, (1, 2, 4, 4), torch.bool, padding=1, window=3),
    Recipe(Kind.PADDING, (1, 1, 3, 4), torch.bool, padding=3),
    Recipe(Kind.COIN, (1, 1, 3, 4), torch.bool, seed=5),
]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", MASKS, ids=lambda recipe: str(recipe.kind.value))
def test_a_printed_mask_is_the_mask(recipe: Recipe, dtype: torch.dtype) -> None:
    assert_same(replace(recipe, dtype=dtype))


@pytest.mark.parametrize("recipe", MASKS, ids=lambda recipe: str(recipe.kind.value))
def test_an_additive_mask_hides_what_the_bool_mask_hides(recipe: Recipe) -> None:
    added = build(replace(recipe, dtype=torch.float32))
    assert torch.equal(added == 0, build(recipe))
    assert torch.equal(added == -math.inf, ~build(recipe))


def test_a_causal_mask_with_padding_and_window_sees_an_interval() -> None:
    seen = build(Recipe(Kind.TRIL, (6, 6), torch.bool, padding=1, window=3))
    for row in range(6):
        for key in range(6):
            assert bool(seen[row, key]) == (key >= 1 and row - 3 < key <= row)


def test_a_causal_mask_reads_like_a_person_wrote_it() -> None:
    assert line(MASKS[0], "mask") == "mask = torch.ones(4, 5, dtype=torch.bool).tril()[None, None]"
    padded = "mask = (torch.ones(4, 4, dtype=torch.bool).tril() & (torch.arange(4) >= 2))"
    assert line(MASKS[1], "mask") == padded


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(layout) or "dense")
@pytest.mark.parametrize("recipe", [*VALUES, *MASKS], ids=lambda recipe: str(recipe.kind.value))
def test_a_recipe_comes_back_from_its_document(recipe: Recipe, layout: dict[str, tuple[int, ...]]) -> None:
    if recipe.shape == SHAPE:
        recipe = replace(recipe, **layout)  # type: ignore[arg-type]
    assert from_document(json.loads(json.dumps(to_document(recipe)))) == recipe


SOUND = {"kind": "zeros", "shape": [1, 3, 1, 4], "dtype": "float32"}


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "eval"},
        {"kind": None},
        {"dtype": "object"},
        {"shape": "1"},
        {"shape": [-1, 2]},
        {"shape": [1 << 20, 1 << 20]},
        {"shape": [1] * 9},
        {"shape": [1.5]},
        {"shape": [True]},
        {"expanded": [1, 1 << 33, 1, 4]},
        {"expanded": [2, 4, 1, 4]},
        {"transposed": [0, 9]},
        {"transposed": [0, 1, 2]},
        {"strided": [[2, 2], [8, 1], 4]},
        {"strided": [[2, 2], [-1, 1], 4]},
        {"strided": [[2, 2], [1, 1], -1]},
        {"strided": [[2], [1, 1], 0]},
        {"planted": [[0, 3, 0, 0], 1]},
        {"planted": [[0, 0], 1]},
        {"planted": [[0, 0, 0, 0], "1); import os"]},
        {"kind": "full", "constant": "0) or exit("},
        {"kind": "arange", "dim": 4},
        {"kind": "arange", "period": 0},
        {"kind": "tril", "shape": [4]},
        {"kind": "tril", "window": 0},
        {"kind": "padding", "padding": 9},
        {"kind": "randint", "seed": -1},
        {"kind": "randint", "seed": "0"},
        {"kind": "randn", "dtype": "bool"},
    ],
    ids=str,
)
def test_a_damaged_or_hostile_recipe_is_refused(changes: dict[str, object]) -> None:
    from_document(SOUND)
    with pytest.raises(InputError, match="recipe"):
        from_document({**SOUND, **changes})


@pytest.mark.parametrize("document", [None, [], "zeros", {}, {"kind": "zeros"}], ids=str)
def test_what_is_no_recipe_is_refused(document: object) -> None:
    with pytest.raises(InputError):
        from_document(document)
