"""Makes the committed sample dump: `python -m tests.make_sample`.

A healthy call with the layout of Gemma 4's global attention layers, at a length (33 = 1 mod 32) at which
the memory-efficient CUDA kernel of torch 2.2 to 2.13 computes its last query row with mask row 0
(pytorch#191937): clean on a CPU, wrong on such a GPU. Nothing in it comes from a model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall, copy_view, empty_aligned, span_elements
from sdpa_repro.environment import capture_context, software
from tests.calls import causal_mask

PATH = Path(__file__).resolve().parent.parent / "dumps" / "gemma4-global-33x33.sample.pt"
HEADS, LENGTH, WIDTH, PADDING = 2, 33, 512, 7
BLOCK = 512
"""Tensors begin at multiples of this, as in the CUDA caching allocator."""


def bell(generator: torch.Generator, *shape: int) -> Tensor:
    """Whole numbers from -32 to 32 that look normal (the sum of four dice, deviation 9.8), the same everywhere."""
    return torch.randint(-8, 9, (4, *shape), generator=generator).sum(0)


def make_call() -> AttentionCall:
    """query (1, 2, 33, 512) seen through a transposed projection output; key and value expanded from one head.

    Query and key have deviation 0.31, so that scores (scale 1, 512 products) have about 2.1; value has 1.2.
    """
    generator = torch.Generator().manual_seed(191937)
    tensors = {
        "query": (bell(generator, 1, LENGTH, HEADS, WIDTH) / 32).bfloat16().transpose(1, 2),
        "key": (bell(generator, LENGTH, WIDTH) / 32).bfloat16().expand(1, HEADS, LENGTH, WIDTH),
        "value": (bell(generator, LENGTH, WIDTH) / 8).bfloat16().expand(1, HEADS, LENGTH, WIDTH),
        "attn_mask": causal_mask(LENGTH, LENGTH, PADDING),
    }
    for name in ("key", "value"):  # as `repeat_kv` leaves one head of one batch row: stride 0 in both dimensions
        tensors[name] = tensors[name].as_strided((1, HEADS, LENGTH, WIDTH), (0, 0, WIDTH, 1))
    placed = in_one_arena(tensors)
    return AttentionCall(placed["query"], placed["key"], placed["value"], placed["attn_mask"], scale=1.0)


def in_one_arena(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same views one after another in memory, so that alignment and distances do not depend on the run."""
    sizes = [-(-span_elements(tensor) * tensor.element_size() // BLOCK) * BLOCK for tensor in tensors.values()]
    arena = empty_aligned(sum(sizes), 0, "cpu").zero_()
    placed = {}
    for (name, tensor), part in zip(tensors.items(), arena.split(sizes), strict=True):
        flat = part.view(tensor.dtype)
        view = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
        copy_view(tensor, view)
        placed[name] = view
    return placed


def make_document() -> dict[str, Any]:
    """The dump: the call, and the output of the CPU kernel that an ordinary call takes here."""
    call = make_call()
    with torch.inference_mode():
        context = capture_context(call)
        output = F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)
    versions = {name: fact for name, fact in software("cpu").items() if name != "platform"}
    origin = {
        "model": "none: made by tests/make_sample.py, not captured",
        "module": "layout of a Gemma 4 global attention layer (one key/value head, head_dim 512)",
        "call_index": 0,
        "calls": 1,
        "phase": "prefill",
        "total_length": LENGTH,
        "padding": PADDING,
        "rank": None,
        "command": "python -m tests.make_sample",
    }
    return dump.snapshot(call, output, context=context, origin=origin, environment=versions)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    path.parent.mkdir(exist_ok=True)
    size = dump.save(make_document(), path)
    print(f"{path}: {size} bytes")
