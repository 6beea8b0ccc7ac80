"""Tensors in closed form: build one, print the torch-only line that builds the same one, or store it as plain data.

Values come from whole numbers (up to 256, or eighths up to 1), which bfloat16 and float16 hold exactly, and from
a CPU generator, so the bits do not depend on the device. `Kind.RANDN` is the exception: torch's normal values
may differ in the last bit between processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa_repro.errors import InputError

MAX_RANK = 8
MAX_ELEMENTS = 1 << 32
"""Of the tensor before and after its layout, for recipes that come from a file."""


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool)
"""What a recipe read from a file may be made of."""

HIDDEN = 'float("-inf")'


class Kind(str, Enum):
    """Where the values come from."""

    ZEROS = "zeros"
    FULL = "full"
    ARANGE = "arange"
    EYE = "eye"
    RANDINT = "randint"
    RANDN = "randn"
    TRIL = "tril"
    PADDING = "padding"
    COIN = "coin"


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

    Masks, of the last two dimensions (L, S), True or 0 where a key takes part, False or -inf where not.
    TRIL: row i sees the keys up to i, but not the first `padding` ones, and `window` keys at most when given.
    PADDING: every row sees the keys from `padding` on. COIN: each entry by chance, from `seed`.

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
    padding: int = 0
    window: int | None = None
    planted: Planted | None = None
    expanded: tuple[int, ...] | None = None
    transposed: tuple[int, int] | None = None
    strided: Strided | None = None


def build(recipe: Recipe, device: torch.device | str = "cpu") -> Tensor:
    """The tensor, made on the CPU and moved to `device` before the layout, so that strides are exact there too."""
    tensor = _values(recipe)
    if recipe.planted is not None:
        tensor[recipe.planted.place] = recipe.planted.value
    return _laid_out(tensor.to(device), recipe)


def _laid_out(tensor: Tensor, recipe: Recipe) -> Tensor:
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


def to_document(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data for a dump; fields at their default are left out."""
    document: dict[str, Any] = {}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if value == field.default:
            continue
        if isinstance(value, Kind):
            value = value.value
        elif isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, tuple):
            value = [list(part) if isinstance(part, tuple) else part for part in value]
        document[field.name] = value
    return document


def from_document(document: object) -> Recipe:
    """The recipe that `to_document` wrote. A file is not trusted: raises InputError for anything but a sound recipe."""
    try:
        recipe = _read(document)
        _check(recipe)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise InputError(f"a recipe in this dump is damaged ({error}): reduce the call again") from None
    return recipe


def _read(document: object) -> Recipe:
    """A recipe with every field of its type, not yet checked against each other."""
    if not isinstance(document, Mapping):
        raise TypeError("it is no mapping")
    words: dict[str, Any] = {
        "kind": Kind(document["kind"]),
        "shape": _whole_numbers(document["shape"]),
        "dtype": {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}[document["dtype"]],
    }
    for name in ("dim", "period", "seed", "padding", "window"):
        if document.get(name) is not None:
            words[name] = _whole_numbers([document[name]])[0]
    if document.get("constant") is not None:
        words["constant"] = _finite_or_infinite(document["constant"])
    if document.get("planted") is not None:
        place, value = document["planted"]
        words["planted"] = Planted(_whole_numbers(place), _finite_or_infinite(value))
    for name in ("expanded", "transposed"):
        if document.get(name) is not None:
            words[name] = _whole_numbers(document[name])
    if document.get("strided") is not None:
        shape, stride, offset = document["strided"]
        words["strided"] = Strided(_whole_numbers(shape), _whole_numbers(stride), *_whole_numbers([offset]))
    return Recipe(**words)


def _whole_numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or len(values) > MAX_RANK:
        raise ValueError("sizes must be a short list")
    for value in values:
        if type(value) is not int or not -(1 << 40) < value < 1 << 40:
            raise ValueError(f"{str(value)[:20]!r} is no size")
    return tuple(values)


def _finite_or_infinite(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise ValueError("a constant must be a number")
    return value


def _check(recipe: Recipe) -> None:
    """Raise ValueError where building would fail or take more memory than any call in closed form needs."""
    shape, strided = recipe.shape, recipe.strided
    sizes = [shape, recipe.expanded or (), strided.shape if strided else ()]
    if any(size < 0 for group in sizes for size in group) or any(math.prod(group) > MAX_ELEMENTS for group in sizes):
        raise ValueError("a size is negative or too large")
    rank = len(shape)
    square = recipe.kind in (Kind.EYE, Kind.TRIL, Kind.PADDING)
    if rank < (2 if square else 1) or (recipe.kind is Kind.ARANGE and not -rank <= recipe.dim < rank):
        raise ValueError("shape has too few dimensions")
    if (recipe.period is not None and recipe.period < 1) or (recipe.window is not None and recipe.window < 1):
        raise ValueError("period and window must be at least 1")
    if recipe.kind in (Kind.EYE, Kind.RANDINT, Kind.RANDN) and recipe.dtype == torch.bool:
        raise ValueError("bool is no dtype for these values")
    if not 0 <= recipe.padding <= shape[-1] or recipe.seed < 0:
        raise ValueError("padding or seed is out of range")
    _check_layout(recipe)


def _check_layout(recipe: Recipe) -> None:
    """Raise ValueError for indices and strides that lead out of the tensor; takes no memory."""
    if recipe.strided is not None:
        reach = sum((max(size, 1) - 1) * step for size, step in zip(*recipe.strided[:2], strict=True))
        held = math.prod(recipe.shape)
        if min(recipe.strided.stride, default=0) < 0 or not 0 <= recipe.strided.offset <= held - 1 - reach:
            raise ValueError("a stride leads out of the tensor")
    if recipe.planted is not None:
        place = recipe.planted.place
        if len(place) != len(recipe.shape) or any(not 0 <= p < n for p, n in zip(place, recipe.shape, strict=True)):
            raise ValueError("the planted entry lies outside the tensor")
    if recipe.transposed is not None and len(recipe.transposed) != 2:
        raise ValueError("two dimensions are swapped, not more")
    try:
        _laid_out(torch.empty(recipe.shape, dtype=recipe.dtype, device="meta"), recipe)
    except RuntimeError:
        raise ValueError("its layout does not fit its shape") from None


def _values(recipe: Recipe) -> Tensor:
    shape, dtype = recipe.shape, recipe.dtype
    if recipe.kind is Kind.ZEROS:
        return torch.zeros(shape, dtype=dtype)
    if recipe.kind in (Kind.TRIL, Kind.PADDING):
        return _mask(recipe)
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
    if recipe.kind is Kind.COIN:
        coins = torch.randint(0, 2, shape, generator=generator).bool()
        return coins if dtype == torch.bool else torch.zeros(shape, dtype=dtype).masked_fill(~coins, -math.inf)
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
    if recipe.kind in (Kind.TRIL, Kind.PADDING):
        return _mask_text(recipe)
    generator = f"generator=torch.Generator().manual_seed({recipe.seed})"
    if recipe.kind is Kind.COIN:
        coins = f"torch.randint(0, 2, {shape}, {generator}).bool()"
        return coins if dtype == torch.bool else f"torch.zeros({shape}, dtype={dtype}).masked_fill(~{coins}, {HIDDEN})"
    if recipe.kind is Kind.RANDINT:
        return f"(torch.randint(-8, 9, {shape}, {generator}) / 8).to({dtype})"
    return f"torch.randn({shape}, {generator}).to({dtype})"


def _mask(recipe: Recipe) -> Tensor:
    rows, keys = recipe.shape[-2:]
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    seen = (key >= recipe.padding).expand(rows, keys)
    if recipe.kind is Kind.TRIL:
        seen = seen & (key <= row)
        if recipe.window is not None:
            seen = seen & (key > row - recipe.window)
    if recipe.dtype != torch.bool:
        seen = torch.zeros(rows, keys, dtype=recipe.dtype).masked_fill(~seen, -math.inf)
    return seen.repeat(*recipe.shape[:-2], 1, 1)


def _mask_text(recipe: Recipe) -> str:
    rows, keys = recipe.shape[-2:]
    padding = f"(torch.arange({keys}) >= {recipe.padding})"
    if recipe.kind is Kind.TRIL:
        text = f"torch.ones({rows}, {keys}, dtype=torch.bool).tril()"
        text += f".triu({1 - recipe.window})" if recipe.window is not None else ""
        text = f"({text} & {padding})" if recipe.padding else text
    else:
        text = f"{padding}.repeat({rows}, 1)"
    if recipe.dtype != torch.bool:
        text = f"torch.zeros({rows}, {keys}, dtype={recipe.dtype}).masked_fill(~{text}, {HIDDEN})"
    front = recipe.shape[:-2]
    if all(size == 1 for size in front):
        return f"{text}[{', '.join(['None'] * len(front))}]" if front else text
    return f"{text}.repeat{(*front, 1, 1)}"


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
