"""Calls for the guard's tests, and a result of `explain --json` about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_repro.attention import AttentionCall
from tests.calls import make_call
from tests.definition import attention

WRONG = make_call(rows=33, padding=3, dtype=torch.float32)
"""The planted fault spoils its last row: one key/value head of stride 0, a mask, L = 33, head_dim 136."""

DENSE_LINE = "key, value = key.contiguous(), value.contiguous()"
MATH_LINE = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ...  # around the call"


def attend(call: AttentionCall = WRONG) -> Tensor:
    """The call as users make it, without gradients."""
    with torch.no_grad():
        return torch.nn.functional.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def by_math(call: AttentionCall = WRONG) -> Tensor:
    """The call with MATH alone enabled."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(call)


def is_right(output: Tensor, call: AttentionCall = WRONG) -> bool:
    """Whether a float32 output is that of the definition, rounding aside; the fault moves it by more than 0.1.

    The first rows are left out: they see no key.
    """
    return bool((output.double() - attention(call))[:, :, 3:].abs().max() < 1e-4)


def rule_document(**changes: Any) -> dict[str, Any]:
    """What explain says of the planted fault, cut to the keys that a guard reads."""
    document: dict[str, Any] = {
        "schema": {"name": "explain", "version": 1},
        "backend": "FLASH_ATTENTION",
        "needed": ["attn_mask", "key_value_head_stride_0", "no_grad", "length_L", "head_dim"],
        "alternatives": [],
        "length_rule": {"rule": "L % 32 == 1 and L > 1"},
        "workarounds": [
            {"words": "…", "line": DENSE_LINE, "verified": True},
            {"words": "…", "line": MATH_LINE, "verified": True},
        ],
        "known": [{"issue": "pytorch#191937", "match": "emulated", "fixed_in": "2.14.0"}],
        "replay": {"device": "cpu", "dtype": "float32"},
    }
    return {**document, **changes}


def rule_file(folder: Path, **changes: Any) -> Path:
    """The document as a file."""
    path = folder / "result.json"
    path.write_text(json.dumps(rule_document(**changes)))
    return path
