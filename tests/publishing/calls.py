"""Calls in closed form for the tests of scripts, and hostile texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.recipe import Kind, Recipe, build

FAULTS = Path(__file__).resolve().parent.parent / "faults"

HOSTILE = {
    "quotes": '\'"""\'; import os; os.abort() #',
    "newline": "first\nimport os\nos.abort()",
    "returns": "first\rimport os\r\nos.abort()\x0bx\x85y\u2028z",
    "backticks": "``` \n```\n# heading\n`code` ````",
    "html": "</script><img src=x onerror=alert(1)><!-- --> <b>bold</b> &lt;",
    "template": "{{ 7 * 7 }} {% for x in [1] %} {# comment #} {{ cause }}",
    "path": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "control": "\x00\x07\x1b[31mred\x1b[0m\u202eevil\u200b",
    "mention": "@everyone see https://evil.example www.evil.example [text](javascript:x) ![i](u) #1 a/b#2",
    "table": "a | b | c\n|---|---|",
    "encoding": "-*- coding: utf-7 -*- +AAo-import os+AAo-os.abort()",
    "braces": "{name} {0} %s $x$",
    "long": "x" * 10_000,
    "surrogate": "a\ud800 \udfffb",
    "comment": "# vim: set fileencoding=utf-7 :",
}


def closed(
    *,
    heads: int = 2,
    kv_heads: int = 1,
    rows: int = 33,
    keys: int | None = None,
    width: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    mask: str | None = "bool",
    scale: float | None = None,
    padding: int = 0,
    values: Kind = Kind.RANDINT,
) -> tuple[AttentionCall, dict[str, Recipe]]:
    """A call and its recipes. mask: "bool", "float", "flag" (is_causal) or None; kv_heads > 1 means `enable_gqa`."""
    keys = rows if keys is None else keys
    gqa = kv_heads > 1
    recipes = {"query": Recipe(values, (1, rows, heads, width), dtype, seed=1, transposed=(1, 2))}
    for seed, name in ((2, "key"), (3, "value")):
        whole = Recipe(values, (1, kv_heads, keys, width), dtype, seed=seed)
        recipes[name] = whole if gqa else replace(whole, expanded=(1, heads, keys, width))
    if mask in ("bool", "float"):
        kind = torch.bool if mask == "bool" else dtype
        recipes["attn_mask"] = Recipe(Kind.TRIL, (1, 1, rows, keys), kind, padding=padding)
    tensors = {name: build(recipe) for name, recipe in recipes.items()}
    return AttentionCall(**tensors, is_causal=mask == "flag", scale=scale, enable_gqa=gqa), recipes


def tail() -> tuple[AttentionCall, dict[str, Recipe]]:
    """The call on which the fault `pytorch_191937` shows: 1×2×33×136, expanded heads, value = its own position."""
    shape, seen = (1, 1, 33, 136), (1, 2, 33, 136)
    recipes = {
        "query": Recipe(Kind.ZEROS, seen, torch.bfloat16),
        "key": Recipe(Kind.ZEROS, shape, torch.bfloat16, expanded=seen),
        "value": Recipe(Kind.ARANGE, shape, torch.bfloat16, expanded=seen),
        "attn_mask": Recipe(Kind.TRIL, (1, 1, 33, 33), torch.bool),
    }
    return AttentionCall(**{name: build(recipe) for name, recipe in recipes.items()}), recipes
