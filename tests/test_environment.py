"""What surrounds a call: read it, set it again, put it back; and never more than that."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import torch

from sdpa_repro.environment import (
    capture_context,
    free_memory,
    memory_layout,
    preload,
    preload_records,
    restored,
    software,
)
from sdpa_repro.errors import InputError
from tests.calls import make_call


@pytest.fixture
def context() -> dict[str, object]:
    return capture_context(make_call())


def test_a_context_is_plain_json(context: dict[str, object]) -> None:
    assert json.loads(json.dumps(context)) == context


def test_a_context_says_which_inputs_require_grad() -> None:
    call = make_call(dtype=torch.float32)
    call.key.requires_grad_(True)
    assert capture_context(call)["requires_grad"] == {"query": False, "key": True, "value": False, "attn_mask": False}


def test_a_context_sees_grad_and_inference_mode() -> None:
    with torch.inference_mode():
        found = capture_context(make_call())
    assert (found["grad"], found["inference"]) == (False, True)


def test_a_context_sees_autocast_and_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        found = capture_context(make_call())
    assert found["autocast"]["enabled"] is True
    assert found["autocast"]["dtype"] == "float16"


def test_restored_sets_what_was_recorded_and_puts_it_back(context: dict[str, object]) -> None:
    threads = torch.get_num_threads()
    wanted = {
        **context,
        "threads": threads + 1,
        "matmul_precision": "medium",
        "deterministic": True,
        "grad": False,
        "flush_denormal": True,
        "backends": {"FLASH_ATTENTION": False},
    }
    with restored(wanted) as skipped:
        assert skipped == []
        assert torch.get_num_threads() == threads + 1
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_grad_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert sys.float_info.min * float("0.5") == 0.0
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert sys.float_info.min * float("0.5") > 0.0


def test_restored_puts_everything_back_after_an_exception(context: dict[str, object]) -> None:
    with pytest.raises(ZeroDivisionError), restored({**context, "matmul_precision": "high"}):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"


def test_restored_lists_what_it_cannot_set() -> None:
    strange = {
        "threads": 10**9,
        "matmul_precision": "exact",
        "backends": {"PAGED_ATTENTION": True, "MATH": "yes"},
        "flash_impl": "FA99",
        "autocast": {"enabled": True, "dtype": "float8", "cache": True},
        "unknown": [1, 2, 3],
    }
    with restored(strange) as skipped:
        assert set(skipped) >= {"threads", "matmul_precision", "backend PAGED_ATTENTION", "backend MATH", "flash_impl"}


def test_a_device_that_is_none_does_not_keep_autocast_from_being_restored() -> None:
    strange = {"device": "no such device", "autocast": {"enabled": True, "dtype": "bfloat16", "cache": True}}
    with restored(strange, device_type="cpu"):
        assert torch.is_autocast_enabled("cpu")
    with restored(strange) as skipped:
        assert skipped == ["autocast"]


def test_precision_set_by_its_new_names_is_restored() -> None:
    if not hasattr(torch.backends.mkldnn, "matmul"):
        return  # torch before 2.9 has the old names only
    before = torch.get_float32_matmul_precision()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        found = capture_context(make_call())
    finally:
        torch.set_float32_matmul_precision(before)
    assert found["matmul_precision"] is None
    with restored(found) as skipped:
        assert skipped == []
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def test_restored_takes_an_empty_context() -> None:
    with restored({}) as skipped:
        assert skipped == []


def test_autocast_recorded_on_a_gpu_is_restored_on_the_replays_device() -> None:
    recorded = {"device": "cuda:0", "autocast": {"enabled": True, "dtype": "bfloat16", "cache": True}}
    with restored(recorded, device_type="cpu"):
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_the_layout_tells_an_expanded_key_and_its_distance_to_value() -> None:
    packed = torch.zeros(1, 5, 64, dtype=torch.float32)
    key = packed[..., :32].view(1, 1, 5, 32)
    call = make_call(rows=5, width=32, heads=2, dtype=torch.float32, mask=None)
    call = call.with_tensors({"key": key.expand(1, 2, 5, 32), "value": packed[..., 32:].view(1, 1, 5, 32)})
    found = memory_layout(call)
    assert found["key"]["stride"][1] == 0
    assert found["key"]["near"]["value"] == 32 * 4
    assert found["value"]["near"]["key"] == -32 * 4
    assert found["key"]["align"] == call.key.data_ptr() % 256


def test_software_names_versions_and_neither_host_nor_home() -> None:
    found = software("cpu")
    text = json.dumps(found)
    assert found["torch"] == torch.__version__
    assert str(Path.home()) + "/" not in text or str(Path.home()) == "/"
    assert not platform.node() or platform.node() not in text


def test_free_memory_is_some_of_the_machines() -> None:
    total = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < free_memory("cpu") <= total


def test_preload_runs_files_in_order_and_names_them_without_folder(tmp_path: Path) -> None:
    seen = tmp_path / "seen.txt"
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text(f"open({str(seen)!r}, 'a').write({name!r})")
    records = preload([tmp_path / "b.py", tmp_path / "a.py"])
    assert seen.read_text() == "b.pya.py"
    assert [record["name"] for record in records] == ["b.py", "a.py"]
    assert all(len(record["sha256"]) == 64 for record in records)


def test_preload_records_run_nothing(tmp_path: Path) -> None:
    (tmp_path / "bomb.py").write_text("raise SystemExit")
    assert preload_records([tmp_path / "bomb.py"])[0]["name"] == "bomb.py"


@pytest.mark.parametrize(
    "text", ["1/0", "raise SystemExit(3)", "def", "import os; os._exit(3)", "raise KeyboardInterrupt"]
)
def test_a_preload_that_fails_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(InputError, match=r"--preload broken\.py failed with"):
        preload([tmp_path / "broken.py"])


def test_a_missing_preload_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        preload([tmp_path / "nowhere.py"])


def test_reading_a_context_creates_no_tensor() -> None:
    call = make_call()
    with torch.device("meta"), torch.utils._python_dispatch._disable_current_modes():
        assert capture_context(call)["threads"] == torch.get_num_threads()
