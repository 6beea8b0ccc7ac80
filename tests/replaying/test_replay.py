"""The verdict on planted faults, on real ones, and on calls that must not be accused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.attention import AttentionCall, map_dense
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.environment import capture_context
from sdpa_repro.errors import InputError
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.replay import Replay, replay
from sdpa_repro.replaying.table import choose_device
from sdpa_repro.replaying.verdict import Status, Verdict
from sdpa_repro.replaying.worker import Worker
from tests.calls import make_call
from tests.replaying.dumps import fault, write_dump

pytestmark = pytest.mark.slow


Replayer = Callable[..., Replay]
OFTEN = ("", "pytorch_191937")


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """Workers that many tests share: importing torch takes most of a test's time."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Worker(fault(name) if name else ())) for name in OFTEN}


@pytest.fixture
def run(tmp_path: Path, workers: dict[str, Worker]) -> Replayer:
    """Dump and replay a call with a fault planted; in the captured dtype unless told otherwise."""

    def dump_and_replay(call: AttentionCall, planted: str = "", **options: Any) -> Replay:
        path = write_dump(call, tmp_path / "call.pt")
        options = {"dtypes": ("captured",), **options}
        if planted in workers:
            return replay(path, worker=workers[planted], **options)
        return replay(path, preload=fault(planted), **options)

    return dump_and_replay


def cell(result: Replay, backend: str, dtype: str | None = None) -> Cell:
    dtype = dtype or result.dtype
    return next(cell for cell in result.cells if (cell.backend, cell.dtype) == (backend, dtype))


FAILING = [(289, 512), (321, 136), (33, 136), (65, 64)]
CLEAN = [(288, 136), (290, 136), (33, 64)]


@pytest.mark.parametrize(("rows", "width"), FAILING)
def test_the_fault_of_pytorch_191937_is_found_in_the_last_row(run: Replayer, rows: int, width: int) -> None:
    result = run(make_call(rows=rows, width=width, padding=7), "pytorch_191937")
    assert (result.verdict, result.guilty, result.exit_status) == (Verdict.BACKEND_WRONG, ("FLASH_ATTENTION",), 1)
    found = cell(result, "FLASH_ATTENTION")
    assert found.bad is not None
    assert (found.bad.rows, found.bad.heads) == ((rows - 1,), (0, 1, 2, 3))
    assert found.bad == cell(result, "default").bad
    assert f"query row {rows - 1} of 4 heads" in result.sentence
    assert "pytorch#191937 (emulated by pytorch_191937.py), fixed in 2.14.0" in result.sentence


@pytest.mark.parametrize(("rows", "width"), CLEAN)
def test_at_neighbouring_lengths_the_same_fault_file_is_clean(run: Replayer, rows: int, width: int) -> None:
    result = run(make_call(rows=rows, width=width, padding=7), "pytorch_191937")
    assert (result.verdict, result.exit_status) == (Verdict.HEALTHY, 0)
    assert "pytorch_191937.py preloaded" in result.sentence


@pytest.mark.parametrize("change", ["dense", "no mask", "grad"])
def test_without_one_of_its_conditions_the_fault_is_clean(run: Replayer, change: str) -> None:
    call = make_call(rows=33, padding=3, mask=None if change == "no mask" else "causal")
    if change == "dense":
        call = map_dense(call, "key", "value")
    if change == "grad":
        call.query.requires_grad_(True)
    assert run(call, "pytorch_191937").verdict is Verdict.HEALTHY


def test_casts_keep_the_layout_so_the_fault_shows_in_every_dtype(run: Replayer) -> None:
    result = run(make_call(rows=33, padding=3), "pytorch_191937", dtypes=("captured", "bfloat16", "float16", "float32"))
    assert {found.dtype for found in result.cells} == {"bfloat16", "float16", "float32"}
    for dtype in ("bfloat16", "float16", "float32"):
        assert cell(result, "FLASH_ATTENTION", dtype).status is Status.DIVERGES
        assert cell(result, "MATH", dtype).status is Status.AGREES
        assert cell(result, "eager", dtype).status is Status.AGREES


def test_other_constants_are_found_alike_and_match_no_known_issue(run: Replayer) -> None:
    result = run(make_call(rows=53, padding=3), "altered_191937")
    assert result.guilty == ("FLASH_ATTENTION",)
    assert result.known == ()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("raises", Status.ERROR),
        ("nan_live", Status.NONFINITE),
        ("unstable", Status.UNSTABLE),
        ("segfault", Status.CRASHED),
        ("sigfpe", Status.CRASHED),
    ],
)
def test_every_kind_of_failure_is_pinned_on_the_kernel(run: Replayer, name: str, status: Status) -> None:
    result = run(make_call(rows=33), name)
    assert (result.verdict, result.guilty) == (Verdict.BACKEND_WRONG, ("FLASH_ATTENTION",))
    assert cell(result, "FLASH_ATTENTION").status is status
    assert cell(result, "default").status is status
    assert cell(result, "default").chosen == "FLASH_ATTENTION"
    assert cell(result, "MATH").status is Status.AGREES


def test_a_hang_costs_a_few_timeouts_and_is_pinned_on_the_kernel(run: Replayer) -> None:
    result = run(make_call(rows=33), "hang", timeout=6.0)
    assert (result.verdict, result.guilty) == (Verdict.BACKEND_WRONG, ("FLASH_ATTENTION",))
    assert cell(result, "FLASH_ATTENTION").status is Status.TIMEOUT
    assert result.sentence.startswith("FLASH_ATTENTION hangs: no result after 6 s")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_percent_in_one_row_of_one_head_is_found(run: Replayer, dtype: torch.dtype) -> None:
    result = run(make_call(rows=33, dtype=dtype), "one_head_1_percent")
    found = cell(result, "FLASH_ATTENTION")
    assert result.guilty == ("FLASH_ATTENTION",)
    assert found.bad is not None
    assert (len(found.bad.heads), len(found.bad.rows)) == (1, 1)


def test_a_wrong_math_is_named_and_flash_is_not(run: Replayer) -> None:
    result = run(make_call(rows=33), "math_wrong")
    assert (result.verdict, result.guilty) == (Verdict.BACKEND_WRONG, ("MATH",))
    assert cell(result, "FLASH_ATTENTION").status is Status.AGREES
    assert result.known == ()


@pytest.mark.parametrize("name", ["jitter", "noisy", "nan_fully_masked"])
def test_noise_and_fully_masked_rows_accuse_nobody(run: Replayer, name: str) -> None:
    result = run(make_call(rows=33, padding=3), name)
    assert result.verdict is Verdict.HEALTHY
    found = cell(result, "FLASH_ATTENTION")
    if name == "jitter":
        assert found.bit_stable is False
        assert "within noise" in found.remark
    if name == "nan_fully_masked":
        assert found.fully_masked == "NaN"


def test_eager_is_the_guilty_one_when_its_float16_scores_overflow(run: Replayer) -> None:
    large = torch.full((1, 2, 16, 64), 200.0, dtype=torch.float16)
    call = AttentionCall(large, large, torch.randn(1, 2, 16, 64).half(), scale=1.0)
    result = run(call)
    assert (result.verdict, result.guilty, result.exit_status) == (Verdict.EAGER_WRONG, ("eager",), 1)


def test_nan_in_masked_out_cache_slots_is_healthy(run: Replayer) -> None:
    call = make_call(rows=4, keys=64, width=64, layout="dense", mask=None)
    mask = torch.ones(1, 1, 4, 64, dtype=torch.bool)
    mask[..., 40:] = False
    value = call.value.clone()
    value[..., 40:, :] = float("nan")
    result = run(replace(call, attn_mask=mask, value=value))
    assert (result.verdict, result.exit_status) == (Verdict.HEALTHY, 0)
    assert "nothing to compare" in result.sentence


def test_a_value_longer_than_the_key_is_an_invalid_call(run: Replayer) -> None:
    query = torch.randn(1, 2, 8, 16)
    result = run(AttentionCall(query, query, torch.randn(1, 2, 12, 16)))
    assert (result.verdict, result.exit_status) == (Verdict.INVALID_CALL, 1)
    assert "MATH rejects it (RuntimeError: Expected size" in result.sentence
    assert cell(result, "FLASH_ATTENTION").status in (Status.NOT_COMPARABLE, Status.ERROR)


def test_a_mask_together_with_the_causal_flag_is_an_invalid_call(tmp_path: Path) -> None:
    query = torch.randn(1, 2, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool)
    context = capture_context(AttentionCall(query, query, query))
    save(snapshot(AttentionCall(query, query, query, mask, is_causal=True), context=context), tmp_path / "call.pt")
    result = replay(tmp_path / "call.pt", dtypes=("captured",))
    assert result.verdict is Verdict.INVALID_CALL
    assert "Explicit attn_mask should not be set when is_causal=True" in result.sentence


def test_a_cast_that_overflows_is_not_compared(run: Replayer) -> None:
    call = make_call(dtype=torch.float32)
    result = run(replace(call, value=call.value * 1e5), dtypes=("captured", "float16"))
    assert result.verdict is Verdict.HEALTHY
    assert {found.status for found in result.cells if found.dtype == "float16"} == {Status.NOT_COMPARABLE}
    assert cell(result, "MATH", "float16").reason.startswith("value overflows in float16")


def test_a_cast_that_changes_the_fully_masked_rows_is_not_compared(run: Replayer) -> None:
    call = make_call(dtype=torch.float32, mask="float", padding=3)
    assert call.attn_mask is not None
    softly = replace(call, attn_mask=call.attn_mask.clamp(min=-1e5))
    result = run(softly, dtypes=("captured", "float16"))
    assert cell(result, "MATH", "float16").reason.startswith("the cast changes which rows are fully masked")


def test_a_call_recorded_under_autocast_is_judged_in_its_dtype(tmp_path: Path) -> None:
    call = make_call(rows=33, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        path = write_dump(call, tmp_path / "call.pt")
    result = replay(path, dtypes=("captured",))
    assert result.verdict is Verdict.HEALTHY
    assert result.fidelity.bit_equal is True
    assert any("autocast to bfloat16" in note for note in result.notes)
    threshold = cell(result, "FLASH_ATTENTION").threshold
    assert threshold is not None
    assert threshold > 1e-3


def test_dropout_is_left_out_and_said_so(run: Replayer) -> None:
    result = run(replace(make_call(), dropout_p=0.5))
    assert result.verdict is Verdict.HEALTHY
    assert any("dropout" in note for note in result.notes)


def test_a_fresh_dump_replays_bit_for_bit(run: Replayer) -> None:
    result = run(make_call(rows=33, padding=3))
    assert (result.fidelity.bit_equal, result.fidelity.layout_equal) == (True, True)


def test_wrong_live_and_clean_here_is_exit_status_3(tmp_path: Path) -> None:
    live = {"ran": "FLASH_ATTENTION", "max_abs": 1.0, "ratio": 30.0, "rows": [[0, 0, 32]]}
    result = replay(write_dump(make_call(), tmp_path / "call.pt", live=live), dtypes=("captured",))
    assert (result.verdict, result.exit_status) == (Verdict.UNREPRODUCIBLE, 3)


def test_the_document_has_the_promised_keys_and_is_json(run: Replayer) -> None:
    document = run(make_call(rows=33, padding=3), "pytorch_191937").document()
    assert {"verdict", "ran", "guilty", "sentence", "known", "fidelity", "cells", "preloaded", "environment"} <= set(
        document
    )
    keys = "backend dtype status reason max_abs threshold ratio bad fully_masked runs bit_stable seconds"
    assert all(set(keys.split()) <= set(found) for found in document["cells"])
    wrong = next(found for found in document["cells"] if found["status"] == "diverges")
    assert {"batches": [0], "heads": [0, 1, 2, 3], "rows": [32]}.items() <= wrong["bad"].items()
    assert document["known"][0]["issue"] == "pytorch#191937"
    assert document["preloaded"][0]["name"] == "pytorch_191937.py"
    assert json.loads(json.dumps(document)) == document


def test_only_the_wanted_backends_are_listed_and_judged(run: Replayer) -> None:
    result = run(make_call(rows=33), "math_wrong", backends=["FLASH_ATTENTION"])
    assert [found.backend for found in result.cells] == ["FLASH_ATTENTION"]
    assert result.verdict is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("planted", "measured", "verdict"),
    [
        ((), "", Verdict.HEALTHY),
        (("one_head_1_percent",), "noise measured on blocks of rows", Verdict.BACKEND_WRONG),
    ],
)
def test_a_path_that_does_not_fit_says_how_much_and_measures_noise_where_it_may_decide(
    tmp_path: Path, planted: tuple[str, ...], measured: str, verdict: Verdict
) -> None:
    small = tmp_path / "small.py"
    small.write_text("import sdpa_repro.replaying.jobs as jobs\njobs.free_memory = lambda device: 12 << 20\n")
    call = make_call(rows=512, width=64, dtype=torch.float32)
    preload = [small, *(file for name in planted for file in fault(name))]
    result = replay(write_dump(call, tmp_path / "call.pt"), dtypes=("captured",), preload=preload)
    for name in ("MATH", "eager"):
        found = cell(result, name)
        assert found.status is Status.DECLINED
        assert found.reason == f"needs {found.reason.split()[1]} MiB, more than half of the 12 MiB that are free" or (
            found.reason.endswith("12 MiB are free")
        )
        assert found.remark == measured
    assert result.verdict is verdict


def test_a_crash_that_does_not_repeat_is_unstable(tmp_path: Path) -> None:
    flag = tmp_path / "crashed"
    once = tmp_path / "once.py"
    once.write_text(
        f"""
import os, pathlib, torch
flag = pathlib.Path({str(flag)!r})
real = torch.nn.functional.scaled_dot_product_attention
def once(*arguments, **words):
    if not flag.exists() and torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled():
        flag.touch()
        os.abort()
    return real(*arguments, **words)
torch.nn.functional.scaled_dot_product_attention = once
"""
    )
    result = replay(write_dump(make_call(), tmp_path / "call.pt"), dtypes=("captured",), preload=[once])
    found = cell(result, "FLASH_ATTENTION")
    assert found.status is Status.UNSTABLE
    assert found.reason.startswith("crashed once (SIGABRT")


def test_ctrl_c_kills_the_worker_and_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dump(make_call(), tmp_path / "call.pt")
    started: list[Worker] = []
    start = Worker.start

    def remembered(self: Worker) -> None:
        started.append(self)
        start(self)

    def stop(text: str) -> None:
        if text.startswith("float32"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "start", remembered)
    with pytest.raises(KeyboardInterrupt) as stopped:
        replay(path, dtypes=("captured", "float32"), progress=stop)
    assert stopped.value.partial.verdict is Verdict.HEALTHY  # type: ignore[attr-defined]
    assert all(worker._process is None for worker in started)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda:0"}, "sees no cuda device"),
        ({"device": "abacus"}, "unknown device"),
        ({"dtypes": ("int8",)}, "unknown dtype"),
        ({"preload": ["nowhere.py"]}, "--preload"),
    ],
)
def test_bad_options_are_bad_input(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = write_dump(make_call(rows=9, width=16), tmp_path / "call.pt")
    if options.get("device") == "cuda:0" and torch.cuda.is_available():
        options = {"device": "hpu"}
        said = "device"
    with pytest.raises(InputError, match=said):
        replay(path, **options)


def test_without_a_gpu_the_replay_runs_on_the_cpu(tmp_path: Path) -> None:
    dump = load(write_dump(make_call(rows=9, width=16), tmp_path / "call.pt"))
    wrong = replace(dump, live={"ratio": 9.0})
    assert choose_device(wrong, None).type == "cpu"
    assert choose_device(dump, "cpu").type == "cpu"
    nowhere = replace(wrong, context={**wrong.context, "device": "meta"})
    assert choose_device(nowhere, None).type in ("cpu", "cuda")


def ones(*shape: int, keys: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> AttentionCall:
    key = torch.ones(shape if keys is None else keys, dtype=dtype)
    return AttentionCall(torch.ones(shape, dtype=dtype), key, key)


INVALID = {
    "no dimensions": ones(),
    "one dimension": ones(8),
    "batches that do not broadcast": ones(2, 2, 4, 8, keys=(3, 2, 4, 8)),
    "a mask of whole numbers": replace(ones(1, 2, 4, 8), attn_mask=torch.ones(4, 4, dtype=torch.int64)),
    "whole numbers": ones(1, 2, 4, 8, dtype=torch.int64),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_dump_of_arguments_that_pytorch_rejects_is_an_invalid_call(run: Replayer, name: str) -> None:
    result = run(INVALID[name])
    assert result.verdict is Verdict.INVALID_CALL
    assert result.sentence.startswith("not a valid call: MATH rejects it (")


def test_a_call_without_a_reference_says_that_nothing_was_compared(run: Replayer) -> None:
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 2, 4, 8)
    result = run(AttentionCall(query, key, key))
    assert result.sentence == "nothing to compare: no reference: query has 1 heads, key has 2"


def test_nan_in_a_mask_and_infinity_in_a_key_accuse_nobody(run: Replayer) -> None:
    call = make_call(mask=None, dtype=torch.float32, rows=9, width=16, layout="dense")
    mask = torch.zeros(9, 9)
    mask[3, 5] = float("nan")
    assert run(replace(call, attn_mask=mask)).verdict is Verdict.HEALTHY
    key = call.key.clone()
    key[0, 0, 5, 0] = float("inf")
    assert run(replace(call, key=key)).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_float8_call_accuses_nobody_and_its_values_are_judged_in_other_dtypes(
    run: Replayer, dtype: torch.dtype
) -> None:
    call = make_call(rows=33, width=16, layout="dense")
    narrow = {name: tensor.to(dtype) for name, tensor in call.tensors.items() if name != "attn_mask"}
    result = run(call.with_tensors(narrow), dtypes=("captured", "bfloat16", "float32"))
    assert (result.verdict, result.guilty, result.exit_status) == (Verdict.HEALTHY, (), 0)
    assert result.sentence.startswith("nothing could be judged: no backend on this cpu takes float8_e")
    assert {one.status for one in result.cells if one.dtype == result.dtype} == {Status.DECLINED}
    for other in ("bfloat16", "float32"):
        assert cell(result, "FLASH_ATTENTION", other).status is Status.AGREES
        assert cell(result, "MATH", other).status is Status.AGREES


def test_a_key_in_another_dtype_is_an_invalid_call_in_float8_too(run: Replayer) -> None:
    call = make_call(rows=33, width=16, layout="dense")
    mixed = replace(call, key=call.key.to(torch.float8_e4m3fn), value=call.value.to(torch.float8_e4m3fn))
    result = run(mixed, dtypes=("captured", "float32"))
    assert result.verdict is Verdict.INVALID_CALL
    assert cell(result, "MATH", "float32").status is Status.AGREES
