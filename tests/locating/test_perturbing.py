"""Shaking moves a model by roundings, in the same way for a seed, and leaves it as it was."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sdpa_repro.locating.perturbing import shake, shaken


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_entry_moves_by_about_one_unit_in_the_last_place(dtype: torch.dtype) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = shake(values, torch.Generator().manual_seed(1))
    wide = values.double()
    typical = wide.square().mean(-1, keepdim=True).sqrt()
    largest = torch.finfo(dtype).eps * torch.maximum(wide.abs(), typical)  # half from the error, half from rounding
    difference = (moved.double() - wide).abs()
    assert moved.dtype is dtype
    assert bool((difference <= largest * 1.01).all())
    assert float((difference > 0).double().mean()) > 0.1


def test_infinities_stay_and_the_entries_beside_them_move_by_a_rounding() -> None:
    values = torch.tensor([[1.0, -torch.inf, 2.0, torch.nan, torch.inf]])
    moved = shake(values, torch.Generator().manual_seed(0))
    torch.testing.assert_close(moved, values, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_named_tuple_keeps_its_names() -> None:
    class Routing(NamedTuple):
        logits: Tensor
        chosen: Tensor

    class Router(nn.Module):
        def forward(self, values: Tensor) -> Routing:
            return Routing(values, values.argmax(-1))

    with shaken(router := Router(), 0):
        found = router(torch.ones(2, 4))
    assert torch.equal(found.chosen, torch.zeros(2, dtype=torch.long))
    assert not torch.equal(found.logits, torch.ones(2, 4))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 4)).eval()


def test_a_shaken_model_moves_and_is_itself_again_afterwards() -> None:
    net, values = model(), torch.ones(2, 8)
    before = net(values)
    with shaken(net, 0):
        moved = net(values)
    assert not torch.equal(moved, before)
    torch.testing.assert_close(moved, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(net(values), before)
    assert not [module for module in net.modules() if module._forward_hooks]


def test_a_seed_shakes_in_one_way_and_torch_draws_as_before() -> None:
    net, values = model(), torch.ones(2, 8)
    state = torch.get_rng_state()
    results = []
    for seed in (3, 3, 4):
        with shaken(net, seed):
            results.append(net(values))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_raises_is_left_alone() -> None:
    net = model()
    with pytest.raises(RuntimeError), shaken(net, 0):
        net(torch.ones(2, 3))
    assert not [module for module in net.modules() if module._forward_hooks]


def test_numbers_that_are_not_floating_pass() -> None:
    table = nn.Identity()
    with shaken(nn.Sequential(table), 0):
        assert table(torch.tensor([1, 2])).tolist() == [1, 2]
