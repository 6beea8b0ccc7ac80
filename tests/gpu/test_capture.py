"""The recorder on the GPU: the real bug is caught as it happens, and what a CUDA graph hides is counted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_repro
from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import load
from tests.gpu.cuda import AFFECTED, WRONG_ROWS, gemma_call, needs_cuda, wrong_rows

pytestmark = [needs_cuda]


def attend(call: AttentionCall) -> Tensor:
    """The call with the memory-efficient kernel and no gradients."""
    with torch.inference_mode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def test_the_dump_of_a_live_call_holds_what_the_kernel_gave(tmp_path: Path) -> None:
    call = gemma_call()
    with sdpa_repro.capture(tmp_path, keep="all") as session:
        output = attend(call)
    (record,) = session.calls
    assert record.status == ("diverges" if AFFECTED else "agrees")
    assert sorted({row for _, _, row in record.rows}) == WRONG_ROWS
    dump = load(session.dumps[0], "cuda")
    assert dump.output is not None
    assert torch.equal(dump.output, output)
    assert dump.call.key.stride() == call.key.stride()
    assert wrong_rows(dump.call, attend(dump.call)) == WRONG_ROWS


def test_calls_within_a_cuda_graph_are_counted_and_replays_go_undisturbed(tmp_path: Path) -> None:
    call = gemma_call(290)
    with sdpa_repro.capture(tmp_path) as session:
        attend(call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = attend(call)
        graph.replay()
    torch.cuda.synchronize()
    assert wrong_rows(call, output) == []
    assert len(session.calls) == 1
    assert [count for reason, count in session.summary()["passed"].items() if "CUDA graph" in reason] == [1]
