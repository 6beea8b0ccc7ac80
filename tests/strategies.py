"""Calls, layouts, masks and recipes for property tests. Importing this module settles how hypothesis runs:

the same examples every time, no deadline, nothing written to disk, so that a busy machine changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpa_repro.attention import AttentionCall
from sdpa_repro.recipe import Kind, Planted, Recipe, Strided
from tests.calls import causal_mask

settings.register_profile(
    "everywhere",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("everywhere")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("dense", "transposed", "expanded", "expanded batch", "cache", "offset", "gaps")


def normal(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Seeded normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid_out(seed: int, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> Tensor:
    """A tensor of that shape as models leave it: each layout is a view that some code makes."""
    batch, heads, rows, width = shape
    if layout == "transposed":
        return normal(seed, (batch, rows, heads, width), dtype).transpose(1, 2)
    if layout == "expanded":
        return normal(seed, (batch, 1, rows, width), dtype).expand(shape)
    if layout == "expanded batch":
        return normal(seed, (1, 1, rows, width), dtype).expand(shape)
    if layout == "cache":
        return normal(seed, (batch, heads, rows + 3, width), dtype)[:, :, 1 : rows + 1]
    if layout == "offset":
        return normal(seed, (batch * heads * rows * width + 5,), dtype)[5:].view(shape)
    if layout == "gaps":
        return normal(seed, (batch, heads, rows, 2 * width + 1), dtype)[..., 1::2]
    return normal(seed, shape, dtype)


@st.composite
def masks(draw: st.DrawFn, batch: int, heads: int, rows: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """None, or a mask: causal with left padding, or by chance; bool or additive; broadcast, expanded, sliced."""
    kind = draw(st.sampled_from(("none", "causal", "causal", "chance")))
    if kind == "none":
        return None
    shape = (draw(st.sampled_from((1, batch))), draw(st.sampled_from((1, heads))), rows, keys)
    if kind == "causal":
        seen = causal_mask(rows, keys, draw(st.just(0) | st.integers(0, keys))).expand(shape)
    else:
        coins = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        seen = torch.randint(0, 3, shape, generator=coins) > 0
    if draw(st.booleans()):
        wide = torch.ones(*shape[:3], keys + 4, dtype=torch.bool)
        wide[..., 2 : keys + 2] = seen
        seen = wide[..., 2 : keys + 2]
    if draw(st.booleans()):
        seen = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)
    return seen


@st.composite
def calls(draw: st.DrawFn, shared: bool = True) -> AttentionCall:
    """A call with four dimensions, small, in any mix of layouts; with `shared` value may lie in key."""
    sizes = st.integers(1, 5)
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rows, keys, width, value_width = draw(sizes), draw(sizes), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads, dtype, seed = kv_heads * group, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    layouts = st.sampled_from(LAYOUTS)
    query = laid_out(seed, (batch, heads, rows, width), dtype, draw(layouts))
    key = laid_out(seed + 1, (batch, kv_heads, keys, width), dtype, draw(layouts))
    if shared and draw(st.integers(0, 3)) == 0:
        value = key[..., : min(width, value_width)]
    else:
        value = laid_out(seed + 2, (batch, kv_heads, keys, value_width), dtype, draw(layouts))
    mask = draw(masks(batch, heads, rows, keys, dtype))
    scale = draw(st.sampled_from((None, 1.0, 0.3)))
    causal = mask is None and draw(st.booleans())
    return AttentionCall(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads)


@st.composite
def odd_calls(draw: st.DrawFn) -> AttentionCall:
    """Calls that dumps may hold besides: empty, without heads, tensors that overlap themselves, NaN and infinity."""
    call = draw(calls())
    kind = draw(st.sampled_from(("plain", "empty", "flat", "unfold", "special", "one memory")))
    if kind == "empty":
        return replace(call, query=call.query[:, :, :0], attn_mask=None)
    if kind == "flat":
        flat = {name: tensor[0, 0] for name, tensor in call.tensors.items()}
        return replace(call.with_tensors(flat), enable_gqa=False)
    if kind == "unfold":
        rows, width, step = call.key.shape[2], call.key.shape[3], draw(st.integers(1, 3))
        key = normal(3, (rows * step + width,), call.key.dtype).unfold(0, width, step)[:rows]
        return replace(call, key=key[None, None].expand(call.key.shape))
    if kind == "special":
        key = call.key.clone(memory_format=torch.contiguous_format)
        key.view(-1)[: min(3, key.numel())] = torch.tensor([math.nan, -math.inf, -0.0])[: min(3, key.numel())].to(
            key.dtype
        )
        return replace(call, key=key)
    if kind == "one memory":
        return replace(call, value=call.key, query=call.key, attn_mask=None, enable_gqa=False)
    return call


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A recipe with any kind of values and any layout."""
    kind = draw(st.sampled_from(list(Kind)))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    numbers = (Kind.EYE, Kind.RANDINT, Kind.RANDN, Kind.ARANGE)
    dtype = draw(st.sampled_from(DTYPES if kind in numbers else (*DTYPES, torch.bool)))
    words: dict[str, Any] = {
        "constant": draw(st.sampled_from((0.0, 1.0, -2.5, 40.0, -math.inf))),
        "dim": draw(st.integers(-len(shape), -1)),
        "period": draw(st.none() | st.integers(1, 5)),
        "seed": draw(st.integers(0, 9)),
        "padding": draw(st.integers(0, shape[-1])),
        "window": draw(st.none() | st.integers(1, 4)),
    }
    if dtype == torch.bool:
        words["constant"] = bool(words["constant"])
    if draw(st.booleans()) and dtype != torch.bool:
        place = tuple(draw(st.integers(0, size - 1)) for size in shape)
        words["planted"] = Planted(place, draw(st.sampled_from((3.0, -0.5, 88.0))))
    wide = shape
    if draw(st.booleans()):
        wide = tuple(draw(st.integers(1, 3)) if size == 1 else size for size in shape)
        words["expanded"] = wide
    step = draw(st.sampled_from(("", "transposed", "strided")))
    if step == "transposed":
        words["transposed"] = tuple(draw(st.permutations(range(len(shape))))[:2])
    elif step == "strided" and wide == shape:
        held = math.prod(shape)
        rows = draw(st.integers(1, held))
        words["strided"] = Strided((2, rows), (0, 1), draw(st.integers(0, held - rows)))
    return Recipe(kind, shape, dtype, **words)
