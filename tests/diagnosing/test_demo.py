"""What the demo plants, where, and when it may call itself successful."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdpa_repro.diagnosing import demo
from sdpa_repro.diagnosing.demo import Plan, demo_found, demo_plan
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.replay import replay
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump


def test_without_a_gpu_the_fault_is_planted_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = demo_plan()
    assert (plan.device, [path.name for path in plan.preload]) == ("cpu", ["pytorch_191937.py"])
    assert "PLANTED" in plan.words
    assert "pytorch#191937" in plan.words


@pytest.mark.parametrize(("version", "device"), [("2.11.0+cu130", "cuda"), ("2.13.0", "cuda"), ("2.14.0", "cpu")])
def test_a_gpu_with_an_affected_torch_must_show_the_real_bug(
    version: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch, "__version__", version)
    plan = demo_plan()
    assert plan.device == device
    assert bool(plan.preload) == (device == "cpu")
    assert ("nothing is planted" in plan.words) == (device == "cuda")


def test_without_the_repository_the_demo_says_where_its_fault_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "FAULT", Path("nowhere.py"))
    with pytest.raises(InputError, match="clone it"):
        demo_plan()


@pytest.mark.slow
def test_the_demo_is_successful_for_exactly_its_own_fault(tmp_path: Path) -> None:
    preload = tuple(fault("pytorch_191937"))
    plan = Plan("cpu", preload, "")
    path = write_dump(make_call(rows=289, heads=2, padding=7), tmp_path / "call.pt")
    healthy = replay(path, dtypes=("captured",), runs=1)
    wrong = replay(path, dtypes=("captured",), runs=1, preload=preload)
    assert demo_found(wrong, plan)
    assert not demo_found(healthy, plan)
    assert not demo_found(None, plan)
    assert not demo_found(wrong, replace(plan, preload=()))
    other = tuple(fault("altered_191937"))
    assert not demo_found(replay(path, dtypes=("captured",), runs=1, preload=other), Plan("cpu", other, ""))
