"""The parts of a model are found by how it is built."""

from __future__ import annotations

import torch
from torch import nn

from sdpa_repro.locating import structure
from tests.locating import prefills


def test_sliding_and_global_layers_are_told_apart() -> None:
    (stack,) = structure.stacks(prefills.small().model)
    assert stack.owner == "model.language_model"
    assert list(stack.kinds.values()) == ["sliding"] * (prefills.LAYERS - 1) + ["global"]
    assert not stack.encoder


def test_the_rotary_embedding_of_the_text_side_is_found() -> None:
    model = prefills.small().model
    assert [path for path, _ in structure.rotary(model)] == ["model.language_model.rotary_emb"]
    assert list(structure.position_tables(model)) == []


def test_a_source_is_named_from_its_package_on() -> None:
    model = prefills.small().model
    assert structure.source_of(model) == "transformers/models/gemma4_unified/modeling_gemma4_unified.py"
    assert structure.source_of(nn.Linear(1, 1)) == "torch/nn/modules/linear.py"
    assert structure.source_of(torch.nn) == ""


def test_modules_between_tokens_and_pixels_are_left_out() -> None:
    assert structure.senses("model.vision_tower.encoder.layers")
    assert not structure.senses("model.language_model.layers")


def test_the_modelling_code_and_the_masks_are_where_functions_are_looked_for() -> None:
    names = [module.__name__ for module in structure.modelling_modules(prefills.small().model)]
    assert "transformers.masking_utils" in names
    assert "transformers.models.gemma4_unified.modeling_gemma4_unified" in names
