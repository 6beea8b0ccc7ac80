"""How much rounding alone can move: a model whose results are all shaken by about one unit in the last place.

Monte Carlo arithmetic (D. Stott Parker, 1997): add a random error of the size of a rounding to the results of every
elementary module and see how far the run moves. What another order of summation or another length of the batch
does to a healthy model is of this size; no fault is part of it, since every shaken run is of the same inputs on
the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def shaken(model: nn.Module, seed: int) -> Iterator[None]:
    """Shake the model during the block; the same seed shakes it in the same way. torch's generators are not used."""
    generators: dict[torch.device, torch.Generator] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            found = [moved(each) for each in value]
            return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or not value.numel():
            return value
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        return shake(value, generators[value.device])

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return moved(output)

    handles = []
    try:
        for module in model.modules():
            if not list(module.children()) and not isinstance(module, (nn.Dropout, nn.Identity)):
                handles.append(module.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def shake(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The tensor with a uniform error of up to half of its dtype's eps, of each entry or of its row's RMS.

    A sum rounds by the size of what is added and not of what is left, so small entries move as others of their row do.
    Infinities and NaN stay as they are.
    """
    wide = tensor.detach().to(torch.float64 if tensor.element_size() >= 4 else torch.float32)
    unit = torch.finfo(tensor.dtype).eps / 2
    known = torch.where(wide.isfinite(), wide, 0.0)
    typical = known.square().mean(-1, keepdim=True).sqrt() if known.dim() else known.abs()
    error = torch.rand(wide.shape, dtype=wide.dtype, device=wide.device, generator=generator) * 2 - 1
    return (wide + error * unit * torch.maximum(known.abs(), typical)).to(tensor.dtype)
