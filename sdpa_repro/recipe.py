"""Tensors in closed form: build one, or print the torch-only line that builds the same one anywhere.

Values come from whole numbers (up to 256, or eighths up to 1), which bfloat16 and float16 hold exactly, and from
a CPU generator, so the bits do not depend on the device. `Kind.RANDN` is the exception: torch's normal values
may differ in the last bit between processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(str, Enum):
    """Where the values come from."""

    ZEROS = "zeros"
    FULL = "full"
    ARANGE = "arange"
    EYE = "eye"
    RANDINT = "randint"
    RANDN = "randn"


class Planted(NamedTuple):
    """One entry set by hand, before the layout: `place` is an index into the recipe's `shape`."""

    place: tuple[int, ...]
    value: float


class Strided(NamedTuple):
    """The last layout step, `as_strided(shape, stride, offset)`, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Recipe:
    """A tensor: values of `kind` in `shape` and `dtype`, then the layout steps in the order of the fields below.

    ZEROS. FULL: `constant` everywhere. ARANGE: the index along `dim`, modulo `period` when given.
    EYE: 1 where the last two indices are equal. RANDINT: whole numbers in [-8, 8] over 8, from `seed`.
    RANDN: normal values from `seed`, drawn in float32 and rounded.

    planted: one entry, set last. Layout: `expanded` (sizes given to dimensions of size 1, stride 0),
    `transposed` (two dimensions swapped), `strided`.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    constant: float = 0.0
    dim: int = -2
    period: int | None = None
    seed: int = 0
    planted: Planted | None = None
    expanded: tuple[int, ...] | None = None
    transposed: tuple[int, int] | None = None
    strided: Strided | None = None


def build(recipe: Recipe, device: torch.device | str = "cpu") -> Tensor:
    """The tensor, made on the CPU and moved to `device` before the layout, so that strides are exact there too."""
    tensor = _values(recipe)
    if recipe.planted is not None:
        tensor[recipe.planted.place] = recipe.planted.value
    tensor = tensor.to(device)
    if recipe.expanded is not None:
        tensor = tensor.expand(recipe.expanded)
    if recipe.transposed is not None:
        tensor = tensor.transpose(*recipe.transposed)
    if recipe.strided is not None:
        tensor = tensor.as_strided(*recipe.strided)
    return tensor


def line(recipe: Recipe, name: str, device: str | None = None) -> str:
    """Python that assigns the tensor of `build(recipe)` to `name`, importing torch alone.

    One line, or three when an entry is planted. `device` is an expression of the script, such as the name of a
    variable; None leaves the tensor on the CPU.
    """
    moved = f".to({device})" if device else ""
    layout = _layout_text(recipe)
    if recipe.planted is None:
        return f"{name} = {_values_text(recipe)}{moved}{layout}"
    index = ", ".join(str(position) for position in recipe.planted.place)
    lines = [f"{name} = {_values_text(recipe)}{moved}", f"{name}[{index}] = {_number(recipe.planted.value)}"]
    return "\n".join([*lines, f"{name} = {name}{layout}"] if layout else lines)


def _values(recipe: Recipe) -> Tensor:
    shape, dtype = recipe.shape, recipe.dtype
    if recipe.kind is Kind.ZEROS:
        return torch.zeros(shape, dtype=dtype)
    if recipe.kind is Kind.FULL:
        return torch.full(shape, recipe.constant, dtype=dtype)
    if recipe.kind is Kind.ARANGE:
        count = torch.arange(shape[recipe.dim])
        if recipe.period is not None:
            count = count % recipe.period
        return count.to(dtype).view(_along(recipe)).repeat(_repeats(recipe))
    if recipe.kind is Kind.EYE:
        return torch.eye(*shape[-2:], dtype=dtype).repeat((*shape[:-2], 1, 1))
    generator = torch.Generator().manual_seed(recipe.seed)
    if recipe.kind is Kind.RANDINT:
        return (torch.randint(-8, 9, shape, generator=generator) / 8).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def _values_text(recipe: Recipe) -> str:
    shape, dtype = recipe.shape, recipe.dtype
    if recipe.kind is Kind.ZEROS:
        return f"torch.zeros({shape}, dtype={dtype})"
    if recipe.kind is Kind.FULL:
        return f"torch.full({shape}, {_number(recipe.constant)}, dtype={dtype})"
    if recipe.kind is Kind.ARANGE:
        count = f"torch.arange({shape[recipe.dim]})"
        if recipe.period is not None:
            count = f"({count} % {recipe.period})"
        return f"{count}.to({dtype}).view{_along(recipe)}.repeat{_repeats(recipe)}"
    if recipe.kind is Kind.EYE:
        return f"torch.eye({shape[-2]}, {shape[-1]}, dtype={dtype}).repeat{(*shape[:-2], 1, 1)}"
    generator = f"generator=torch.Generator().manual_seed({recipe.seed})"
    if recipe.kind is Kind.RANDINT:
        return f"(torch.randint(-8, 9, {shape}, {generator}) / 8).to({dtype})"
    return f"torch.randn({shape}, {generator}).to({dtype})"


def _layout_text(recipe: Recipe) -> str:
    text = ""
    if recipe.expanded is not None:
        text += f".expand{recipe.expanded}"
    if recipe.transposed is not None:
        text += f".transpose{recipe.transposed}"
    if recipe.strided is not None:
        shape, stride, offset = recipe.strided
        text += f".as_strided({shape}, {stride}, {offset})"
    return text


def _along(recipe: Recipe) -> tuple[int, ...]:
    """The shape of a vector that lies along `dim` of the recipe's shape."""
    dim = recipe.dim % len(recipe.shape)
    return tuple(size if index == dim else 1 for index, size in enumerate(recipe.shape))


def _repeats(recipe: Recipe) -> tuple[int, ...]:
    dim = recipe.dim % len(recipe.shape)
    return tuple(1 if index == dim else size for index, size in enumerate(recipe.shape))


def _number(value: float) -> str:
    """The number as Python source: whole numbers without a point, infinities and NaN as a call."""
    if value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(int(value)) if float(value).is_integer() and not isinstance(value, bool) else repr(value)
