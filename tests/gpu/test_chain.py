"""Capture, dump, proof and replay on the GPU: the real bug is found live, survives the dump, and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sdpa_repro
from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.prefill import forward, padded, prepare
from sdpa_repro.dump import layout_differences, load
from sdpa_repro.replaying.check import check
from sdpa_repro.replaying.replay import prove, replay
from tests.gpu.cuda import AFFECTED, dense, gemma_call, needs_cuda

pytestmark = needs_cuda

FAULTS = Path(__file__).resolve().parent.parent / "faults"
EFFICIENT = "EFFICIENT_ATTENTION"


def recorded(call: AttentionCall, folder: Path, backend: Any = None) -> Path:
    """The dump of one call made on the GPU, with the memory-efficient kernel forced unless told otherwise."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    with (
        sdpa_repro.capture(str(folder), keep="all") as session,
        torch.inference_mode(),
        sdpa_kernel(backend or SDPBackend.EFFICIENT_ATTENTION),
    ):
        attend(call.query, call.key, call.value, **call.keywords)
    return Path(session.dumps[0])


def cells(document: dict[str, Any], dtype: str = "captured") -> dict[str, str]:
    """Status by backend."""
    chosen = dtype if dtype != "captured" else document["cells"][0]["dtype"]
    return {cell["backend"]: cell["status"] for cell in document["cells"] if cell["dtype"] == chosen}


def test_the_live_check_sees_the_bug_on_the_gpu() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for call, wrong in ((gemma_call(), AFFECTED), (gemma_call(290), False), (dense(gemma_call()), False)):
        with torch.inference_mode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            output = torch.nn.functional.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)
        result = check(call, output)
        assert result.status == ("diverges" if wrong else "agrees"), result
        if wrong:
            assert {row for _, _, row in result.rows} == {288}
            assert result.wrong_rows == 16


def test_a_dump_made_on_the_gpu_keeps_layout_and_alignment_there(tmp_path: Path) -> None:
    call = gemma_call()
    path = recorded(call, tmp_path)
    assert layout_differences(call, load(path, device="cuda").call) == []
    assert layout_differences(call, load(path).call) == []


def test_a_fresh_process_gives_the_captured_output_bit_for_bit(tmp_path: Path) -> None:
    fidelity = prove(recorded(gemma_call(), tmp_path))
    assert (fidelity.bit_equal, fidelity.layout_equal) == (True, True), fidelity.reason


def test_replay_names_the_kernel_and_the_row(tmp_path: Path) -> None:
    result = replay(recorded(gemma_call(), tmp_path), dtypes=("captured", "bfloat16", "float16", "float32"))
    document = result.document()
    if not AFFECTED:
        assert document["verdict"] == "healthy", document["sentence"]
        return
    assert document["verdict"] == "backend_wrong", document["sentence"]
    assert EFFICIENT in document["guilty"]
    assert set(document["guilty"]) <= {"default", EFFICIENT}
    assert "288" in document["sentence"]
    assert document["ran"] == EFFICIENT
    assert any("191937" in str(known["issue"]) for known in document["known"])
    assert cells(document)["MATH"] == cells(document)["eager"] == "agrees"
    for dtype in ("bfloat16", "float16", "float32"):
        assert cells(document, dtype)[EFFICIENT] == "diverges"


@pytest.mark.parametrize("change", [lambda: gemma_call(290), lambda: dense(gemma_call())])
def test_a_call_beside_the_bug_is_healthy_in_every_backend(change: Any, tmp_path: Path) -> None:
    document = replay(recorded(change(), tmp_path)).document()
    assert document["verdict"] == "healthy", document["sentence"]
    assert set(cells(document).values()) <= {"agrees", "declined"}
    assert cells(document)["default"] == "agrees"


def test_every_backend_agrees_on_a_call_that_all_of_them_take(tmp_path: Path) -> None:
    from torch.nn.attention import SDPBackend

    from sdpa_repro.attention import rebuild
    from tests.calls import make_call

    call = rebuild(make_call(heads=4, rows=256, width=64, mask="flag", layout="dense"), device="cuda")
    document = replay(recorded(call, tmp_path, SDPBackend.MATH)).document()
    assert document["verdict"] == "healthy", document["sentence"]
    for backend in ("default", "eager", "MATH", "FLASH_ATTENTION", EFFICIENT):
        assert cells(document)[backend] == "agrees"


def test_the_embedded_model_shows_the_bug(tmp_path: Path) -> None:
    options = PrefillOptions(device="cuda", pad=7)
    prefill = prepare(options)
    inputs = padded(prefill, prefill.length + 7)
    with sdpa_repro.capture(str(tmp_path)) as session:
        forward(prefill, inputs)
    assert inputs["input_ids"].shape[1] == 289
    document = replay(session.dumps[0]).document()
    if AFFECTED:
        assert EFFICIENT in document["guilty"], document["sentence"]
        assert "288" in document["sentence"]
    else:
        assert document["verdict"] == "healthy", document["sentence"]


def test_an_assertion_on_the_device_costs_one_cell(tmp_path: Path) -> None:
    path = recorded(gemma_call(290), tmp_path)
    document = replay(path, preload=(FAULTS / "cuda_assert.py",)).document()
    assert cells(document)[EFFICIENT] == "crashed"
    assert cells(document)["MATH"] == cells(document)["eager"] == "agrees"


def test_a_dump_of_the_gpu_replays_on_the_cpu(tmp_path: Path) -> None:
    document = replay(recorded(gemma_call(), tmp_path), device="cpu").document()
    assert cells(document)["FLASH_ATTENTION"] == cells(document)["MATH"] == "agrees"
    assert document["verdict"] in {"healthy", "unreproducible"}
