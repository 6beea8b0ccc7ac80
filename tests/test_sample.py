"""The committed sample dump: what its generator makes, healthy here, and telling where the bug is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sdpa_repro import dump, mask
from sdpa_repro.replaying.backends import Backend, run
from sdpa_repro.replaying.check import check
from tests import make_sample


@pytest.fixture(scope="module")
def sample() -> dump.Dump:
    return dump.load(make_sample.PATH)


def test_the_sample_holds_what_its_generator_makes(sample: dump.Dump) -> None:
    made = make_sample.make_call()
    assert dump.layout_differences(sample.call, made) == []
    for name, tensor in made.tensors.items():
        assert torch.equal(sample.call.tensors[name], tensor)
    assert (sample.call.scale, sample.call.is_causal, sample.call.enable_gqa) == (1.0, False, False)


def test_the_generator_writes_the_same_call_again(tmp_path: Path, sample: dump.Dump) -> None:
    dump.save(make_sample.make_document(), tmp_path / "again.pt")
    again = dump.load(tmp_path / "again.pt")
    assert dump.layout_differences(sample.call, again.call) == []
    assert all(torch.equal(again.call.tensors[name], tensor) for name, tensor in sample.call.tensors.items())


def test_the_sample_has_gemma_4s_global_layout_at_a_length_that_fails_on_cuda(sample: dump.Dump) -> None:
    call = sample.call
    assert call.query.shape == (1, 2, 33, 512)
    assert call.query.transpose(1, 2).is_contiguous()
    assert call.key.stride() == call.value.stride() == (0, 0, 512, 1)
    assert call.query.shape[-2] % 32 == 1
    assert call.query.dtype == torch.bfloat16
    assert not any(tensor.requires_grad for tensor in call.tensors.values())
    assert sample.context["inference"] is True
    assert mask.describe(call).headline == "causal mask with left padding 7"


def test_the_sample_is_healthy_on_a_cpu(sample: dump.Dump) -> None:
    assert sample.output is not None
    assert check(sample.call, sample.output).status == "agrees"
    with torch.inference_mode():
        assert check(sample.call, run(sample.call, Backend.DEFAULT)).status == "agrees"


def test_the_sample_would_show_a_last_row_that_attends_to_nothing(sample: dump.Dump) -> None:
    assert sample.output is not None
    wrong = sample.output.clone()
    wrong[:, :, -1] = 0  # mask row 0, fully masked
    found = check(sample.call, wrong)
    assert found.status == "diverges"
    assert found.rows == ((0, 0, 32), (0, 1, 32))
    assert found.ratio > 10


def test_the_sample_is_small_and_names_no_machine(sample: dump.Dump) -> None:
    assert make_sample.PATH.stat().st_size < 300_000
    told = json.dumps([sample.origin, sample.environment, sample.context])
    assert "made by" in told
    assert "/home" not in told
    assert "/root" not in told
    assert "/" not in json.dumps(sample.environment)
