"""Dumps for strangers: what goes, what stays, and that the failure stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_repro.attention import AttentionCall
from sdpa_repro.dump import layout_differences, load, save, snapshot
from sdpa_repro.environment import capture_context
from sdpa_repro.errors import InputError
from sdpa_repro.publishing import share as sharing
from sdpa_repro.publishing.share import share, with_seeded
from sdpa_repro.recipe import to_document
from sdpa_repro.replaying.trial import Result, Trial
from tests.calls import make_call
from tests.faults import emulation
from tests.publishing.calls import FAULTS, tail

ORIGIN = {
    "model": "secret/model",
    "module": "model.layers.5.self_attn",
    "command": "capture --prompt 'my secret'",
    "note": "secret",
    "phase": "prefill",
    "padding": 7,
}
ENVIRONMENT = {"torch": torch.__version__, "torch_path": "/srv/secret/torch", "platform": "secret-host", "gpu": "H100"}


def dumped(path: Path, call: AttentionCall, **more: Any) -> Path:
    with torch.no_grad():
        context = capture_context(call)
    save(snapshot(call, context=context, origin=ORIGIN, environment=ENVIRONMENT, **more), path)
    return path


@pytest.mark.parametrize("layout", ["expanded", "dense"])
def test_seeded_values_keep_the_layout_and_replace_every_value(layout: str) -> None:
    call = make_call(rows=9, width=24, layout=layout)
    other = with_seeded(call, ("query", "key", "value"), seed=3)
    assert [text for text in layout_differences(call, other) if "apart" not in text] == []
    for name in ("query", "key", "value"):
        assert not torch.equal(call.tensors[name], other.tensors[name])
    again = with_seeded(call, ("query", "key", "value"), seed=3)
    assert torch.equal(other.value, again.value)
    one = with_seeded(call, ("value",), seed=3)
    assert torch.equal(one.key, call.key)
    assert one.attn_mask is not None
    assert torch.equal(one.attn_mask, call.attn_mask)


def test_values_of_their_own_size_keep_the_power_of_two_alone() -> None:
    call = make_call(rows=64, width=64)
    call = replace(call, value=call.value * 100)
    spread = float(with_seeded(call, ("value",), 0, own_size=True).value.double().square().mean().sqrt())
    assert 120 < spread < 136


def test_a_value_inside_key_changes_with_it() -> None:
    key = torch.randn(1, 2, 5, 8)
    call = AttentionCall(torch.randn(1, 2, 5, 8), key, key[..., :4])
    other = with_seeded(call, ("key",), seed=0)
    assert torch.equal(other.value, other.key[..., :4])
    assert other.value.data_ptr() == other.key.data_ptr()


@pytest.mark.slow
def test_names_paths_and_values_go_and_the_failure_stays(tmp_path: Path) -> None:
    call = make_call(rows=33, heads=2, width=136, padding=7, seed=5)
    path = dumped(tmp_path / "x.pt", call)
    try:
        result = share(path, tmp_path / "y.pt", preload=[FAULTS / "pytorch_191937.py"])
    finally:
        emulation.restore()
    assert result.exit_status == 0
    assert result.sentence.startswith("no captured values inside: query, key and value are seeded")
    made = load(tmp_path / "y.pt")
    assert b"secret" not in (tmp_path / "y.pt").read_bytes()
    assert made.origin == {
        "phase": "prefill",
        "padding": 7,
        "values": "seeded normal in query, key and value",
    }
    assert set(made.environment) == {"torch", "gpu"}
    assert made.live is not None
    assert made.live["status"] == "diverges"
    assert not torch.equal(made.call.value, call.value)
    assert made.call.key.stride() == call.key.stride()
    with pytest.raises(InputError, match="there already"):
        share(path, tmp_path / "y.pt")


@pytest.mark.slow
def test_where_the_failure_needs_the_values_it_says_so(tmp_path: Path) -> None:
    call, _ = tail()
    quiet = replace(call, query=call.query + 0.0)
    path = dumped(tmp_path / "x.pt", quiet)
    result = share(path, tmp_path / "y.pt", keep_names=True)
    assert result.exit_status == 1
    assert result.sentence.startswith("query, key and value hold REAL values, which may reveal the input")
    assert "no backend fails here" in result.sentence
    made = load(tmp_path / "y.pt")
    assert made.origin["model"] == "secret/model"
    assert "command" not in made.origin
    assert torch.equal(made.call.value, call.value)


def test_the_dump_itself_is_never_overwritten(tmp_path: Path) -> None:
    path = dumped(tmp_path / "x.pt", make_call(rows=3, width=8))
    for force in (False, True):
        with pytest.raises(InputError, match="there already"):
            share(path, path, force=force)


def test_a_place_where_nothing_can_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dumped(tmp_path / "x.pt", make_call(rows=3, width=8))
    monkeypatch.setattr(sharing, "replay", None)
    with pytest.raises(InputError, match=r"x\.pt is no folder; choose another one with -o"):
        share(path, path / "y.pt")


@pytest.mark.slow
def test_values_in_closed_form_are_not_called_real_where_others_were_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(
        call: AttentionCall, trial: Trial, first: Result, *_: object
    ) -> tuple[AttentionCall, tuple[str, ...], Result]:
        other = with_seeded(call, ("query", "value"), 0)
        return other, ("query", "value"), trial(other)

    call, recipes = tail()
    path = dumped(tmp_path / "x.pt", call, recipe={"key": to_document(recipes["key"])})
    monkeypatch.setattr(sharing, "_anonymous", two)
    result = share(path, tmp_path / "new" / "y.pt", preload=[FAULTS / "pytorch_191937.py"])
    assert (result.seeded, result.real, result.exit_status) == (("query", "value"), (), 0)


@pytest.mark.slow
def test_a_failure_that_is_not_there_without_the_preload_is_not_claimed(tmp_path: Path) -> None:
    call, recipes = tail()
    live = {"ran": "FLASH_ATTENTION", "status": "diverges", "max_abs": 32.0, "note": "secret"}
    path = dumped(
        tmp_path / "x.pt",
        call,
        recipe={name: to_document(recipe) for name, recipe in recipes.items()},
        preloaded=[{"name": "fault.py", "sha256": "ab" * 32}],
        live=live,
    )
    result = share(path, tmp_path / "y.pt")
    assert result.exit_status == 0
    assert result.sentence == (
        "no captured values inside: query, key and value are in closed form and it is not shown to fail here "
        "(it was captured with preloaded files: add --preload fault.py); sizes, layout and mask are as captured"
    )
    made = load(tmp_path / "y.pt")
    assert made.live == {"ran": "FLASH_ATTENTION", "status": "diverges", "max_abs": 32.0}
    assert [record["name"] for record in made.preloaded] == ["fault.py"]
