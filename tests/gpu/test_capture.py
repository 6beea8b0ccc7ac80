"""The recorder on the GPU: the real bug is caught as it happens, and what a CUDA graph hides is counted."""

from __future__ import annotations

from pathlib import Path

import torch

import sdpa_repro
from sdpa_repro.dump import load
from tests.gpu.cuda import AFFECTED, WRONG_ROWS, attend, gemma_call, needs_cuda, replayed_graph, wrong_rows

pytestmark = [needs_cuda]


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
        output = replayed_graph(call)
    assert wrong_rows(call, output) == []
    assert len(session.calls) == 1
    assert [count for reason, count in session.summary()["passed"].items() if "CUDA graph" in reason] == [1]
