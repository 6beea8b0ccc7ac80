"""A sweep on a GPU: the real memory-efficient kernel fails where pytorch#191937 says, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import torch

from sdpa_repro.explaining.grid import sweep
from tests.gpu.cuda import AFFECTED, gemma_call, needs_cuda
from tests.replaying.dumps import write_dump

pytestmark = needs_cuda


def test_head_dim_and_layout_decide_which_lengths_fail(tmp_path: Path) -> None:
    with torch.inference_mode():
        path = write_dump(gemma_call(97), tmp_path / "call.pt")
    found = sweep(
        path,
        lengths=(64, 65, 66, 96, 97, 98),
        head_dims=(128, 512),
        layouts=("as-dumped", "dense"),
        backends=("EFFICIENT_ATTENTION",),
        device="cuda",
        apart=False,
    )
    failing = {(row.kind.head_dim, row.kind.layout): row.fails for row in found.rows}
    assert failing == {
        (128, "as-dumped"): (65,) if AFFECTED else (),
        (128, "dense"): (),
        (512, "as-dumped"): (65, 97) if AFFECTED else (),
        (512, "dense"): (),
    }
    assert found.tested == 24
