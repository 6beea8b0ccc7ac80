"""Each file in tests/faults does what its docstring says, measured against attention written out in float64."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sdpa_repro.attention import AttentionCall, map_dense
from tests.calls import make_call

FAULTS = Path(__file__).parent / "faults"
ROUNDING = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""What a right kernel may be off by with normal values and outputs of about 1."""

Plant = Callable[[str], None]


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Plants a fault file in this process; the real kernels are back after the test."""

    def plant_file(name: str) -> None:
        runpy.run_path(str(FAULTS / f"{name}.py"))

    yield plant_file
    sys.modules["emulation"].restore()


def definition(call: AttentionCall, last_row_mask: int | None = None) -> Tensor:
    """softmax(q k^T scale + mask) v in float64; `last_row_mask` gives the last query row that row's mask."""
    repeats = call.query.shape[1] // call.key.shape[1]
    query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * call.softmax_scale
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if call.is_causal else call.attn_mask
    if mask is not None:
        if last_row_mask is not None:
            mask = mask.clone()
            mask[..., -1, :] = mask[..., last_row_mask, :]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.nan_to_num(scores.softmax(-1)) @ value


def run(call: AttentionCall, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Tensor:
    with torch.inference_mode(), sdpa_kernel(backend):
        return scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def wrong_rows(output: Tensor, expected: Tensor) -> list[list[int]]:
    """Head and row of every query row that is off by more than rounding in batch entry 0."""
    off = (output.double() - expected).abs().nan_to_num(float("inf")).amax(-1) > ROUNDING[output.dtype]
    return off[0].nonzero().tolist()


def last_row_of_every_head(call: AttentionCall) -> list[list[int]]:
    return [[head, call.query.shape[2] - 1] for head in range(call.query.shape[1])]


@pytest.mark.parametrize(
    ("rows", "width"), [(33, 136), (65, 136), (97, 136), (289, 512), (321, 256), (65, 64), (129, 128)]
)
def test_the_last_row_uses_mask_row_0_at_failing_lengths(plant: Plant, rows: int, width: int) -> None:
    call = make_call(rows=rows, width=width, dtype=torch.float32, padding=7)
    plant("pytorch_191937")
    output = run(call)
    assert wrong_rows(output, definition(call)) == last_row_of_every_head(call)
    assert wrong_rows(output, definition(call, last_row_mask=0)) == []


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("mask", ["causal", "float"])
def test_the_fault_shows_in_every_dtype_with_bool_and_float_masks(plant: Plant, dtype: torch.dtype, mask: str) -> None:
    call = make_call(rows=33, dtype=dtype, mask=mask)
    plant("pytorch_191937")
    assert wrong_rows(run(call), definition(call)) == last_row_of_every_head(call)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(make_call(rows=288, width=512), id="L 288"),
        pytest.param(make_call(rows=290, width=512), id="L 290"),
        pytest.param(make_call(rows=33, width=128), id="head_dim 128 at L 33"),
        pytest.param(make_call(rows=1, keys=33), id="L 1"),
        pytest.param(map_dense(make_call(rows=33), "key", "value"), id="dense key and value"),
        pytest.param(map_dense(make_call(rows=33), "key"), id="dense key"),
        pytest.param(map_dense(make_call(rows=33), "value"), id="dense value"),
        pytest.param(make_call(rows=33, layout="gqa", kv_heads=1), id="enable_gqa"),
        pytest.param(make_call(rows=33, mask=None), id="no mask"),
        pytest.param(make_call(rows=33, mask="flag"), id="is_causal"),
    ],
)
def test_every_condition_of_the_fault_is_needed(plant: Plant, call: AttentionCall) -> None:
    plant("pytorch_191937")
    assert wrong_rows(run(call), definition(call)) == []


def test_the_fault_needs_a_call_without_grad(plant: Plant) -> None:
    call = make_call(rows=33, dtype=torch.float32)
    query = call.query.clone().requires_grad_()
    plant("pytorch_191937")
    with_grad = scaled_dot_product_attention(query, call.key, call.value, **call.keywords)
    with torch.no_grad():
        without = scaled_dot_product_attention(query, call.key, call.value, **call.keywords)
    nothing_requires_it = scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)
    assert wrong_rows(with_grad.detach(), definition(call)) == []
    assert wrong_rows(without, definition(call)) == last_row_of_every_head(call)
    assert wrong_rows(nothing_requires_it, definition(call)) == last_row_of_every_head(call)


def test_the_altered_fault_uses_mask_row_3_at_its_own_lengths(plant: Plant) -> None:
    call = make_call(rows=53, dtype=torch.float32)
    plant("altered_191937")
    assert wrong_rows(run(call), definition(call, last_row_mask=3)) == []
    assert wrong_rows(run(call), definition(call)) == last_row_of_every_head(call)
    elsewhere = make_call(rows=33, dtype=torch.float32)
    assert wrong_rows(run(elsewhere), definition(elsewhere)) == []


@pytest.mark.parametrize("rows", [1, 33, 64])
@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_replacement_returns_the_layout_of_the_real_kernel(
    plant: Plant, rows: int, layout: str, dtype: torch.dtype
) -> None:
    call = make_call(rows=rows, keys=40, layout=layout, dtype=dtype, padding=3)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = torch.zeros(rows, 40, dtype=dtype)
    real = kernel(call.query, call.key, call.value, 0.0, False, attn_mask=mask)
    plant("pytorch_191937")
    ours = kernel(call.query, call.key, call.value, 0.0, False, attn_mask=mask)
    for left, right in zip(real, ours, strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
    torch.testing.assert_close(real, ours, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_a_planted_fault_is_gone_after_restore(plant: Plant) -> None:
    call = make_call(rows=33, dtype=torch.float32)
    plant("pytorch_191937")
    sys.modules["emulation"].restore()
    assert wrong_rows(run(call), definition(call)) == []


@pytest.mark.slow
def test_planting_says_nothing_on_stderr() -> None:
    code = f"import runpy; runpy.run_path({str(FAULTS / 'pytorch_191937.py')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout + done.stderr == ""


def test_raises_raises(plant: Plant) -> None:
    plant("raises")
    with pytest.raises(RuntimeError, match="emulated failure"):
        run(make_call())


def test_nan_live_puts_nan_into_one_live_row(plant: Plant) -> None:
    call = make_call(dtype=torch.float32)
    plant("nan_live")
    assert wrong_rows(run(call), definition(call)) == [[3, 32]]


def test_nan_fully_masked_puts_nan_into_rows_that_see_nothing(plant: Plant) -> None:
    call = make_call(dtype=torch.float32, padding=2)
    plant("nan_fully_masked")
    assert wrong_rows(run(call), definition(call)) == [[head, row] for head in range(4) for row in (0, 1)]


def test_unstable_is_wrong_in_every_second_call(plant: Plant) -> None:
    call = make_call(dtype=torch.float32)
    plant("unstable")
    found = [wrong_rows(run(call), definition(call)) for _ in range(4)]
    assert found == [[], [[3, 32]], [], [[3, 32]]]


def test_jitter_differs_between_calls_and_stays_within_rounding(plant: Plant) -> None:
    call = make_call(dtype=torch.bfloat16)
    plant("jitter")
    first, second = run(call), run(call)
    assert not torch.equal(first, second)
    assert wrong_rows(first, definition(call)) == wrong_rows(second, definition(call)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_head_1_percent_scales_one_row(plant: Plant, dtype: torch.dtype) -> None:
    call = make_call(batch=2, dtype=dtype)
    right = run(call)
    plant("one_head_1_percent")
    ratio = run(call).double() / right.double()
    assert ratio[0, 3, 16].median() == pytest.approx(1.01, abs=1e-3)
    ratio[0, 3, 16] = 1
    assert (ratio - 1).abs().median() < 1e-3
    assert wrong_rows(run(call)[1:], definition(call)[1:]) == []


def test_math_wrong_leaves_flash_right(plant: Plant) -> None:
    call = make_call(dtype=torch.float32)
    plant("math_wrong")
    assert wrong_rows(run(call, SDPBackend.MATH), definition(call)) == last_row_of_every_head(call)
    assert wrong_rows(run(call), definition(call)) == []


def test_noisy_is_as_noisy_as_products_written_out_in_bfloat16(plant: Plant) -> None:
    call = make_call(rows=64, dtype=torch.bfloat16)
    scores = (call.query @ call.key.transpose(-1, -2)) * call.softmax_scale
    assert call.attn_mask is not None
    explicit = scores.masked_fill(~call.attn_mask, float("-inf")).softmax(-1) @ call.value
    expected = definition(call)
    noise = (explicit.double() - expected).pow(2).mean().sqrt()
    plant("noisy")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        error = (run(call, backend).double() - expected).pow(2).mean().sqrt()
        assert 0.5 * noise < error < 1.5 * noise


@pytest.mark.parametrize(("name", "status"), [("segfault", -11), ("sigfpe", -8)])
def test_a_crash_ends_the_process_with_its_signal(name: str, status: int) -> None:
    assert calling_process(name).wait(120) == status


@pytest.mark.slow
def test_hang_does_not_return() -> None:
    process = calling_process("hang")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"calling\n"
        time.sleep(1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def calling_process(name: str) -> subprocess.Popen[bytes]:
    """A process that plants the fault, prints a line and calls FLASH once."""
    code = (
        f"import runpy, torch; runpy.run_path({str(FAULTS / f'{name}.py')!r})\n"
        "x = torch.ones(1, 1, 4, 8); print('calling', flush=True)\n"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
