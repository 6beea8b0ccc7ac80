"""Prefills that are small enough for tests: the embedded model with a short prompt, and other families."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sdpa_repro.capturing import tiny
from sdpa_repro.capturing.prefill import Prefill, of_model

LAYERS = 3
WINDOW = 16
LENGTH = 58
FAILING = 65
"""Seven tokens of padding on the prompt of `LENGTH`: the next total length that leaves 1 on division by 32."""


@cache
def small(dtype: torch.dtype = torch.float32, *, length: int = LENGTH, images: int = 1) -> Prefill:
    """The embedded model with three layers (the last one global) and a prompt of `length` tokens; not to be changed."""
    model: Any = tiny.tiny_gemma4(dtype=dtype, layers=LAYERS, window=WINDOW)
    inputs = tiny.tiny_inputs(model, length, images=images)
    device = torch.device("cpu")
    return Prefill(model, inputs, tiny.NAME, dtype, device, length, "decoder", "left", tiny.PAD, embedded=True)


def beside_another(prefill: Prefill) -> Prefill:
    """A batch of two rows: another prompt with another image first, then the prefill's own."""
    other = tiny.tiny_inputs(prefill.model, prefill.length, seed=5)
    inputs = {name: torch.cat([other[name], tensor]) for name, tensor in prefill.inputs.items()}
    return replace(prefill, inputs=inputs)


@cache
def full() -> Prefill:
    """A prompt of `LENGTH` tokens that takes all positions of its model; not to be changed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=LENGTH, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    return of_model(model, {"input_ids": torch.arange(3, 3 + LENGTH)[None]})
