"""What a session keeps: records, phases, selection, limits, the index, and an error when nothing was seen."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdpa_repro import dump
from sdpa_repro.attention import AttentionCall
from sdpa_repro.capturing import Session, capture, elsewhere
from sdpa_repro.capturing import session as session_module
from sdpa_repro.errors import InputError
from tests.calls import make_call

Plant = Callable[[str], None]


def run(call: AttentionCall) -> Tensor:
    with torch.no_grad():
        return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.keywords)


def failing(seed: int = 0, batch: int = 1) -> AttentionCall:
    """A call that the emulation of pytorch#191937 gets wrong in its last row."""
    return make_call(batch=batch, rows=33, width=136, seed=seed)


def healthy(rows: int = 32) -> AttentionCall:
    return make_call(rows=rows, width=136)


def index(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def index_is_sound(folder: Path) -> bool:
    """Every line's file can be read, and every dump has a line."""
    files = [line["file"] for line in index(folder)]
    for file in files:
        dump.load(folder / file)
    return sorted(files) == sorted(path.name for path in folder.glob("*.pt"))


def test_the_worst_healthy_call_is_kept_when_none_is_wrong(tmp_path: Path) -> None:
    with capture(tmp_path) as session:
        for rows in (5, 33, 17):
            run(healthy(rows))
    worst = max(session.calls, key=lambda call: call.ratio)
    assert [call.index for call in session.calls if call.kept] == [worst.index]
    assert session.dumps == [tmp_path / str(worst.kept)]
    (line,) = index(tmp_path)
    assert line["healthy"] is True
    assert line["call_index"] == worst.index


def test_wrong_calls_are_kept_and_healthy_ones_are_not(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path) as session:
        run(healthy())
        run(failing())
        run(healthy())
    assert [call.status for call in session.calls] == ["agrees", "diverges", "agrees"]
    assert [call.kept is not None for call in session.calls] == [False, True, False]
    wrong = session.calls[1]
    assert wrong.wrong_rows == 4
    assert wrong.rows == ((0, 0, 32), (0, 1, 32), (0, 2, 32), (0, 3, 32))
    assert wrong.ratio > 10
    assert index_is_sound(tmp_path)


def test_a_wrong_call_is_on_disk_before_the_next_one(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path) as session:
        run(failing())
        assert index_is_sound(tmp_path)
        assert len(index(tmp_path)) == 1
        assert session.dumps == [tmp_path / index(tmp_path)[0]["file"]]


def test_what_was_kept_survives_an_exception_in_the_block(tmp_path: Path) -> None:
    def interrupted() -> None:
        run(healthy())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(tmp_path):
        interrupted()
    assert index_is_sound(tmp_path)
    assert len(index(tmp_path)) == 1


def test_a_dump_holds_the_call_its_output_and_where_it_came_from(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    call = failing()
    with capture(tmp_path, origin={"model": "a model", "command": "a test"}) as session:
        session.note(total_length=33, padding={"tokens": 4, "side": "left"})
        output = run(call)
    found = dump.load(session.dumps[0])
    assert dump.layout_differences(found.call, call) == []
    assert found.output is not None
    assert torch.equal(found.output, output)
    assert torch.equal(found.call.query, call.query)
    assert found.origin["model"] == "a model"
    assert found.origin["total_length"] == 33
    assert found.origin["padding"] == {"tokens": 4, "side": "left"}
    assert found.origin["call_index"] == 0
    assert found.origin["phase"] == "prefill"
    assert found.live is not None
    assert found.live["ran"] == "FLASH_ATTENTION"
    assert found.live["ratio"] == session.calls[0].ratio
    assert found.live["rows"] == [[0, head, 32] for head in range(4)]
    assert found.context["grad"] is False
    assert found.environment["torch"] == torch.__version__
    assert not any("/" in str(fact) for fact in found.environment.values())  # a path may name a project


def test_requires_grad_is_recorded_of_the_live_tensors(tmp_path: Path) -> None:
    call = make_call(mask=None, dtype=torch.float32)
    query = call.query.requires_grad_()
    with capture(tmp_path) as session:
        F.scaled_dot_product_attention(query, call.key, call.value)
    context = dump.load(session.dumps[0]).context
    assert context["grad"] is True
    assert context["requires_grad"] == {"query": True, "key": False, "value": False}


def test_preloaded_files_are_in_every_dump(tmp_path: Path) -> None:
    with capture(tmp_path, preloaded=[{"name": "fault.py", "sha256": "0" * 64}]) as session:
        run(healthy())
    assert dump.load(session.dumps[0]).preloaded == [{"name": "fault.py", "sha256": "0" * 64}]


class Layer(nn.Module):
    def forward(self, call: AttentionCall) -> Tensor:
        return run(call)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": Layer()}) for _ in range(3))

    def forward(self, call: AttentionCall) -> None:
        for layer in self.layers:
            layer["self_attn"](call)  # type: ignore[index]


def test_names_tell_layer_module_call_and_lengths(tmp_path: Path) -> None:
    with capture(tmp_path, keep="all") as session:
        Decoder()(make_call(rows=5, keys=9, mask=None))
    assert [path.name for path in session.dumps] == [f"L0{n}-self_attn-call{n}-5x9.pt" for n in range(3)]
    assert [call.module for call in session.calls] == [f"layers.{n}.self_attn" for n in range(3)]


def test_a_name_that_is_taken_is_not_overwritten(tmp_path: Path) -> None:
    for _ in range(3):
        with capture(tmp_path):
            run(healthy())
    names = [line["file"] for line in index(tmp_path)]
    assert names == ["test_session-call0-32x32.pt", "test_session-call0-32x32-2.pt", "test_session-call0-32x32-3.pt"]
    assert index_is_sound(tmp_path)


@pytest.mark.parametrize(
    ("rows", "keys", "phase"),
    [(5, 5, "prefill"), (5, 9, "prefill"), (1, 9, "decode"), (1, 1, "unknown"), (9, 5, "unknown")],
)
def test_phases_follow_from_the_lengths(tmp_path: Path, rows: int, keys: int, phase: str) -> None:
    with capture(tmp_path) as session:
        run(make_call(rows=rows, keys=keys, mask=None))
    assert session.calls[0].phase == phase


def test_a_phase_can_be_selected_and_unknown_ones_stay(tmp_path: Path) -> None:
    with capture(tmp_path, phase="decode") as session:
        for rows, keys in ((5, 5), (1, 5), (1, 1)):
            run(make_call(rows=rows, keys=keys, mask=None))
    assert [call.index for call in session.calls] == [1, 2]


@pytest.mark.parametrize("pattern", ["layers.1.", "*.1.self_attn", "layers.1.self_attn"])
def test_a_module_can_be_selected(tmp_path: Path, pattern: str) -> None:
    with capture(tmp_path, module=pattern) as session:
        Decoder()(healthy())
    assert [call.index for call in session.calls] == [1]


def test_a_single_call_can_be_selected_and_is_dumped_whatever_comes_of_it(tmp_path: Path) -> None:
    with capture(tmp_path, call=1) as session:
        Decoder()(healthy())
    assert [(call.index, call.kept) for call in session.calls] == [(1, "L01-self_attn-call1-32x32.pt")]
    assert len(index(tmp_path)) == 1


def test_the_inputs_of_a_selected_call_are_on_disk_before_it_runs(tmp_path: Path, plant: Plant) -> None:
    before: list[dict[str, Any]] = []
    original = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        before.extend(index(tmp_path))
        return original(*args, **kwargs)

    F.scaled_dot_product_attention = spy
    try:
        with capture(tmp_path, call=0) as session:
            run(healthy())
    finally:
        F.scaled_dot_product_attention = original
    assert [line["status"] for line in before] == ["unchecked"]
    assert [line["status"] for line in index(tmp_path)] == ["agrees"]
    assert dump.load(session.dumps[0]).output is not None
    assert index_is_sound(tmp_path)


def test_all_calls_can_be_kept(tmp_path: Path) -> None:
    with capture(tmp_path, keep="all") as session:
        for _ in range(10):
            run(healthy())
    assert len(session.dumps) == 10
    assert all(call.kept for call in session.calls)


def test_healthy_calls_are_written_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, gate, written = dump.save, threading.Event(), []

    def slow(document: Any, path: Path, **_: Any) -> int:
        gate.wait(60)
        written.append(path.name)
        return save(document, path)

    monkeypatch.setattr(dump, "save", slow)
    with capture(tmp_path, keep="all") as session:
        run(healthy())
        assert written == []
        gate.set()
        run(healthy())
        assert len(written) >= 1, "one dump is in memory at a time"
        assert len(session.dumps) == 2
    assert all(call.kept for call in session.calls)
    assert index_is_sound(tmp_path)


def test_a_wrong_call_is_on_the_disk_before_the_run_goes_on(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path, keep="all"):
        run(healthy())
        run(failing())
        assert [line["status"] for line in index(tmp_path)] == ["agrees", "diverges"]
        assert index_is_sound(tmp_path)


def test_a_wrong_call_outlasts_a_power_cut_and_a_healthy_one_costs_no_wait_for_the_disk(
    tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with capture(tmp_path / "healthy"):
        run(healthy())
    assert synced == []
    plant("pytorch_191937")
    with capture(tmp_path / "wrong"):
        run(failing())
    assert len(synced) == 2, "the file, and the folder that names it"


def test_a_dump_that_could_not_be_written_beside_the_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(document: Any, path: Path, **_: Any) -> int:
        raise InputError(f"cannot write {path}: no space left on device")

    monkeypatch.setattr(dump, "save", full)
    with capture(tmp_path, keep="all") as session:
        run(healthy())
        run(healthy())
    assert [call.kept for call in session.calls] == [None, None]
    assert session.dumps == []
    assert len(session.summary()["problems"]) == 2
    assert "no space left" in session.summary()["problems"][0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no os.fork")
def test_a_forked_child_does_not_wait_for_its_parents_dumps(tmp_path: Path) -> None:
    script = """
import os, sys, threading
import torch, torch.nn.functional as F
from sdpa_repro import capture, dump
save, gate = dump.save, threading.Event()
dump.save = lambda document, path, **_: gate.wait(60) and save(document, path)
x = torch.randn(1, 1, 8, 8)
with capture(sys.argv[1], keep="all") as session, torch.no_grad():
    F.scaled_dot_product_attention(x, x, x)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        gate.set()
print("end" if child == 0 else f"{len(session.dumps)} {status}", flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split("\n") == ["end", "1 0", ""]
    assert index_is_sound(tmp_path)


def test_only_the_worst_can_be_kept_wrong_or_not(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path, keep="worst") as session:
        run(healthy())
        for seed in range(4):
            run(failing(seed))
    worst = max(session.calls, key=lambda call: call.ratio)
    assert [call.index for call in session.calls if call.kept] == [worst.index]
    assert index_is_sound(tmp_path)


def test_a_worse_call_replaces_the_least_bad_dump(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path, max_dumps=2) as session:
        for seed in range(6):
            run(failing(seed))
    ratios = sorted((call.ratio for call in session.calls), reverse=True)
    kept = [call for call in session.calls if call.kept]
    assert sorted((call.ratio for call in kept), reverse=True) == ratios[:2]
    assert sorted(line["live_ratio"] for line in index(tmp_path)) == sorted(ratios[:2])
    assert session.dumps[0].name == max(session.calls, key=lambda call: call.ratio).kept
    assert index_is_sound(tmp_path)


def test_records_of_replaced_dumps_say_that_they_are_not_kept(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path, max_dumps=1) as session:
        for seed in range(6):
            run(failing(seed))
    assert len([call for call in session.calls if call.kept]) == 1


def test_the_run_stops_at_the_first_wrong_call_when_asked_to(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    reached = []
    with capture(tmp_path, stop_at_first=True) as session:
        run(healthy())
        run(failing())
        reached.append("after")
    assert reached == []
    assert [call.status for call in session.calls] == ["agrees", "diverges"]
    assert len(session.dumps) == 1


def test_a_dump_too_big_keeps_the_guilty_batch_rows(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    call = failing(batch=8)
    mask = call.attn_mask
    assert mask is not None
    rows = torch.ones(8, 1, 33, 33, dtype=torch.bool)
    rows[:] = mask[0]
    rows[:5, :, 0] = rows[:5, :, -1]
    call = dataclasses.replace(call, attn_mask=rows)
    with capture(tmp_path, max_bytes=200_000) as session:
        run(call)
    (record,) = session.calls
    assert {row[0] for row in record.rows} == {5, 6, 7}
    assert record.kept is not None
    assert "batch row" in record.note
    found = dump.load(session.dumps[0])
    assert found.call.query.shape[0] < 8
    assert found.call.key.stride(1) == 0
    assert found.origin["note"] == record.note
    assert session.dumps[0].stat().st_size < 250_000


def test_a_dump_too_big_says_how_much_it_needs(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path, max_bytes=1000) as session:
        run(failing())
    (record,) = session.calls
    assert record.kept is None
    query = output = 4 * 33 * 136 * 2
    key_and_value = 2 * 33 * 136 * 2
    mask = -(-33 * 33 // 8)
    assert f"needs {query + output + key_and_value + mask} bytes" in record.note
    assert session.dumps == []


def test_without_the_live_check_the_first_calls_are_kept_unchecked(tmp_path: Path) -> None:
    with capture(tmp_path, check=False, max_dumps=2) as session:
        for _ in range(4):
            run(healthy())
    assert [call.status for call in session.calls] == ["unchecked"] * 4
    assert [call.kept is not None for call in session.calls] == [True, True, False, False]


def test_nothing_seen_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "hints", lambda *args, **words: [])  # what other tests left alive in this process
    with pytest.raises(InputError, match="no scaled_dot_product_attention call was seen") as error, capture(tmp_path):
        torch.ones(3)
    assert "\n" not in str(error.value)
    assert "if a transformers model is to be looked at" in str(error.value)


def test_calls_in_other_threads_alone_are_an_error_that_names_the_thread(tmp_path: Path) -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=run, args=(healthy(),), name="decoder thread")
        thread.start()
        thread.join()

    with pytest.raises(InputError, match=r"1 calls in thread 'decoder thread'.*all_threads=True"), capture(tmp_path):
        elsewhere()


def test_child_processes_are_named_when_nothing_was_seen(tmp_path: Path) -> None:
    import subprocess
    import sys

    with pytest.raises(InputError, match=r"child processes.*sdpa-repro capture -- script\.py"), capture(tmp_path):
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)


def test_models_with_another_attention_implementation_are_named(tmp_path: Path) -> None:
    class Config:
        _attn_implementation = "flash_attention_2"

    class SomeModel(nn.Module):
        config = Config()

        @classmethod
        def from_pretrained(cls) -> None: ...

    model = SomeModel()
    with pytest.raises(InputError, match="SomeModel uses attn_implementation='flash_attention_2'"), capture(tmp_path):
        model.eval()


def test_a_selection_that_matches_nothing_says_what_there_was(tmp_path: Path) -> None:
    reason = r"none of the 3 .*--module cross_attn.*layers\.0\.self_attn"
    with pytest.raises(InputError, match=reason), capture(tmp_path, module="cross_attn"):
        Decoder()(healthy())


@pytest.mark.parametrize("wrong", [{"phase": "both"}, {"keep": "some"}, {"max_dumps": 0}, {"max_bytes": 0}])
def test_options_that_do_not_exist_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError), capture(tmp_path, **wrong):
        pass


def test_a_folder_that_cannot_be_made_is_refused_before_the_block_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reached = []
    with pytest.raises(InputError, match="choose another --out"), capture(tmp_path / "file" / "dumps"):
        reached.append("block")
    assert reached == []


def test_a_full_disk_does_not_break_the_run(tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(document: Any, path: Path, **_: Any) -> int:
        raise InputError(f"cannot write {path}: no space left on device")

    plant("pytorch_191937")
    monkeypatch.setattr(dump, "save", full)
    said: list[str] = []
    with capture(tmp_path, progress=said.append) as session:
        assert run(failing()).shape == (1, 4, 33, 136)
    assert session.calls[0].status == "diverges"
    assert session.calls[0].kept is None
    assert "no space left" in session.summary()["problems"][0]
    assert not (tmp_path / "index.jsonl").exists()


def test_a_bug_in_the_recorder_does_not_break_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(Session, "_record", broken)
    with pytest.raises(InputError), capture(tmp_path) as session:
        assert run(healthy()).shape == (1, 4, 32, 136)
    assert session.summary()["problems"] == ["call 0: ValueError: a bug"]


def test_progress_says_so_the_moment_a_call_goes_bad(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    said: list[str] = []
    with capture(tmp_path, progress=said.append) as session:
        run(healthy())
        assert said == []
        run(failing())
        (line,) = said
    assert "call 1" in line
    assert "4 query rows" in line
    assert "batch 0, head 0, row 32" in line
    assert str(session.dumps[0]) in line


def test_the_summary_is_plain_json(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path) as session:
        run(healthy())
        run(failing())
    summary = session.summary()
    again = json.loads(json.dumps(summary))
    assert again["seen"] == again["checked"] == 2
    assert again["wrong"] == 1
    assert [call["status"] for call in again["calls"]] == ["agrees", "diverges"]
    assert again["dumps"] == [path.name for path in session.dumps]


def test_neither_prompts_nor_paths_enter_a_dump_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret-folder-name"
    with capture(secret) as session:
        run(healthy())
    assert b"secret-folder-name" not in session.dumps[0].read_bytes()
    assert str(Path.home()).encode() not in session.dumps[0].read_bytes() or str(Path.home()) == "/"


def test_a_real_models_output_is_the_same_with_the_recorder(tmp_path: Path) -> None:
    from sdpa_repro.capturing.tiny import tiny_gemma4, tiny_inputs

    model = tiny_gemma4(layers=2)
    inputs = tiny_inputs(model, length=40, images=0)
    with torch.inference_mode():
        expected = model(**inputs).logits
        with capture(tmp_path) as session:
            output = model(**inputs).logits
    assert torch.equal(output, expected)
    assert [call.module.split(".")[-3:] for call in session.calls] == [["layers", str(n), "self_attn"] for n in (0, 1)]
    assert session.calls[-1].key_head_stride == 0
    assert all(call.status == "agrees" for call in session.calls)


def test_problems_and_names_are_counted_but_not_all_of_them_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(document: Any, path: Path, **_: Any) -> int:
        raise InputError(f"cannot write {path}: no space left on device")

    monkeypatch.setattr(dump, "save", full)
    monkeypatch.setattr(session_module, "NAMES", 2)
    with capture(tmp_path, keep="all") as session:
        for number in range(30):
            thread = threading.Thread(target=run, args=(healthy(3),), name=f"request {number}")
            thread.start()
            thread.join()
            run(healthy(3))
    summary = session.summary()
    assert summary["elsewhere"] == {"request 0": 1, "request 1": 1, "others": 28}
    assert len(summary["problems"]) == 21
    assert summary["problems"][-1] == "10 more problems of the recorder"


def test_calls_that_could_not_be_recorded_are_not_called_a_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(Session, "_record", broken)
    said = r"none of the 1 .* could be recorded: call 0: ValueError: a bug"
    with pytest.raises(InputError, match=said), capture(tmp_path):
        run(healthy())


def test_nested_sessions_share_one_live_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    real = session_module.check

    def check(*arguments: Any, **words: Any) -> Any:
        judged.append(1)
        return real(*arguments, **words)

    monkeypatch.setattr(session_module, "check", check)
    with capture(tmp_path / "outer") as outer, capture(tmp_path / "inner") as inner:
        run(healthy())
    assert len(judged) == 1
    assert outer.calls[0].ratio == inner.calls[0].ratio


def test_a_session_that_stops_the_run_leaves_the_call_to_the_others(tmp_path: Path, plant: Plant) -> None:
    plant("pytorch_191937")
    with capture(tmp_path / "outer", stop_at_first=True) as outer, capture(tmp_path / "inner") as inner:
        run(failing())
    assert [call.status for call in outer.calls] == [call.status for call in inner.calls] == ["diverges"]


def test_what_is_finite_where_the_definition_gives_nan_is_said_to_be(tmp_path: Path) -> None:
    original = F.scaled_dot_product_attention
    query = torch.ones(1, 1, 3, 4)
    key = query.clone()
    key[..., 0, 0] = float("nan")  # every row sees it: each is NaN by definition

    def finite(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs).nan_to_num()

    F.scaled_dot_product_attention = finite
    try:
        with capture(tmp_path) as session:
            F.scaled_dot_product_attention(query, key, query)
    finally:
        F.scaled_dot_product_attention = original
    (call,) = session.calls
    assert call.status == "nonfinite"
    assert "finite where the definition gives NaN" in call.sentence()
    assert "NaN or Inf" not in call.sentence()


LOCKED = """
import os, sys, threading
import torch, torch.nn.functional as F
from sdpa_repro import capture

query = torch.randn(1, 1, 4, 8)
inside, forked = threading.Event(), threading.Event()

def hold(session):
    with session._lock:
        inside.set()
        forked.wait()

with torch.no_grad(), capture(sys.argv[1]) as session:
    F.scaled_dot_product_attention(query, query, query)
    holder = threading.Thread(target=hold, args=(session,))
    holder.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        F.scaled_dot_product_attention(query, query, query)
        sys.exit(0)
    forked.set()
    holder.join()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, len(session.calls))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no os.fork")
def test_a_child_that_was_forked_while_a_thread_held_the_session_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "0 1\n"
    assert index_is_sound(tmp_path)
    assert len(index(tmp_path)) == 2, "the child's call is the child's to dump, the parent's the parent's"
