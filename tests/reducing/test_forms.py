"""A form in a layout is the tensor that was asked for: values by the form, strides as given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdpa_repro.recipe import Kind, Planted, build
from sdpa_repro.reducing.forms import Form, dense_strides, layout_of, recipe_of, words

B, H, L, E = 2, 3, 5, 8
VIEWS = {
    "dense": torch.zeros(B, H, L, E),
    "expanded": torch.zeros(B, 1, L, E).expand(B, H, L, E),
    "transposed": torch.zeros(B, L, H, E).transpose(1, 2),
    "expanded and transposed": torch.zeros(B, 1, H, E).expand(B, L, H, E).transpose(1, 2),
    "columns first": torch.zeros(B, H, E, L).transpose(2, 3),
    "cache": torch.zeros(B, H, 2 * L, E)[:, :, :L],
    "gap in rows": torch.zeros(B, H, L, E + 3)[..., :E],
}
NAMES = {
    "dense": "dense",
    "expanded": "one head expanded (stride 0)",
    "transposed": "transposed (1, 2)",
    "cache": "strides (240, 80, 8, 1)",
}

views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@views
def test_a_layout_gives_the_strides_it_was_found_from(view: Tensor) -> None:
    recipe = recipe_of(Form(Kind.RANDINT), view.shape, view.stride(), torch.float32)
    assert recipe is not None
    built = build(recipe)
    assert (built.shape, built.stride()) == (view.shape, view.stride())


@pytest.mark.parametrize("name", NAMES)
def test_layouts_have_the_names_people_use(name: str) -> None:
    assert layout_of(VIEWS[name].shape, VIEWS[name].stride()).words == NAMES[name]


def test_strides_of_dimensions_of_size_1_are_ignored_unless_they_matter() -> None:
    shape, stride = (1, 1, L, E), (0, 0, E, 1)
    assert layout_of(shape, stride).words == "dense"
    assert layout_of(shape, stride, exact=True).strided == (shape, stride, 0)


@views
@pytest.mark.parametrize("dim", [-2, -3, -1])
def test_counting_runs_along_the_dimension_that_the_call_sees(view: Tensor, dim: int) -> None:
    recipe = recipe_of(Form(Kind.ARANGE, dim=dim), view.shape, view.stride(), torch.float32)
    if recipe is None:
        assert view.stride(dim) == 0
        return
    if recipe.strided is not None:
        return
    shape = [1, 1, 1, 1]
    shape[dim] = view.shape[dim]
    assert torch.equal(build(recipe), torch.arange(view.shape[dim]).float().view(shape).expand(view.shape))


@views
def test_a_planted_entry_is_where_the_call_sees_it(view: Tensor) -> None:
    planted = Form(Kind.ZEROS, planted=Planted((1, 0, 3, 6), 70.0))
    recipe = recipe_of(planted, view.shape, view.stride(), torch.float32)
    assert recipe is not None
    assert build(recipe)[1, 0, 3, 6] == 70.0


def test_a_planted_entry_moves_inside_a_smaller_shape() -> None:
    recipe = recipe_of(
        Form(Kind.ZEROS, planted=Planted((1, 2, 4, 7), 70.0)), (1, 1, 2, 8), (16, 16, 8, 1), torch.float32
    )
    assert recipe is not None
    assert build(recipe)[0, 0, 1, 7] == 70.0


def test_a_mask_has_no_form_in_memory_without_rows() -> None:
    view = VIEWS["gap in rows"]
    assert recipe_of(Form(Kind.TRIL), view.shape, view.stride(), torch.bool) is None


def test_dense_strides_are_those_of_a_new_tensor() -> None:
    assert dense_strides((B, H, L, E)) == torch.empty(B, H, L, E).stride()


def test_words_name_the_axis_of_the_argument() -> None:
    assert words(Form(Kind.ARANGE), "value") == "0, 1, 2, … along S"
    assert words(Form(Kind.ARANGE), "query") == "0, 1, 2, … along L"
    assert words(None) == "captured"
    assert words(Form(Kind.TRIL, padding=7)) == "causal, left padding 7"
