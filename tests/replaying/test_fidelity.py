"""A dump proves itself: same layout, same bits; a densified one does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.attention import AttentionCall, map_dense
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.environment import capture_context, memory_layout
from sdpa_repro.replaying.fidelity import layout_changes, prove
from sdpa_repro.replaying.jobs import same_bits
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump


def densified(path: Path, to: Path) -> Path:
    """What a recorder would write that had copied the tensors without their layout."""
    dump = load(path)
    document = snapshot(
        map_dense(dump.call, "key", "value"), dump.output, context=dump.context, environment=dump.environment
    )
    save(document, to)
    return to


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, "causal", "float", "flag"])
def test_a_fresh_dump_proves_bits_and_layout(tmp_path: Path, mask: str | None) -> None:
    found = prove(write_dump(make_call(rows=33, padding=3, mask=mask), tmp_path / "call.pt"))
    assert (found.bit_equal, found.layout_equal, found.reason) == (True, True, "")


@pytest.mark.slow
def test_a_densified_dump_fails_the_layout_proof(tmp_path: Path) -> None:
    found = prove(densified(write_dump(make_call(), tmp_path / "call.pt"), tmp_path / "dense.pt"))
    assert found.layout_equal is False
    assert "key had stride" in found.reason


@pytest.mark.slow
def test_a_dump_of_a_planted_fault_proves_with_the_fault_and_not_without(tmp_path: Path) -> None:
    call = make_call(rows=33, padding=3)
    path = write_dump(call, tmp_path / "right.pt")
    found = prove(path, fault("pytorch_191937"))
    assert found.bit_equal is False
    assert found.reason == "preloaded pytorch_191937.py here, nothing at capture"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_call_with_gradients_and_two_threads_proves(tmp_path: Path, dtype: torch.dtype) -> None:
    call = make_call(rows=65, dtype=dtype, layout="gqa", kv_heads=2)
    call.query.requires_grad_(True)
    assert prove(write_dump(call, tmp_path / "call.pt")).bit_equal is True


@pytest.mark.slow
def test_a_dump_without_output_says_so(tmp_path: Path) -> None:
    call = make_call(rows=9, width=16)
    save(snapshot(call, context=capture_context(call)), tmp_path / "call.pt")
    found = prove(tmp_path / "call.pt")
    assert (found.bit_equal, found.layout_equal, found.reason) == (None, True, "no output was stored")


def layouts() -> tuple[dict[str, Any], AttentionCall]:
    call = make_call()
    return memory_layout(call), call


def test_a_layout_does_not_differ_from_itself() -> None:
    recorded, call = layouts()
    assert layout_changes(recorded, memory_layout(call)) == []


def test_a_changed_distance_is_a_changed_layout() -> None:
    recorded, call = layouts()
    recorded["key"]["near"] = {"value": 12345}
    changes = layout_changes(recorded, memory_layout(call))
    assert changes is not None
    assert any("value no longer begins 12345 bytes from key" in change for change in changes)


@pytest.mark.parametrize("recorded", [None, "text", []])
def test_a_layout_that_was_not_recorded_is_unknown(recorded: object) -> None:
    assert layout_changes(recorded, memory_layout(make_call())) is None


@pytest.mark.parametrize("near", [None, "text", [1], 5])
def test_distances_that_are_none_change_nothing(near: object) -> None:
    recorded, call = layouts()
    recorded["key"]["near"] = near
    assert layout_changes(recorded, memory_layout(call)) == []


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
