"""From a dump to a small dump that fails when it is read back: pytorch#191937, from three starting points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.environment import preload
from sdpa_repro.errors import InputError
from sdpa_repro.recipe import build, from_document
from sdpa_repro.reducing.dump_reducer import ReducedDump, reduce_dump, scrubbed
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.verdict import Status
from tests.calls import causal_mask, make_call
from tests.explaining.test_explain import replayed

FAULTS = Path(__file__).resolve().parents[1] / "faults"
FAULT = FAULTS / "pytorch_191937.py"
QUIET_SECONDS = 240.0

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def real_kernels_afterwards() -> Iterator[None]:
    yield
    if "emulation" in sys.modules:
        sys.modules["emulation"].restore()


def written(call: AttentionCall, path: Path) -> Path:
    save(snapshot(call, context={"grad": False, "device": "cpu"}, origin={"module": "attn", "command": "secret"}), path)
    return path


def gemma(folder: Path) -> Path:
    """The wrong call of the embedded model: 282 tokens with an image, 7 of padding."""
    from sdpa_repro.capturing.session import capture
    from sdpa_repro.capturing.tiny import tiny_gemma4, tiny_inputs

    model = tiny_gemma4()
    inputs = tiny_inputs(model)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = pad(inputs[name], (7, 0))
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    records = preload([FAULT])
    with torch.no_grad(), capture(folder, preloaded=records):
        model(**inputs, use_cache=False)
    (path,) = folder.glob("*.pt")
    return path


def llama(folder: Path) -> Path:
    """One key/value head at head_dim 128; 257 is the wrong kind of length there."""
    return written(make_call(heads=8, rows=257, width=128, padding=3), folder / "x.pt")


def by_hand(folder: Path) -> Path:
    return written(make_call(heads=16, rows=289, width=512), folder / "x.pt")


@pytest.mark.parametrize("start", [gemma, llama, by_hand], ids=lambda start: str(start.__name__))
def test_the_fault_of_gemma_4_comes_down_to_65_rows(start: Callable[[Path], Path], tmp_path: Path) -> None:
    found = reduce_dump(start(tmp_path), tmp_path / "small.pt", preload=[FAULT])
    assert (found.proven, found.exit_status, found.backend) == (True, 1, "FLASH_ATTENTION")
    small = load(tmp_path / "small.pt")
    assert small.call.query.shape == (1, 2, 65, 8)
    assert small.call.key.stride() == small.call.value.stride() == (65 * 8, 0, 8, 1)
    assert small.call.attn_mask is not None
    assert torch.equal(small.call.attn_mask, causal_mask(65, 65))
    assert (small.call.scale, small.call.is_causal, small.call.enable_gqa) == (None, False, False)
    assert_closed(found, tmp_path / "small.pt")
    rows = {row.name: row for row in found.reduction.rows} if found.reduction else {}
    assert rows["key and value layout"].neighbour == "dense key and value pass"
    assert {name for name, row in rows.items() if row.needed} == {"H", "L", "mask", "key and value layout"}


def assert_closed(found: ReducedDump, path: Path) -> None:
    """Every tensor of the file is its recipe, bits and strides."""
    small = load(path)
    assert small.recipe is not None
    assert set(small.recipe) == set(small.call.tensors)
    for name, tensor in small.call.tensors.items():
        built = build(from_document(small.recipe[name]))
        assert torch.equal(built, tensor)
        assert built.stride() == tensor.stride()
    assert found.reduction is not None
    assert found.reduction.seconds < QUIET_SECONDS


def test_the_small_dump_keeps_what_ran_and_drops_where_it_came_from(tmp_path: Path) -> None:
    path = written(make_call(heads=2, rows=65, width=16), tmp_path / "x.pt")
    found = reduce_dump(path, preload=[FAULT])
    small = load(tmp_path / "x.min.pt")
    assert found.output == tmp_path / "x.min.pt"
    assert small.origin == {"module": "attn"}
    assert (small.live or {})["ran"] == "FLASH_ATTENTION"
    assert (small.live or {})["rows"] == [[0, 0, 64], [0, 1, 64]]
    assert small.preloaded[0]["name"] == FAULT.name
    assert small.output is not None
    assert small.output[0, 0, 63, 0] == 31.5  # the mean of 0 … 63
    assert small.output[0, 0, 64, 0] == 0.0  # mask row 0 sees the first position alone


def test_a_dump_that_does_not_fail_is_said_to_have_nothing_to_reduce(tmp_path: Path) -> None:
    path = written(make_call(heads=2, rows=64, width=16), tmp_path / "x.pt")
    found = reduce_dump(path, preload=[FAULT])
    assert (found.reduction, found.output, found.exit_status) == (None, None, 0)
    assert found.sentence.startswith("there is nothing to reduce: ")
    assert not (tmp_path / "x.min.pt").exists()


def test_a_budget_that_is_used_up_still_writes_a_call_that_fails(tmp_path: Path) -> None:
    path = written(make_call(heads=2, rows=65, width=16), tmp_path / "x.pt")
    found = reduce_dump(path, preload=[FAULT], budget=1e-6)
    assert found.reduction is not None
    assert (found.reduction.stopped, found.proven) == ("time", True)
    assert load(tmp_path / "x.min.pt").call.query.shape == (1, 2, 65, 16)


@pytest.mark.parametrize("planted", [True, False])
def test_a_shorter_call_is_reduced_where_there_is_no_time_to_judge_the_dumped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    path = written(make_call(heads=2, rows=1025, width=16), tmp_path / "x.pt")
    seen = replayed((Cell("default", "bfloat16", Status.DECLINED),))
    monkeypatch.setattr(
        "sdpa_repro.reducing.dump_reducer.replay_within",
        lambda *args, **words: (replace(seen, path=path), ("MATH", "eager", "reference")),
    )
    found = reduce_dump(path, preload=[FAULT] if planted else [], budget=QUIET_SECONDS)
    if not planted:
        assert found.sentence.startswith("no answer: ")
        assert (found.reduction, found.output, found.exit_status) == (None, None, 2)
        return
    assert found.reduction is not None
    assert (found.proven, found.exit_status) == (True, 1)
    assert found.sentence.endswith("; the dumped call itself did not come to an end in this time")
    assert load(tmp_path / "x.min.pt").call.query.shape[-2] == 65


def test_an_invalid_call_is_an_error(tmp_path: Path) -> None:
    call = make_call(heads=2, rows=65, width=16, mask=None)
    short = written(replace(call, value=call.value[:, :, :60]), tmp_path / "x.pt")
    with pytest.raises(InputError, match="nothing to reduce"):
        reduce_dump(short)


def test_the_dump_itself_is_never_overwritten(tmp_path: Path) -> None:
    path = written(make_call(heads=2, rows=65, width=16), tmp_path / "x.pt")
    with pytest.raises(InputError, match="the dump itself"):
        reduce_dump(path, path)
    with pytest.raises(InputError, match="folder that exists"):
        reduce_dump(path, tmp_path / "no" / "y.pt")


@pytest.mark.parametrize(
    ("model", "kept"),
    [("google/gemma-4", "google/gemma-4"), ("/data/someone/secret/gemma", "gemma"), ("..\\x\\gemma", "gemma")],
)
def test_a_model_that_is_a_path_loses_its_folders(model: str, kept: str) -> None:
    assert scrubbed({"model": model, "prompt": "x", "command": "y", "module": "m"}) == {"model": kept, "module": "m"}
