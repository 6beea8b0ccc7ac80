"""What the GPU tests share: when they run, the call of pytorch#191937, and moves between devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_repro.attention import AttentionCall, rebuild
from tests.calls import make_call
from tests.definition import attention

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None, reason="needs an NVIDIA GPU"
)
AFFECTED = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
"""Whether this torch has pytorch#191937 (2.2 to 2.13); a later one must be clean."""

WRONG_ROWS = [288] if AFFECTED else []
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""What a right kernel may be off by here; float32 leaves room for products in TF32."""


def gemma_call(length: int = 289, dtype: torch.dtype = torch.bfloat16, width: int = 512) -> AttentionCall:
    """Gemma 4 12B's global layer at `length`: 16 heads over one key/value head, left-padded by 7, on the GPU."""
    call = make_call(heads=16, rows=length, width=width, dtype=dtype, padding=7)
    return rebuild(call, device="cuda")


def attend(call: AttentionCall) -> Tensor:
    """The call with the memory-efficient kernel and no gradients."""
    with torch.inference_mode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def replayed_graph(call: AttentionCall) -> Tensor:
    """What the call gives when a CUDA graph that holds it is replayed; it runs once before, outside the graph."""
    attend(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(call)
    graph.replay()
    torch.cuda.synchronize()
    return output


def dense(call: AttentionCall) -> AttentionCall:
    """The call with key and value copied to sixteen heads each."""
    return replace(call, key=call.key.contiguous(), value=call.value.contiguous())


def wrong_rows(call: AttentionCall, output: Tensor) -> list[int]:
    """Query rows that are off from the definition in float64 by more than rounding, fully masked ones left out."""
    expected = attention(rebuild(call, device="cpu"))
    error = (output.cpu().double() - expected).abs().nan_to_num(float("inf")).amax((0, 1, 3))
    if call.attn_mask is not None:
        error[~call.attn_mask.cpu()[0, 0].any(-1)] = 0
    return [int(row) for row in (error > ROUNDING[output.dtype]).nonzero()]
