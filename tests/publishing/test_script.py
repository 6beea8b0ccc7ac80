"""Scripts: what they build, how long they are, and that foreign text adds nothing to them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from sdpa_repro.attention import AttentionCall, rebuild
from sdpa_repro.dump import load, save, snapshot
from sdpa_repro.errors import InputError
from sdpa_repro.publishing.limit import errors_in, fitted_limit, rounding_limit
from sdpa_repro.publishing.script import script
from sdpa_repro.publishing.story import Story, switches
from sdpa_repro.publishing.tensor_lines import NAMES, tensor_lines
from sdpa_repro.publishing.versions import results_in
from sdpa_repro.recipe import Kind, Recipe
from tests.calls import make_call
from tests.definition import attention
from tests.publishing.calls import HOSTILE, closed, tail

CALLS: dict[str, dict[str, Any]] = {
    "expanded bool mask": {},
    "grouped queries": {"heads": 4, "kv_heads": 2},
    "float mask": {"mask": "float"},
    "is_causal": {"mask": "flag"},
    "is_causal, L > S": {"mask": "flag", "rows": 9, "keys": 5},
    "no mask": {"mask": None},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "one row": {"rows": 1, "keys": 7, "mask": None},
    "scale": {"scale": 0.3},
    "scale 1": {"scale": 1.0},
    "fully masked rows": {"padding": 3},
    "fully masked rows, float": {"padding": 3, "mask": "float"},
}
calls = pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)


def executed(text: str, until: str = "wrong = []") -> dict[str, Any]:
    """The variables of a script up to its loop over the backends, run in this process."""
    head = text[: text.index(until)].rstrip()
    while head.splitlines()[-1].lstrip().startswith("print("):
        head = head.rpartition("\n")[0]
    space: dict[str, Any] = {"__file__": "repro.py"}
    exec(compile(head, "repro.py", "exec"), space)
    return space


def assert_same(made: Tensor, wanted: Tensor) -> None:
    assert (made.dtype, made.shape, made.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.element_size()]
    assert torch.equal(made.contiguous().view(words), wanted.contiguous().view(words))


@calls
def test_a_script_builds_the_tensors_of_the_call_bit_for_bit(arguments: dict[str, Any]) -> None:
    call, recipes = closed(**arguments)
    made = executed(script(call, recipes, Story("MATH")))
    for name, tensor in call.tensors.items():
        assert_same(made[NAMES[name]], tensor)


@calls
def test_its_reference_is_the_definition(arguments: dict[str, Any]) -> None:
    call, recipes = closed(**arguments)
    made = executed(script(call, recipes, Story("MATH")))
    right = attention(call)
    live = made.get("live", torch.ones(right.shape[:-1], dtype=torch.bool))
    assert torch.allclose(made["expected"][live], right[live], rtol=1e-12, atol=1e-12)
    assert int((~live).sum()) == (2 * 3 if arguments.get("padding") else 0)


@calls
@pytest.mark.parametrize("status", ["diverges", "crashed"])
def test_it_has_at_most_40_lines_of_120_columns_and_imports_torch_alone(arguments: dict[str, Any], status: str) -> None:
    call, recipes = closed(**arguments, values=Kind.RANDINT if status == "diverges" else Kind.ZEROS)
    needs = ("an attn_mask", "key and value expanded from one head (head stride 0)", "no grad", "L % 32 == 1")
    cause = "FLASH_ATTENTION: the last query row (32) was computed with mask row 0, when L % 32 == 1 and L > 1."
    text = script(call, recipes, Story("FLASH_ATTENTION", status, cause, needs))
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    imported = {node.names[0].name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)}
    assert imported <= {"torch", "torch.nn.functional", "subprocess", "sys"}


def test_only_the_branches_that_a_call_needs_are_written() -> None:
    plain, recipes = closed(mask=None)
    text = script(plain, recipes, Story("MATH"))
    assert "mask" not in text
    assert "scale" not in text.replace("scaled_dot", "")
    assert "live" not in text
    flagged, recipes = closed(mask="flag", heads=4, kv_heads=2)
    text = script(flagged, recipes, Story("MATH"))
    assert "is_causal=True" in text
    assert "enable_gqa=True" in text
    assert ".repeat_interleave(2, -3)" in text


def test_the_layout_that_matters_is_remarked_on() -> None:
    call, recipes = tail()
    text = script(call, recipes, Story("FLASH_ATTENTION", remarks={"key": ".contiguous() hides the bug"}))
    line = next(line for line in text.splitlines() if line.startswith("key = "))
    assert line.endswith(".expand(1, 2, 33, 136)  # .contiguous() hides the bug")


def test_grad_mode_and_switches_are_those_that_were_recorded() -> None:
    call, recipes = closed()
    context = {
        "grad": True,
        "inference": False,
        "requires_grad": {"query": True, "key": False},
        "matmul_precision": "high",
        "device": "cuda:3",
        "autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    text = script(call, recipes, Story("EFFICIENT_ATTENTION", **switches(context)))
    assert "no_grad" not in text
    assert "query.requires_grad_()" in text
    assert "key.requires_grad_()" not in text
    assert 'torch.set_float32_matmul_precision("high")' in text
    assert 'device = "cuda" if torch.cuda.is_available() else "cpu"' in text
    assert "torch.autocast(device, torch.bfloat16)" in text
    assert "with torch.no_grad():" in script(call, recipes, Story("MATH", **switches({})))


def test_hostile_context_adds_nothing() -> None:
    for text in HOSTILE.values():
        found = switches({"device": text, "autocast": {"enabled": True, "dtype": text}, "matmul_precision": text})
        assert found["device"] == "cpu"
        assert found["autocast"] is None
        assert found["settings"] == ()


def test_the_guilty_backend_comes_last_where_it_may_end_the_process() -> None:
    call, recipes = closed()
    text = script(call, recipes, Story("FLASH_ATTENTION", "crashed"))
    order = text[text.index("for name in (") :].splitlines()[0]
    assert order.endswith('"default", "FLASH_ATTENTION"):')
    assert "flush=True" in text
    assert "timeout" not in text
    assert "timeout=30" in script(call, recipes, Story("FLASH_ATTENTION", "timeout"))


def test_a_script_about_a_crash_stays_short() -> None:
    call, recipes = closed(rows=1, keys=2, mask=None, values=Kind.ZEROS)
    text = script(
        call, recipes, Story("FLASH_ATTENTION", "crashed", "FLASH_ATTENTION crashes, when L == 1.", ("L == 1",))
    )
    assert len(text.splitlines()) <= 34


def kernel_of(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Every backend of this process does what `change` makes of the right output."""
    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *words, **names: change(right(*words, **names))
    )


def nan_in_row_2() -> tuple[AttentionCall, dict[str, Recipe], str]:
    """A call whose query row 2 is NaN by definition, its recipes, and a line for its script that makes it so."""
    call, recipes = closed(rows=5, keys=5, dtype=torch.float32)
    query = call.query.clone()
    query[..., 2, :] = torch.nan
    return replace(call, query=query), recipes, "query[..., 2, :] = torch.nan"


def ran(text: str, more: str = "") -> None:
    exec(compile(text.replace("\n\nwith torch", f"\n{more}\n\nwith torch"), "repro.py", "exec"), {})


def test_rows_that_are_nan_by_definition_accuse_nobody_who_leaves_nan_there() -> None:
    call, recipes, line = nan_in_row_2()
    ran(script(call, recipes, Story("MATH")), line)


def test_a_number_where_the_definition_has_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    call, recipes, line = nan_in_row_2()
    kernel_of(monkeypatch, lambda output: output.nan_to_num(0.0))
    with pytest.raises(AssertionError, match="wrong result from MATH"):
        ran(script(call, recipes, Story("MATH", "nonfinite")), line)


def test_what_fails_now_and_then_is_run_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    call, recipes = closed(rows=5, keys=5, padding=2)
    calls: list[int] = []

    def seventh_is_wrong(output: Tensor) -> Tensor:
        calls.append(1)
        return output + 100 * (len(calls) == 7)

    kernel_of(monkeypatch, seventh_is_wrong)
    text = script(call, recipes, Story("MATH", runs=20))
    assert text.splitlines()[1] == "# It does not fail every time: each backend runs 20 times."
    with pytest.raises(AssertionError, match=r"^wrong result from MATH$"):
        ran(text)


def test_a_backend_that_raises_fails_the_script_and_one_that_declines_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(output: Tensor) -> Tensor:
        raise RuntimeError("no engine for this")

    call, recipes = closed(rows=5, keys=5)
    kernel_of(monkeypatch, broken)
    with pytest.raises(AssertionError, match=r"^error raised by FLASH_ATTENTION, default$"):
        ran(script(call, recipes, Story("FLASH_ATTENTION", "error")))
    said = results_in(capsys.readouterr().out)
    assert (said["MATH"], said["FLASH_ATTENTION"]) == ("declined", "error")


def test_a_backend_from_elsewhere_is_run_by_its_name() -> None:
    call, recipes = closed(rows=5, keys=5)
    assert 'for name in ("OVERRIDEABLE", "MATH", ' in script(call, recipes, Story("OVERRIDEABLE"))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_sentences_do_not_change_the_program(text: str) -> None:
    call, recipes = closed()
    plain = script(call, recipes, Story("FLASH_ATTENTION", cause="x", needs=("y",), limit=0.1, limit_reason="z"))
    story = Story("FLASH_ATTENTION", cause=text, needs=(text, text), limit=0.1, limit_reason=text)
    assert ast.dump(ast.parse(script(call, recipes, story))) == ast.dump(ast.parse(plain))
    assert max(map(len, script(call, recipes, story).splitlines()[:9])) <= 120


LAYOUTS = {
    "dense": lambda t: t,
    "expanded heads": lambda t: t[:, :1].expand(t.shape),
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "as repeat_kv leaves one head": lambda t: t[:1, :1].as_strided((1, *t.shape[1:]), (0, 0, *t.stride()[2:])),
    "all the same": lambda t: t[:1, :1, :1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_values_written_out_rebuild_the_tensor_with_its_strides(layout: Any, dtype: torch.dtype) -> None:
    values = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(1))
    tensor = layout((values > 0) if dtype == torch.bool else values.to(dtype))
    call, recipes = closed(rows=5, keys=5, width=3, mask=None)
    call = replace(call, value=tensor.float() if dtype == torch.bool else tensor)
    if dtype == torch.bool:
        call = replace(call, attn_mask=tensor[..., :1].expand(1, 2, 5, 5))
        rest = {name: recipe for name, recipe in recipes.items() if name != "value"}
        tensors = tensor_lines(call, rest, inline=True)
        wanted, name = call.attn_mask, "attn_mask"
    else:
        rest = {name: recipe for name, recipe in recipes.items() if name != "value"}
        tensors = tensor_lines(call, rest, inline=True)
        wanted, name = tensor, "value"
    space: dict[str, Any] = {"torch": torch, "device": "cpu"}
    exec("\n".join(tensors.lines), space)
    assert wanted is not None
    assert_same(space[NAMES[name]], wanted)
    assert name in tensors.inline
    assert max(len(line) for line in tensors.lines) <= 120 or all(
        "\n" in line for line in tensors.lines if len(line) > 120
    )


def test_one_head_as_repeat_kv_leaves_it_is_one_line() -> None:
    call, recipes = closed(rows=5, keys=5, width=3, mask=None)
    value = LAYOUTS["as repeat_kv leaves one head"](torch.randn(1, 2, 5, 3))
    del recipes["value"]
    (last,) = tensor_lines(replace(call, value=value), recipes, file="x.pt").lines[-1:]
    assert last == 'value = stored["value"]["data"].to(device)[0].expand(1, 2, 5, 3)'


def test_infinities_nan_and_negative_zero_survive_being_written_out() -> None:
    call, recipes = closed(rows=2, keys=2, width=2, mask=None)
    odd = (
        torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40], dtype=torch.float32)
        .view(1, 1, 2, 2)
        .expand(1, 2, 2, 2)
    )
    call = replace(call, value=odd)
    del recipes["value"]
    space: dict[str, Any] = {"torch": torch, "device": "cpu"}
    exec("\n".join(tensor_lines(call, recipes, inline=True).lines), space)
    assert_same(space["value"], odd)


def test_captured_values_stay_out_of_a_script_unless_they_may_go_in(tmp_path: Path) -> None:
    call, recipes = closed(rows=5, keys=5, width=3)
    del recipes["key"]
    story = Story("MATH")
    text = script(call, recipes, story)
    assert "torch.tensor(" not in text
    assert 'torch.load(Path(__file__).with_name("call.pt"), weights_only=True)' in text
    second = "# No closed form of key was found that still fails: the values are read from call.pt (plain tensors)."
    assert text.splitlines()[:2] == ["# MATH gives a wrong result.", second]
    assert "closed form" not in script(call, recipes, replace(story, searched=False))
    assert "torch.tensor([" in script(call, recipes, replace(story, inline=True))


@pytest.mark.parametrize("layout", ["expanded", "dense", "gqa"])
@pytest.mark.parametrize("mask", ["causal", "float"])
def test_values_read_from_the_dump_rebuild_the_tensors(tmp_path: Path, layout: str, mask: str) -> None:
    call = rebuild(make_call(heads=4, kv_heads=2 if layout == "gqa" else 1, rows=9, width=24, layout=layout, mask=mask))
    save(snapshot(call), tmp_path / "call.pt")
    loaded = load(tmp_path / "call.pt").call
    tensors = tensor_lines(loaded, {})
    space: dict[str, Any] = {"torch": torch, "Path": Path, "device": "cpu", "__file__": str(tmp_path / "repro.py")}
    exec("\n".join(tensors.lines), space)
    for name, tensor in call.tensors.items():
        assert_same(space[NAMES[name]], tensor)
    assert tensors.stored == tuple(call.tensors)


def test_a_value_inside_key_stays_inside_it(tmp_path: Path) -> None:
    key = torch.randn(1, 2, 5, 8)
    call = AttentionCall(torch.randn(1, 2, 5, 8), key, key[..., :4])
    save(snapshot(call), tmp_path / "call.pt")
    tensors = tensor_lines(load(tmp_path / "call.pt").call, {})
    space: dict[str, Any] = {"torch": torch, "Path": Path, "device": "cpu", "__file__": str(tmp_path / "repro.py")}
    exec("\n".join(tensors.lines), space)
    assert_same(space["value"], key[..., :4])
    assert space["value"].data_ptr() == space["key"].data_ptr()
    assert "value = key[..., :4]" in tensors.lines


def test_tensors_that_overlap_in_a_tangle_are_refused() -> None:
    key = torch.randn(1, 1, 80).unfold(-1, 8, 1)[:, :, :9][:, :, :, :]
    call = AttentionCall(torch.randn(1, 1, 9, 8), key, torch.randn(1, 1, 9, 8))
    with pytest.raises(InputError, match="overlaps itself"):
        tensor_lines(call, {}, inline=True)


def test_the_limit_is_twice_the_rounding_of_the_largest_value() -> None:
    call, _ = tail()
    limit, reason = rounding_limit(call)
    assert limit == 2 * 2**-8 * 32
    assert reason == "twice bfloat16's rounding of values up to 32"


@pytest.mark.parametrize(
    ("errors", "limit"),
    [
        ({"MATH": 0.01, "FLASH_ATTENTION": 3.0}, 0.25),
        ({"MATH": 0.5, "FLASH_ATTENTION": 2.0}, 1.0),
        ({"MATH": 0.2, "FLASH_ATTENTION": 3.2}, 0.8),
        ({"MATH": 0.01, "FLASH_ATTENTION": 0.04}, 0.02),
        ({"MATH": 0.0, "FLASH_ATTENTION": 0.1}, 0.05),
        ({"MATH": 0.5, "FLASH_ATTENTION": float("nan")}, 2.0),
        ({"MATH": 0.01, "FLASH_ATTENTION": float("nan"), "default": 9.0}, 0.25),
        ({"MATH": 0.5, "FLASH_ATTENTION": 0.4}, None),
    ],
)
def test_a_limit_lies_between_right_and_wrong(errors: dict[str, float], limit: float | None) -> None:
    call, _ = tail()
    found = fitted_limit(call, errors, {"FLASH_ATTENTION"})
    assert (found[0] if found else None) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (range(33), "0-32"),
        ([0, 2, 3, 32], "0, 2-3, 32"),
        (range(0, 18, 2), "0, 2, 4, 6, 8, 10, 12, 14, ..."),
        (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
    ],
)
def test_the_wrong_rows_are_printed_as_ranges(
    rows: Any, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call, recipes = tail()
    right = attention(call)
    wrong = right.clone()
    wrong[:, 1, list(rows)] += 9
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *words, **more: wrong)
    with pytest.raises(AssertionError, match="wrong result from MATH"):
        exec(script(call, recipes, Story("MATH", limit=0.5)), {})
    line = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("MATH "))
    assert line.endswith(f"  wrong in query rows {shown}")


def test_errors_are_read_from_the_output_of_a_script() -> None:
    output = (
        "torch 2.13.0 on cpu; largest error against float64, at most 0.25 is rounding\n"
        "MATH                  3.553e-15\nFLASH_ATTENTION              16  wrong in query rows 32\n"
        "EFFICIENT_ATTENTION  declined: No viable backend\nCUDNN_ATTENTION             nan  wrong in query rows 1\n"
    )
    found = errors_in(output)
    assert {name: str(error) for name, error in found.items()} == {
        "MATH": "3.553e-15",
        "FLASH_ATTENTION": "16.0",
        "CUDNN_ATTENTION": "nan",
    }


def test_a_long_line_is_broken_between_its_calls() -> None:
    call, recipes = closed(rows=5, keys=5)
    wide = Recipe(Kind.ARANGE, (9999,) * 4, torch.bfloat16, period=31, expanded=(9999,) * 4)
    lines = tensor_lines(call, {**recipes, "value": replace(wide, transposed=(1, 2))}).lines
    assert max(map(len, lines)) <= 120
    made = [text for text in lines if text.startswith("value = ")]
    assert made[0].startswith("value = (torch.arange(9999) % 31).to(torch.bfloat16).view(1, 1, 9999, 1)")
    assert made[1] == "value = value.expand(9999, 9999, 9999, 9999).transpose(1, 2)"


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_stays_the_rule_it_is(bias: Any) -> None:
    call, recipes = closed(rows=5, keys=9, mask=None)
    text = script(replace(call, attn_mask=bias(5, 9)), recipes, Story("MATH"))
    made = executed(text)
    assert f"from torch.nn.attention.bias import {bias.__name__}" in text
    diagonal = 0 if bias is causal_upper_left else 4
    visible = torch.ones(5, 9, dtype=torch.bool).tril(diagonal)
    right = attention(replace(call, attn_mask=visible))
    assert torch.allclose(made["expected"], right, rtol=1e-12, atol=1e-12)
    assert type(made["mask"]).__name__ == "CausalBias"
